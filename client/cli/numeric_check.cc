#include "client/cli/numeric_check.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <set>

#include "attention/error_bounds.h"
#include "attention/masks/mask_description.h"
#include "attention/masks/mask_nodes.h"
#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "attention/reference.h"

namespace attnd {
namespace {

// A daemon's tensor beside the exact numbers.
struct Compared {
  const char* name;
  ElementType element;
  const AlignedBytes& got;
  const std::vector<double>& exact;
  const std::vector<double>& bounds;
};

double ErrorInBounds(const Compared& c, size_t n, double got) {
  constexpr double kWrong = std::numeric_limits<double>::infinity();
  double exact = c.exact[n], bound = c.bounds[n];
  if (got == exact || (std::isnan(got) && std::isnan(exact))) return 0;
  if (!std::isfinite(exact)) return std::isfinite(got) ? kWrong : 0;
  if (!std::isfinite(got)) {
    // Beyond a 16-bit format's range an infinity is right.
    bool overflow = c.element == ElementType::kFloat16 && std::fabs(exact) + bound >= 65504;
    return overflow && std::isinf(got) ? 0 : kWrong;
  }
  return std::isnan(bound) ? 0 : std::fabs(got - exact) / bound;
}

void Compare(const Compared& c, CheckOutcome& outcome) {
  for (size_t n = 0; n < c.exact.size(); ++n) {
    double got = double{LoadElement(c.element, c.got.data(), static_cast<int64_t>(n))};
    double error = ErrorInBounds(c, n, got);
    if (error > outcome.error_in_bounds) {
      outcome.error_in_bounds = error;
      outcome.worst_tensor = c.name;
    }
    double absolute = std::fabs(got - c.exact[n]);
    if (std::isfinite(absolute))
      outcome.absolute_error = std::max(outcome.absolute_error, absolute);
  }
}

EnginePrecision PrecisionOf(const CallReceipt& receipt) {
  EnginePrecision precision =
      receipt.backend == "cuda" ? EnginePrecision::HalfOperands() : EnginePrecision::Float32();
  return receipt.accumulate == AccumulateType::kFloat16 ? precision.WithHalfAccumulation()
                                                        : precision;
}

class Checker {
 public:
  Checker(AttentionClient& client, const Problem& p, uint64_t seed)
      : client_(client),
        p_(p),
        in_(RandomInputs(p, seed)),
        reference_(p, {in_.q.data(), in_.k.data(), in_.v.data(), in_.mask_bits.as<uint8_t>(),
                       in_.bias.data()}),
        exact_(reference_.Forward()),
        o_(Unwritten(p.OutputElements() * ElementBytes(p.element))),
        lse_(Unwritten(p.LseElements() * int64_t{sizeof(float)})) {}

  CheckOutcome Forward() {
    ForwardTensors in{in_.q.data(), in_.k.data(), in_.v.data(), in_.mask_bits.as<uint8_t>(),
                      in_.bias.data()};
    absl::StatusOr<CallReceipt> receipt = client_.Forward(p_, in, {o_.data(), lse_.as<float>()});
    CheckOutcome outcome = Begin(receipt.status());
    if (!receipt.ok()) return outcome;
    forward_in_half_ = receipt->accumulate == AccumulateType::kFloat16;
    ForwardBounds bounds = BoundForward(reference_, exact_, PrecisionOf(*receipt));
    Compare({"o", p_.element, o_, exact_.o, bounds.o}, outcome);
    Compare({"lse", ElementType::kFloat32, lse_, exact_.lse, bounds.lse}, outcome);
    return outcome;
  }

  // Uses forward's o and lse.
  CheckOutcome Backward() {
    int64_t element = ElementBytes(p_.element);
    AlignedBytes d_q = Unwritten(p_.QueryElements() * element);
    AlignedBytes d_k = Unwritten(p_.KeyElements() * element);
    AlignedBytes d_v = Unwritten(p_.ValueElements() * element);
    AlignedBytes d_bias = Unwritten(p_.bias ? p_.bias->shape.elements() * 4 : 0);
    AlignedBytes d_sink = Unwritten(p_.batch * p_.q_heads * 4);
    BackwardTensors in{
        in_.q.data(),         in_.k.data(), in_.v.data(),     in_.mask_bits.as<uint8_t>(),
        in_.bias.data(),      o_.data(),    lse_.as<float>(), in_.d_o.data(),
        in_.d_lse.as<float>()};
    absl::StatusOr<CallReceipt> receipt = client_.Backward(
        p_, in, {d_q.data(), d_k.data(), d_v.data(), d_bias.as<float>(), d_sink.as<float>()});
    CheckOutcome outcome = Begin(receipt.status());
    if (!receipt.ok()) return outcome;
    ReferenceGradients exact = reference_.Backward(in_.d_o.data(), in_.d_lse.as<float>());
    std::vector<double> d_o = ToDoubles(p_.element, in_.d_o.data(), p_.OutputElements());
    // A forward in float16 hands on its own, larger errors.
    EnginePrecision precision = PrecisionOf(*receipt);
    if (forward_in_half_) precision = precision.WithHalfAccumulation();
    BackwardBounds bounds =
        BoundBackward(reference_, exact_, exact, d_o, in_.d_lse.as<float>(), precision);
    Compare({"d_q", p_.element, d_q, exact.d_q, bounds.d_q}, outcome);
    Compare({"d_k", p_.element, d_k, exact.d_k, bounds.d_k}, outcome);
    Compare({"d_v", p_.element, d_v, exact.d_v, bounds.d_v}, outcome);
    Compare({"d_bias", ElementType::kFloat32, d_bias, exact.d_bias, bounds.d_bias}, outcome);
    Compare({"d_sink", ElementType::kFloat32, d_sink, exact.d_sink, bounds.d_sink}, outcome);
    return outcome;
  }

 private:
  static CheckOutcome Begin(const absl::Status& status) {
    CheckOutcome outcome;
    outcome.unsupported = absl::IsUnimplemented(status);
    if (!outcome.unsupported) outcome.status = status;
    return outcome;
  }

  AttentionClient& client_;
  const Problem& p_;
  ProblemInputs in_;
  Reference reference_;
  ReferenceOutputs exact_;
  bool forward_in_half_ = false;
  AlignedBytes o_, lse_;
};

}  // namespace

CheckedCase CheckCase(AttentionClient& client, const Problem& problem, uint64_t seed) {
  CheckedCase result{.seed = seed, .problem = problem};
  Checker checker(client, problem, seed);
  result.forward = checker.Forward();
  if (result.forward.unsupported || !result.forward.status.ok()) {
    result.backward = result.forward;  // there is no o and lse to start from
  } else {
    result.backward = checker.Backward();
  }
  return result;
}

std::vector<std::string> AllFeatures() {
  return {"float16",
          "bfloat16",
          "float32",
          "bhld",
          "blhd",
          "packed_thd",
          "packed_htd",
          "grouped heads",
          "head dims differ",
          "causal",
          "window",
          "offsets",
          "key lengths",
          "bool mask",
          "bias",
          "bias gradient",
          "ALiBi",
          "softcap",
          "dropout",
          "zero_rest",
          "sink",
          "shard",
          "mask: all",
          "mask: window",
          "mask: dilated",
          "mask: stride",
          "mask: stride columns",
          "mask: block window",
          "mask: global",
          "mask: prefix",
          "mask: documents",
          "mask: groups",
          "mask: random blocks",
          "mask: all of",
          "mask: any of",
          "mask: not",
          "mask: reference",
          "mask: blocks",
          "mask: hidden rows",
          "mask: progressions",
          "mask: intervals",
          "mask: rectangles",
          "mask: bits",
          "mask: per head",
          "mask: part of a whole",
          "all"};
}

namespace {

// The kinds in it, canonical as it is sent, in the order of the variants of mask_spec.h.
std::set<std::string> MaskKindsOf(const MaskSpec& spec) {
  constexpr const char* kOperations[] = {"",
                                         "all",
                                         "window",
                                         "dilated",
                                         "stride",
                                         "stride columns",
                                         "block window",
                                         "global",
                                         "prefix",
                                         "documents",
                                         "groups",
                                         "random blocks",
                                         "all of",
                                         "any of",
                                         "not",
                                         "reference"};
  constexpr const char* kPatterns[] = {
      "", "", "blocks", "hidden rows", "progressions", "intervals", "rectangles", "bits"};
  static_assert(std::size(kOperations) == std::variant_size_v<decltype(MaskExpr::op)>);
  static_assert(std::size(kPatterns) == std::variant_size_v<MaskPattern>);
  std::set<std::string> kinds;
  for (const MaskPattern& pattern : spec.pattern) {
    kinds.insert(kPatterns[pattern.index()]);
    const MaskExpr* expr = ExprOf(pattern);
    if (expr == nullptr) continue;
    VisitNodes(*expr, [&](const MaskExpr& node) { kinds.insert(kOperations[node.op.index()]); });
  }
  kinds.erase("");
  if (spec.pattern_of.size() > 1) kinds.insert("per head");
  return kinds;
}

}  // namespace

std::vector<std::string> FeaturesOf(const Problem& p) {
  std::vector<std::string> names = {std::string(ElementName(p.element)),
                                    std::string(LayoutName(p.layout))};
  auto add = [&](bool has, const char* name) {
    if (has) names.push_back(name);
  };
  add(p.group_size() > 1, "grouped heads");
  add(p.qk_head_dim != p.v_head_dim, "head dims differ");
  add(p.causal, "causal");
  add(p.window_left >= 0 || p.window_right >= 0, "window");
  add(p.alignment == Alignment::kOffsets, "offsets");
  add(!p.kv_lengths.empty(), "key lengths");
  add(p.bool_mask.has_value(), "bool mask");
  add(p.bias.has_value(), "bias");
  add(p.bias && p.bias->want_gradient, "bias gradient");
  add(!p.alibi_slopes.empty(), "ALiBi");
  add(p.softcap > 0, "softcap");
  add(p.dropout.threshold != 0, "dropout");
  add(p.denominator == DenominatorKind::kZeroRest, "zero_rest");
  add(p.denominator == DenominatorKind::kSink, "sink");
  add(p.shard.total_q_heads != 0 || p.shard.batch_offset != 0 || p.shard.q_head_offset != 0,
      "shard");
  if (p.mask != nullptr) {
    for (const std::string& kind : MaskKindsOf(p.mask->spec())) names.push_back("mask: " + kind);
    add(p.mask_origin != MaskOrigin(), "mask: part of a whole");
  }
  add(true, "all");
  return names;
}

}  // namespace attnd
