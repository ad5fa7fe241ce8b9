#include "modules/segments/bound.h"

#include <algorithm>
#include <set>
#include <utility>
#include <variant>

#include "base/round_up.h"
#include "modules/op_uses.h"

namespace attnd {
namespace {

// Simulated: `./dev volta-report --products` prints them.
constexpr ProductCycles kV100Products = {
    .alone = {{1475, 5072}, {1434, 5033}, {1445, 5587}},
    .beside_another = {{2159, 6895}, {2209, 6709}, {2169, 7785}},
    .multiprocessors = 80,
    .cycles_per_second = 1.38e9};

constexpr GpuRates kGpus[] = {{"v100", "sm_70", 112e12, 0.9e12, &kV100Products},
                              {"a100", "sm_80", 312e12, 2.0e12},
                              {"h100", "sm_90", 989e12, 3.35e12},
                              {"h200", "sm_90", 989e12, 4.8e12}};
constexpr double kMemoryShare = 0.9;

// A value, or the gradient that lies where this value's does.
struct Place {
  int64_t value;
  bool is_gradient;
  auto operator<=>(const Place&) const = default;
};

}  // namespace

// Counts the bytes that the ops of one segment read and write.
class SegmentTraffic {
 public:
  SegmentTraffic(const BlockWork& block, const OpSegment& segment) : in_(block) {
    const bool is_forward = in_.direction_ == Direction::kForward;
    for (int64_t value : segment.unread) {
      unread_.insert(is_forward ? Place{value, false} : GradientOf(value));
    }
    if (is_forward) {
      for (int64_t place = segment.first; place < segment.end; ++place) Forward(place);
    } else {
      for (int64_t place = segment.end - 1; place >= segment.first; --place) Backward(place);
    }
    if (segment.of == SegmentTemplate::kProduct) {
      const int64_t curve = is_forward ? segment.end - 1 : segment.first;
      work_.later_bytes += Bytes(in_.order_.ops[curve] + kFirstOpValue);
      --work_.launches;
    } else if (segment.of != SegmentTemplate::kOp) {
      work_.launches = 1 + sums_;
    }
  }
  const SegmentWork& work() const { return work_; }

 private:
  Place GradientOf(int64_t value) const { return {in_.holders_[value], true}; }
  double Numbers(int64_t value) const {
    const ValueShape& shape = in_.graph_.shapes(in_.block_).values[value];
    return static_cast<double>(in_.rows_.Of(shape.rows)) * static_cast<double>(shape.columns);
  }
  double Bytes(int64_t value) const {
    const bool is_wide = in_.graph_.shapes(in_.block_).values[value].wide;
    const ModuleLayout& layout = in_.graph_.layout();
    return Numbers(value) * ElementBytes(is_wide ? layout.wide_element : layout.element);
  }
  // A tensor that was read or written is in registers then, or in a cache.
  void Read(const Place& place) {
    if (there_.insert(place).second) work_.bytes += Bytes(place.value);
  }
  void Write(const Place& place) {
    there_.insert(place);
    if (unread_.count(place) == 0) work_.bytes += Bytes(place.value);
  }
  // A share of a gradient, by one launch.
  void Give(int64_t value, int64_t op) {
    const Place place = GradientOf(value);
    if (in_.last_[value] != op) Read(place);
    Write(place);
    ++work_.launches;
  }
  // A launch of sums over columns, which reads so much again.
  void AddSums(double bytes) {
    work_.bytes += bytes;
    work_.later_bytes += bytes;
    ++work_.launches;
  }
  // The same, of what a gradient of weights reads.
  void AddBiasSums(double bytes) {
    AddSums(bytes);
    work_.bias_bytes += bytes;
    ++work_.bias_launches;
  }
  // A product between a layer's input, its output and its matrix, of numbers of so many bytes.
  void Multiply(LinearProduct of, int64_t input, int64_t output, double number_bytes) {
    const std::vector<ValueShape>& values = in_.graph_.shapes(in_.block_).values;
    const int64_t rows = in_.rows_.Of(values[input].rows);
    const int64_t inputs = values[input].columns, outputs = values[output].columns;
    const double matrix = static_cast<double>(inputs) * static_cast<double>(outputs);
    work_.flops += 2 * static_cast<double>(rows) * matrix;
    work_.bytes += matrix * number_bytes;
    SegmentWork::Product product = {of, rows, outputs, inputs};
    if (of == LinearProduct::kInputGradient) std::swap(product.columns, product.depth);
    if (of == LinearProduct::kWeightGradient) std::swap(product.rows, product.depth);
    work_.products.push_back(product);
  }

  void Forward(int64_t place) {
    const int64_t op = in_.order_.ops[place], output = op + kFirstOpValue;
    for (const ValueUse& use : ValuesOf(in_.ops_[op])) Read({use.value, false});
    Write({output, false});
    ++work_.launches;
    if (const auto* linear = std::get_if<LinearOp>(&in_.ops_[op].kind)) {
      Multiply(LinearProduct::kOutput, linear->input, output,
               ElementBytes(in_.graph_.layout().element));
    }
  }

  void Backward(int64_t place) {
    const int64_t op = in_.order_.ops[place], output = op + kFirstOpValue;
    Read(GradientOf(output));
    if (const auto* linear = std::get_if<LinearOp>(&in_.ops_[op].kind)) {
      Multiply(LinearProduct::kInputGradient, linear->input, output,
               ElementBytes(in_.graph_.layout().element));
      // Its gradient is read and written.
      Read({linear->input, false});
      Multiply(LinearProduct::kWeightGradient, linear->input, output, 8);
      ++work_.launches;
      if (linear->bias.has_value()) {
        if (linear->transposed) {
          AddSums(Bytes(output));
        } else {
          AddBiasSums(Bytes(output));
        }
      }
    } else if (const auto* norm = std::get_if<NormOp>(&in_.ops_[op].kind)) {
      Read({norm->input, false});
      if (norm->weight.has_value() || norm->bias.has_value()) {
        AddSums(Bytes(output) + Bytes(norm->input));
        ++sums_;
      }
    } else if (const auto* sum = std::get_if<BinaryOp>(&in_.ops_[op].kind)) {
      for (const auto& [value, other] : {std::pair(sum->b, sum->a), std::pair(sum->a, sum->b)}) {
        if (sum->kind == BinaryKind::kMultiply) Read({other, false});
        if (GradientOf(value) != GradientOf(output)) Give(value, op);
      }
      return;
    } else if (!std::holds_alternative<DropoutOp>(in_.ops_[op].kind)) {
      for (const ValueUse& use : ValuesOf(in_.ops_[op])) Read({use.value, false});
    }
    for (const ValueUse& use : ValuesOf(in_.ops_[op])) Give(use.value, op);
  }

  const BlockWork& in_;
  std::set<Place> unread_, there_;
  int64_t sums_ = 0;  // launches over columns, which follow a segment's own
  SegmentWork work_;
};

BlockWork::BlockWork(const ModuleGraph& graph, int64_t block, Direction direction,
                     const RowCounts& rows)
    : graph_(graph),
      block_(block),
      direction_(direction),
      rows_(rows),
      ops_(graph.layout().blocks[block].ops),
      order_(OrderOf(graph, block)),
      last_(graph.LastUses(block)),
      holders_(GradientHolders(graph, block)) {}

SegmentWork BlockWork::Of(const OpSegment& segment) const {
  return SegmentTraffic(*this, segment).work();
}

absl::Span<const GpuRates> KnownGpus() { return kGpus; }

const GpuRates* GpuNamed(absl::string_view name) {
  const auto* found = std::find_if(std::begin(kGpus), std::end(kGpus),
                                   [name](const GpuRates& gpu) { return name == gpu.name; });
  return found == std::end(kGpus) ? nullptr : found;
}

const GpuRates& GpuOfArchitecture(absl::string_view architecture) {
  const GpuRates* found = &kGpus[0];
  for (const GpuRates& gpu : kGpus) {
    const bool is_later = absl::string_view(found->architecture) != gpu.architecture;
    if (is_later && architecture >= gpu.architecture) found = &gpu;
  }
  return *found;
}

bool JoinsProducts(const GpuRates& gpu, ElementType element) {
  return element == ElementType::kFloat16 || absl::string_view(gpu.architecture) >= "sm_80";
}

namespace {

// Blocks lie beside each other on multiprocessors once there are more than these, and end together:
// so do those that follow. A layer's gradients of weights are one launch, in which only the last of
// them do not fill the multiprocessors.
double SecondsOf(const SegmentWork::Product& p, const ProductCycles& cycles) {
  constexpr int64_t kTile = 128, kStep = 32, kWeightGradientRows = 1024;
  const bool is_cut = p.of == LinearProduct::kWeightGradient;
  const int64_t blocks_deep = is_cut ? DivideUp(p.depth, kWeightGradientRows) : 1;
  const int64_t blocks = DivideUp(p.rows, kTile) * DivideUp(p.columns, kTile) * blocks_deep;
  const bool is_alone = blocks <= cycles.multiprocessors;
  const ProductCycles::OfBlock& block =
      (is_alone ? cycles.alone : cycles.beside_another)[static_cast<int>(p.of)];
  const double steps = static_cast<double>(p.depth) / static_cast<double>(blocks_deep * kStep);
  const int64_t at_once = 2 * cycles.multiprocessors;
  const double turns =
      is_cut ? std::max(1.0, static_cast<double>(blocks) / static_cast<double>(at_once))
             : static_cast<double>(DivideUp(blocks, at_once));
  return turns * (steps * block.step + block.besides) / cycles.cycles_per_second;
}

}  // namespace

double SegmentWork::Microseconds(const GpuRates& gpu) const {
  double of_products = flops / gpu.flops_per_second, later = later_bytes;
  int64_t apart = launches;
  if (gpu.product_cycles != nullptr) {
    of_products = 0;
    for (const Product& p : products) of_products += SecondsOf(p, *gpu.product_cycles);
    later -= bias_bytes;
    apart -= bias_launches;
  }
  const double rate = kMemoryShare * gpu.bytes_per_second;
  const double seconds = std::max(of_products, (bytes - later_bytes) / rate) + later / rate;
  return seconds * 1e6 + kLaunchMicroseconds * static_cast<double>(apart);
}

void SegmentWork::operator+=(const SegmentWork& other) {
  flops += other.flops;
  bytes += other.bytes;
  later_bytes += other.later_bytes;
  bias_bytes += other.bias_bytes;
  bias_launches += other.bias_launches;
  launches += other.launches;
  products.insert(products.end(), other.products.begin(), other.products.end());
}

}  // namespace attnd
