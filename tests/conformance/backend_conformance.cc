#include "tests/conformance/backend_conformance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "attention/problem_text.h"
#include "attention/tensor_view.h"
#include "kernels/reference_backend.h"
#include "tests/conformance/conformance_averages.h"
#include "tests/conformance/conformance_launch.h"
#include "tests/conformance/conformance_shards.h"
#include "tests/conformance/hidden_numbers.h"

namespace attnd {
namespace {

constexpr double kDoubleNan = std::numeric_limits<double>::quiet_NaN();

uint64_t SeedOf(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
  for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

void StoreAt(ElementType element, AlignedBytes& tensor, int64_t index, double value) {
  StoreElement(element, tensor.data(), index, static_cast<float>(value));
}

// One number becomes the case's value; so far back that under a causal mask some rows do not see
// it.
void Apply(const ConformanceCase& test_case, ProblemInputs& inputs) {
  const Problem& p = test_case.problem;
  auto poison = [&](AlignedBytes& tensor, ElementType element, int64_t row_length) {
    const int64_t place = tensor.size() / ElementBytes(element) * test_case.poison_eighths / 8;
    const int64_t first = test_case.poisons_row ? place / row_length * row_length : place;
    for (int64_t n = 0; n < (test_case.poisons_row ? row_length : 1); ++n) {
      StoreAt(element, tensor, first + n, test_case.poison_value);
    }
  };
  switch (test_case.poison) {
    case Poison::kNone:
      return;
    case Poison::kQuery:
      return poison(inputs.q, p.element, p.qk_head_dim);
    case Poison::kKey:
      return poison(inputs.k, p.element, p.qk_head_dim);
    case Poison::kValue:
      return poison(inputs.v, p.element, p.v_head_dim);
    case Poison::kOutputGradient:
      return poison(inputs.d_o, p.element, p.v_head_dim);
    case Poison::kBias:
      return poison(inputs.bias, p.bias->element, p.bias->shape.columns);
    case Poison::kLseGradient:
      return poison(inputs.d_lse, ElementType::kFloat32, 1);
  }
}

ReferenceTensors TensorsOf(const ProblemInputs& inputs) {
  return {inputs.q.data(), inputs.k.data(), inputs.v.data(), inputs.mask_bits.as<uint8_t>(),
          inputs.bias.data()};
}

double LargestFinite(ElementType element) {
  switch (element) {
    case ElementType::kFloat16:
      return 65504;
    case ElementType::kBFloat16:
      return 0x1.fep127;
    case ElementType::kFloat32:
      return std::numeric_limits<float>::max();
  }
  return 0;
}

// Compares an engine's tensor with the exact numbers and the bounds of their errors.
struct Comparison {
  const char* tensor;
  ElementType element;
  const Bytes& got;
  const std::vector<double>& exact;
  const std::vector<double>& bounds;
  bool leaks_allowed;  // a finite number may have become non-finite
};

// The size of the error in bounds: above 1 it is a failure.
double ErrorRatio(const Comparison& c, double exact, double bound, double got) {
  constexpr double kWrong = std::numeric_limits<double>::infinity();
  if (std::isinf(exact) && exact < 0 && c.tensor == std::string("lse")) {
    return got == exact ? 0 : kWrong;  // the row without visible keys
  }
  if (!std::isfinite(exact)) return std::isfinite(got) ? kWrong : 0;
  if (!std::isfinite(got)) {
    bool overflow = std::fabs(exact) + bound >= LargestFinite(c.element) && !std::isnan(got);
    return overflow || c.leaks_allowed ? 0 : kWrong;
  }
  if (std::isnan(bound) || got == exact) return 0;
  return std::fabs(got - exact) / bound;
}

class CaseChecker {
 public:
  CaseChecker(Backend& backend, const ConformanceCase& test_case, const ConformanceOptions& options)
      : backend_(backend),
        case_(test_case),
        problem_(test_case.problem),
        options_(options),
        memory_(options.memory()),
        inputs_(RandomInputs(problem_, SeedOf(test_case.name), test_case.values)),
        other_inputs_(RandomInputs(problem_, SeedOf(test_case.name) + 1)),
        companion_(RandomProblem(7, {.max_pairs = 500, .max_head_dim = 64})),
        companion_inputs_(RandomInputs(companion_, 8)) {
    Apply(test_case, inputs_);
  }

  CaseReport Run() {
    reference_.emplace(problem_, TensorsOf(inputs_));
    exact_ = reference_->Forward();
    if (Supported(Direction::kForward)) CheckForward();
    if (Supported(Direction::kBackward)) CheckBackward();
    if (report_.failures.empty() && case_.poison == Poison::kNone) {
      CheckUnseenKeys();
      if (!case_.brief) CheckShards();
    }
    return std::move(report_);
  }

 private:
  bool Supported(Direction direction) {
    absl::Status status = backend_.Supports(problem_, direction);
    if (status.ok()) return true;
    ++report_.unsupported;
    if (!absl::IsUnimplemented(status)) Fail(absl::StrCat("Supports: ", status.ToString()));
    return false;
  }

  void Fail(std::string message) { report_.failures.push_back(std::move(message)); }

  EnginePrecision PrecisionOf(const LaunchReport& report) const {
    return report.accumulate == AccumulateType::kFloat16 ? options_.precision.WithHalfAccumulation()
                                                         : options_.precision;
  }

  // The case between two other calls, the first with other numbers, the last with another problem.
  std::vector<LaunchItem> AmongOthers(Direction direction) const {
    std::vector<LaunchItem> items = {{&problem_, &other_inputs_}, {&problem_, &inputs_}};
    if (backend_.Supports(companion_, direction).ok()) {
      items.push_back({&companion_, &companion_inputs_});
    }
    return items;
  }

  // o and lse that backward is given: the engine's own, or the reference's where it has no forward.
  bool FillForwardResults(LaunchItem& item) {
    ReferenceBackend reference;
    std::unique_ptr<CallMemory> host = MakeHostCallMemory();
    bool own = backend_.Supports(*item.problem, Direction::kForward).ok();
    auto outcome =
        own ? LaunchForward(backend_, *memory_, {item}) : LaunchForward(reference, *host, {item});
    if (!outcome.ok()) {
      Fail(absl::StrCat("forward before backward: ", outcome.status().ToString()));
      return false;
    }
    item.o = outcome->results[0].o;
    item.lse = outcome->results[0].lse;
    given_in_half_ = outcome->report.accumulate == AccumulateType::kFloat16;
    return true;
  }

  void CheckForward() {
    auto outcome = LaunchForward(backend_, *memory_, {{&problem_, &inputs_}});
    if (!outcome.ok()) return Fail(absl::StrCat("forward: ", outcome.status().ToString()));
    forward_ = outcome->results[0];
    ForwardBounds bounds = BoundForward(*reference_, exact_, PrecisionOf(outcome->report));
    report_.worst_forward = std::max(
        Compare({"o", problem_.element, forward_.o, exact_.o, bounds.o, Leaks()}),
        Compare({"lse", ElementType::kFloat32, forward_.lse, exact_.lse, bounds.lse, Leaks()}));
    if (case_.brief) return;
    auto repeated = LaunchForward(backend_, *memory_, {{&problem_, &inputs_}});
    if (!repeated.ok() || repeated->results[0] != forward_) Fail("forward: other bits on repeat");
    auto beside = LaunchForward(backend_, *memory_, AmongOthers(Direction::kForward));
    if (!beside.ok()) return Fail(absl::StrCat("forward array: ", beside.status().ToString()));
    if (beside->results[1] != forward_) Fail("forward: other bits beside other calls");
  }

  void CheckBackward() {
    LaunchItem item{&problem_, &inputs_};
    if (!FillForwardResults(item)) return;
    auto outcome = LaunchBackward(backend_, *memory_, {item});
    if (!outcome.ok()) return Fail(absl::StrCat("backward: ", outcome.status().ToString()));
    backward_ = outcome->results[0];
    const EnginePrecision precision = PrecisionOf(outcome->report);
    // A forward in float16 hands on its own, larger errors. What backward adds to them stays small.
    CompareGradients(backward_, nullptr,
                     given_in_half_ ? precision.WithHalfAccumulation() : precision);
    if (given_in_half_) CompareWithGiven(item, outcome->results[0], precision);
    if (!outcome->report.deterministic) {
      if (!problem_.allow_nondeterministic) Fail("backward: nondeterministic without leave");
      return;
    }
    if (case_.brief) return;
    CheckSameBits(item);
    CheckResidual();
    CheckAbsentLseGradient(item);
    if (case_.poison == Poison::kNone) CheckGivenResults(item);
  }

  // Backward must use the o and lse that it is given: who splits the keys gives merged ones.
  void CheckGivenResults(LaunchItem item) {
    for (size_t n = 0; n < exact_.lse.size(); ++n) {
      float lse = LoadElement(ElementType::kFloat32, item.lse.data(), n);
      StoreElement(ElementType::kFloat32, item.lse.data(), n, lse + 0.75f);
    }
    for (size_t n = 0; n < exact_.o.size(); ++n) {
      float o = LoadElement(problem_.element, item.o.data(), n);
      StoreElement(problem_.element, item.o.data(), n, 0.5f * o);
    }
    auto outcome = LaunchBackward(backend_, *memory_, {item});
    if (!outcome.ok()) return Fail(absl::StrCat("backward: ", outcome.status().ToString()));
    CompareWithGiven(item, outcome->results[0], PrecisionOf(outcome->report));
  }

  void CompareWithGiven(const LaunchItem& item, const BackwardResults& got,
                        const EnginePrecision& precision) {
    ReferenceOutputs given = {ToDoubles(problem_.element, item.o.data(), exact_.o.size()),
                              ToDoubles(ElementType::kFloat32, item.lse.data(), exact_.lse.size())};
    CompareGradients(got, &given, precision);
  }

  void CheckSameBits(const LaunchItem& item) {
    auto repeated = LaunchBackward(backend_, *memory_, {item});
    if (!repeated.ok() || repeated->results[0] != backward_) Fail("backward: other bits on repeat");
    std::vector<LaunchItem> items = AmongOthers(Direction::kBackward);
    for (LaunchItem& other : items) {
      if (!FillForwardResults(other)) return;
    }
    auto beside = LaunchBackward(backend_, *memory_, items);
    if (!beside.ok()) return Fail(absl::StrCat("backward array: ", beside.status().ToString()));
    if (beside->results[1] != backward_) Fail("backward: other bits beside other calls");
  }

  // Where the engine leaves a forward's tensors on its device, backward on them gives the same bits
  // as with tensors, more than once.
  void CheckResidual() {
    if (backend_.ResidualBytes(problem_) == 0 || forward_.o.empty()) return;
    std::vector<LaunchItem> items = AmongOthers(Direction::kForward);
    items[1].keep = true;
    auto kept = LaunchForward(backend_, *memory_, items);
    if (!kept.ok()) return Fail(absl::StrCat("kept forward: ", kept.status().ToString()));
    if (kept->results[1] != forward_) Fail("forward: other bits when it is kept");
    if (kept->kept[1] == nullptr) return Fail("forward: nothing was kept");
    LaunchItem item{&problem_, &inputs_};
    item.residual = kept->kept[1].get();
    auto backward = LaunchBackward(backend_, *memory_, {item, item});
    if (!backward.ok()) return Fail(absl::StrCat("residual: ", backward.status().ToString()));
    if (backward->results[0] != backward_ || backward->results[1] != backward_) {
      Fail("backward: other bits on a residual");
    }
  }

  void CheckAbsentLseGradient(LaunchItem item) {
    AlignedBytes zeros(inputs_.d_lse.size());
    std::swap(inputs_.d_lse, zeros);
    auto with_zeros = LaunchBackward(backend_, *memory_, {item});
    std::swap(inputs_.d_lse, zeros);
    item.with_d_lse = false;
    auto without = LaunchBackward(backend_, *memory_, {item});
    if (!with_zeros.ok() || !without.ok() || with_zeros->results[0] != without->results[0]) {
      Fail("backward: no d_lse is not the same as d_lse = 0");
    }
  }

  // With `given`, the exact gradients are those of the o and lse that backward was given.
  void CompareGradients(const BackwardResults& got, const ReferenceOutputs* given,
                        const EnginePrecision& precision) {
    const float* d_lse = inputs_.d_lse.as<float>();
    std::vector<double> d_o =
        ToDoubles(problem_.element, inputs_.d_o.data(), problem_.OutputElements());
    ReferenceGradients exact = reference_->Backward(inputs_.d_o.data(), d_lse, given);
    BackwardBounds bounds = BoundBackward(*reference_, given != nullptr ? *given : exact_, exact,
                                          d_o, d_lse, precision);
    ElementType element = problem_.element, f32 = ElementType::kFloat32;
    for (const Comparison& c :
         {Comparison{"d_q", element, got.d_q, exact.d_q, bounds.d_q, Leaks()},
          {"d_k", element, got.d_k, exact.d_k, bounds.d_k, Leaks()},
          {"d_v", element, got.d_v, exact.d_v, bounds.d_v, Leaks()},
          {"d_bias", f32, got.d_bias, exact.d_bias, bounds.d_bias, Leaks()},
          {"d_sink", f32, got.d_sink, exact.d_sink, bounds.d_sink, Leaks()}}) {
      report_.worst_backward = std::max(report_.worst_backward, Compare(c));
    }
  }

  bool Leaks() const {
    return case_.poison != Poison::kNone && problem_.IsBounded() &&
           !options_.isolates_rows_in_tiles;
  }

  // Names the first element that is too far off; returns the largest error in bounds.
  double Compare(const Comparison& c) {
    double worst = 0;
    int64_t wrong = 0;
    std::string first;
    for (size_t n = 0; n < c.exact.size(); ++n) {
      double got = LoadElement(c.element, c.got.data(), static_cast<int64_t>(n));
      double ratio = ErrorRatio(c, c.exact[n], c.bounds[n], got);
      worst = std::max(worst, ratio);
      if (ratio <= 1 || wrong++ > 0) continue;
      first = absl::StrCat(c.tensor, "[", n, "] = ", got, ", exact ", c.exact[n],
                           ", allowed error ", c.bounds[n]);
    }
    if (wrong > 0) Fail(absl::StrCat(first, "; ", wrong, " of ", c.exact.size(), " wrong"));
    return worst;
  }

  // Whether some row of the key's group sees it, by the position of its first number in K.
  std::vector<bool> SeenKeys() const {
    std::vector<bool> seen(problem_.KeyElements());
    for (int64_t b = 0; b < problem_.batch; ++b) {
      Sequence s = problem_.SequenceAt(b);
      for (int64_t h = 0; h < problem_.q_heads; ++h) {
        for (int64_t i = 0; i < s.q_len; ++i) {
          ReferenceRow row = reference_->Row(b, h, s, i);
          for (int64_t j = 0; j < s.kv_len; ++j) {
            int64_t key = KeyStrides(problem_).Row(b, problem_.KvHead(h), s.kv_begin + j);
            if (row.visible[j]) seen[key] = true;
          }
        }
      }
    }
    return seen;
  }

  // Turns the keys and values that no row sees into NaN; false when all are seen.
  bool PoisonUnseen(ProblemInputs& inputs) const {
    std::vector<bool> seen = SeenKeys();
    int64_t entries = IsPacked(problem_.layout) ? 1 : problem_.batch;
    bool any = false;
    for (int64_t b = 0; b < entries; ++b) {
      for (int64_t h = 0; h < problem_.kv_heads; ++h) {
        for (int64_t j = 0; j < problem_.kv_len; ++j) {
          int64_t k_row = KeyStrides(problem_).Row(b, h, j);
          if (seen[k_row]) continue;
          any = true;
          int64_t v_row = ValueStrides(problem_).Row(b, h, j);
          for (int64_t d = 0; d < problem_.qk_head_dim; ++d) {
            StoreAt(problem_.element, inputs.k, k_row + d, kDoubleNan);
          }
          for (int64_t d = 0; d < problem_.v_head_dim; ++d) {
            StoreAt(problem_.element, inputs.v, v_row + d, kDoubleNan);
          }
        }
      }
    }
    return any;
  }

  void CheckUnseenKeys() {
    ProblemInputs poisoned = RandomInputs(problem_, SeedOf(case_.name), case_.values);
    if (!PoisonUnseen(poisoned)) return;
    if (!forward_.o.empty()) {
      auto outcome = LaunchForward(backend_, *memory_, {{&problem_, &poisoned}});
      if (!outcome.ok() || outcome->results[0] != forward_) {
        Fail("forward: NaN in keys that no row sees changes the result");
      }
    }
    if (backward_.d_q.empty()) return;
    LaunchItem item{&problem_, &poisoned};
    if (!FillForwardResults(item)) return;
    auto outcome = LaunchBackward(backend_, *memory_, {item});
    bool comparable = outcome.ok() && outcome->report.deterministic;
    if (!outcome.ok() || (comparable && outcome->results[0] != backward_)) {
      Fail("backward: NaN in keys that no row sees changes the result");
    }
  }

  void CheckShards() {
    bool cut = problem_.batch * problem_.kv_heads > 1;
    if (!cut || problem_.allow_nondeterministic) return;
    for (std::string& difference :
         CompareShards(backend_, *memory_, problem_, inputs_, forward_, backward_)) {
      Fail(std::move(difference));
    }
  }

  Backend& backend_;
  const ConformanceCase& case_;
  const Problem& problem_;
  const ConformanceOptions& options_;
  std::unique_ptr<CallMemory> memory_;
  ProblemInputs inputs_, other_inputs_;
  Problem companion_;
  ProblemInputs companion_inputs_;
  std::optional<Reference> reference_;
  ReferenceOutputs exact_;
  ForwardResults forward_;
  BackwardResults backward_;
  bool given_in_half_ = false;  // the forward whose results backward was given
  CaseReport report_;
};

// LazyBackend: one engine for all tests of a registration, made by the first that runs.
class LazyBackend {
 public:
  explicit LazyBackend(std::function<std::unique_ptr<Backend>()> make) : make_(std::move(make)) {}
  Backend& Get() {
    if (backend_ == nullptr) backend_ = make_();
    return *backend_;
  }

 private:
  std::function<std::unique_ptr<Backend>()> make_;
  std::unique_ptr<Backend> backend_;
};

class ConformanceTest : public testing::Test {
 public:
  ConformanceTest(std::shared_ptr<LazyBackend> backend, ConformanceCase test_case,
                  ConformanceOptions options)
      : backend_(std::move(backend)), case_(std::move(test_case)), options_(std::move(options)) {}

 private:
  void TestBody() override {
    CaseReport report = CheckCase(backend_->Get(), case_, options_);
    for (const std::string& failure : report.failures) {
      ADD_FAILURE() << failure << "\n  " << ProblemText(case_.problem);
    }
    RecordProperty("worst_forward_error_in_bounds", absl::StrCat(report.worst_forward));
    RecordProperty("worst_backward_error_in_bounds", absl::StrCat(report.worst_backward));
  }

  std::shared_ptr<LazyBackend> backend_;
  ConformanceCase case_;
  ConformanceOptions options_;
};

// The engine refuses no more than its test says.
class SupportTest : public testing::Test {
 public:
  SupportTest(std::shared_ptr<LazyBackend> backend, std::vector<ConformanceCase> cases, int most)
      : backend_(std::move(backend)), cases_(std::move(cases)), most_(most) {}

 private:
  void TestBody() override {
    int refused = 0;
    for (const ConformanceCase& test_case : cases_) {
      for (Direction direction : {Direction::kForward, Direction::kBackward}) {
        refused += !backend_->Get().Supports(test_case.problem, direction).ok();
      }
    }
    EXPECT_LE(refused, most_) << "of " << 2 * cases_.size() << " (case, direction) pairs";
  }

  std::shared_ptr<LazyBackend> backend_;
  std::vector<ConformanceCase> cases_;
  int most_;
};

class AverageTest : public testing::Test {
 public:
  AverageTest(std::shared_ptr<LazyBackend> backend, ConformanceOptions options)
      : backend_(std::move(backend)), options_(std::move(options)) {}

 private:
  void TestBody() override {
    const ElementType element = options_.element.value_or(ElementType::kFloat32);
    for (const std::string& failure :
         CompareWithAverages(backend_->Get(), *options_.memory(), element)) {
      ADD_FAILURE() << failure;
    }
  }

  std::shared_ptr<LazyBackend> backend_;
  ConformanceOptions options_;
};

class HiddenNumberTest : public testing::Test {
 public:
  HiddenNumberTest(std::shared_ptr<LazyBackend> backend, HiddenNumberCase of,
                   ConformanceOptions options)
      : backend_(std::move(backend)), case_(std::move(of)), options_(std::move(options)) {}

 private:
  void TestBody() override {
    for (const std::string& failure :
         CheckHiddenNumbers(backend_->Get(), case_, *options_.memory(), options_.precision)) {
      ADD_FAILURE() << failure << "\n  " << ProblemText(case_.problem);
    }
  }

  std::shared_ptr<LazyBackend> backend_;
  HiddenNumberCase case_;
  ConformanceOptions options_;
};

int64_t Pairs(const Problem& p) {
  int64_t pairs = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    pairs += p.SequenceAt(b).q_len * p.SequenceAt(b).kv_len;
  }
  return pairs * p.q_heads;
}

// Names lose the element that they end with and gain the new one.
void ConvertAll(ElementType element, std::vector<ConformanceCase>& cases) {
  std::set<std::string> names;
  std::erase_if(cases, [&](ConformanceCase& c) {
    c.name =
        absl::StrCat(absl::StripSuffix(c.name, absl::StrCat("_", ElementName(c.problem.element))),
                     "_", ElementName(element));
    c.problem.element = element;
    return !names.insert(c.name).second;
  });
}

}  // namespace

CaseReport CheckCase(Backend& backend, const ConformanceCase& test_case,
                     const ConformanceOptions& options) {
  return CaseChecker(backend, test_case, options).Run();
}

bool RegisterBackendConformance(const std::string& name,
                                std::function<std::unique_ptr<Backend>()> make_backend,
                                const ConformanceOptions& options) {
  auto backend = std::make_shared<LazyBackend>(std::move(make_backend));
  std::vector<ConformanceCase> cases = NamedConformanceCases();
  for (ConformanceCase& random : RandomConformanceCases(options)) cases.push_back(random);
  if (options.element.has_value()) ConvertAll(*options.element, cases);
  std::erase_if(cases,
                [&](const ConformanceCase& c) { return Pairs(c.problem) > options.max_pairs; });
  int masks = 0;
  std::erase_if(cases, [&](const ConformanceCase& c) {
    return c.problem.mask != nullptr && masks++ % options.mask_stride != 0;
  });
  for (size_t n = 0; n < cases.size(); ++n) {
    if (n % options.whole_stride != 0) cases[n].brief = true;
  }
  std::string suite = name + "Conformance", support_suite = name + "Support";
  for (const ConformanceCase& test_case : cases) {
    testing::RegisterTest(suite.c_str(), test_case.name.c_str(), nullptr, nullptr, __FILE__,
                          __LINE__,
                          [=] { return new ConformanceTest(backend, test_case, options); });
  }
  testing::RegisterTest(support_suite.c_str(), "RefusesNoMoreThanStated", nullptr, nullptr,
                        __FILE__, __LINE__,
                        [=] { return new SupportTest(backend, cases, options.max_unsupported); });
  for (const HiddenNumberCase& of :
       HiddenNumberCases(options.element.value_or(ElementType::kFloat32), 80, 64)) {
    if (options.shares_range && !of.is_seen_by_none) continue;
    testing::RegisterTest((name + "HiddenNumbers").c_str(), of.name.c_str(), nullptr, nullptr,
                          __FILE__, __LINE__,
                          [=] { return new HiddenNumberTest(backend, of, options); });
  }
  testing::RegisterTest((name + "Averages").c_str(), "AreWhatRowsOfEnormousBiasesGive", nullptr,
                        nullptr, __FILE__, __LINE__,
                        [=] { return new AverageTest(backend, options); });
  return true;
}

}  // namespace attnd
