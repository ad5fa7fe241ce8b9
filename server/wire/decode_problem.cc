#include "server/wire/decode_problem.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/dropout.h"
#include "attention/mask_plans.h"
#include "attention/problem.h"
#include "base/status_macros.h"
#include "proto/attnd/v1/mask_codec.h"
#include "proto/attnd/v1/mask_data.h"
#include "server/call/status_details.h"
#include "server/wire/wire_check.h"

namespace attnd {
namespace {

using google::protobuf::RepeatedField;

// A mask up to this is checked in microseconds.
constexpr size_t kSmallMaskBytes = 4096;

absl::Status DecodeSizes(const v1::Problem& wire, Problem& p) {
  p.batch = wire.batch();
  p.q_heads = wire.q_heads();
  p.kv_heads = wire.kv_heads();
  p.q_len = wire.q_len();
  p.kv_len = wire.kv_len();
  p.qk_head_dim = wire.qk_head_dim();
  p.v_head_dim = wire.v_head_dim();
  if (wire.element() == v1::ELEMENT_UNSPECIFIED) {
    return FieldError(reason::kBadDtype, "problem.element", ValuesOf(*v1::Element_descriptor()),
                      "ELEMENT_UNSPECIFIED");
  }
  p.element = static_cast<ElementType>(wire.element());
  if (wire.layout() == v1::LAYOUT_UNSPECIFIED) {
    return FieldError(reason::kBadShape, "problem.layout", ValuesOf(*v1::Layout_descriptor()),
                      "LAYOUT_UNSPECIFIED");
  }
  p.layout = static_cast<Layout>(wire.layout());
  return absl::OkStatus();
}

// A bool in a oneof means something only when true.
absl::Status MustBeTrue(absl::string_view field, bool value) {
  if (value) return absl::OkStatus();
  return FieldError(reason::kBadField, field, "true when present", "false");
}

absl::Status DecodeAlignment(const v1::Problem& wire, Problem& p) {
  if (!wire.has_alignment()) return absl::OkStatus();
  const v1::Alignment& alignment = wire.alignment();
  switch (alignment.kind_case()) {
    case v1::Alignment::kTopLeft:
      p.alignment = Alignment::kTopLeft;
      return MustBeTrue("problem.alignment.top_left", alignment.top_left());
    case v1::Alignment::kBottomRight:
      p.alignment = Alignment::kBottomRight;
      return MustBeTrue("problem.alignment.bottom_right", alignment.bottom_right());
    case v1::Alignment::kOffsets:
      p.alignment = Alignment::kOffsets;
      p.offsets.assign(alignment.offsets().offset().begin(), alignment.offsets().offset().end());
      return absl::OkStatus();
    case v1::Alignment::KIND_NOT_SET:
      break;
  }
  return FieldError(reason::kBadField, "problem.alignment",
                    "one of top_left, bottom_right, offsets", "none");
}

absl::Status DecodeLengthList(absl::string_view field, const RepeatedField<uint32_t>& wire,
                              std::vector<int32_t>& out) {
  if (wire.size() > kMaxBatch + 1) {
    return FieldError(reason::kBadShape, field, absl::StrCat("at most ", kMaxBatch + 1, " entries"),
                      absl::StrCat(wire.size()));
  }
  out.reserve(wire.size());
  for (int n = 0; n < wire.size(); ++n) {
    if (wire[n] > static_cast<uint32_t>(kMaxLength)) {
      return FieldError(reason::kBadShape, absl::StrCat(field, "[", n, "]"),
                        absl::StrCat("0..", kMaxLength), absl::StrCat(wire[n]));
    }
    out.push_back(static_cast<int32_t>(wire[n]));
  }
  return absl::OkStatus();
}

absl::Status DecodeLengths(const v1::Problem& wire, Problem& p) {
  const v1::Lengths& lengths = wire.lengths();
  RETURN_IF_ERROR(DecodeLengthList("problem.lengths.kv_len", lengths.kv_len(), p.kv_lengths));
  RETURN_IF_ERROR(
      DecodeLengthList("problem.lengths.cu_seqlens_q", lengths.cu_seqlens_q(), p.cu_seqlens_q));
  return DecodeLengthList("problem.lengths.cu_seqlens_k", lengths.cu_seqlens_k(), p.cu_seqlens_k);
}

absl::StatusOr<BroadcastShape> DecodeShape(absl::string_view field,
                                           const RepeatedField<uint32_t>& shape) {
  if (shape.size() != 4) {
    return FieldError(reason::kBadShape, field, "4 entries", absl::StrCat(shape.size()));
  }
  return BroadcastShape{shape[0], shape[1], shape[2], shape[3]};
}

absl::Status DecodeMaskAndBias(const v1::Problem& wire, Problem& p) {
  if (wire.has_mask() && wire.has_bool_mask()) {
    return FieldError(reason::kBadField, "problem.mask", "one of mask and bool_mask", "both");
  }
  if (wire.has_bool_mask()) {
    ASSIGN_OR_RETURN(BroadcastShape shape,
                     DecodeShape("problem.bool_mask.shape", wire.bool_mask().shape()));
    p.bool_mask = BoolMask{shape};
  }
  if (wire.has_bias()) {
    ASSIGN_OR_RETURN(BroadcastShape shape, DecodeShape("problem.bias.shape", wire.bias().shape()));
    if (wire.bias().element() == v1::ELEMENT_UNSPECIFIED) {
      return FieldError(reason::kBadDtype, "problem.bias.element",
                        ValuesOf(*v1::Element_descriptor()), "ELEMENT_UNSPECIFIED");
    }
    p.bias =
        Bias{static_cast<ElementType>(wire.bias().element()), shape, wire.bias().want_gradient()};
  }
  if (wire.has_alibi()) {
    p.alibi_slopes.assign(wire.alibi().slope().begin(), wire.alibi().slope().end());
    if (p.alibi_slopes.empty()) {
      return FieldError(reason::kBadShape, "problem.alibi.slope",
                        "q_heads or batch·q_heads entries", "0");
    }
  }
  return absl::OkStatus();
}

absl::Status DecodeDropout(const v1::Problem& wire, Problem& p) {
  float probability = wire.dropout().p();
  // Compared this way round so that NaN fails.
  if (!(probability >= 0 && probability < 1) || DropoutThreshold(probability) > 255) {
    return FieldError(reason::kBadField, "problem.dropout.p",
                      "0 ≤ p < 1 that does not round to 1 in steps of 1/256",
                      absl::StrCat(probability));
  }
  p.dropout = {DropoutThreshold(probability), wire.dropout().seed(), wire.dropout().offset()};
  return absl::OkStatus();
}

absl::Status DecodeDenominator(const v1::Problem& wire, Problem& p) {
  if (!wire.has_denominator()) return absl::OkStatus();
  switch (wire.denominator().kind_case()) {
    case v1::Denominator::kSoftmax:
      p.denominator = DenominatorKind::kSoftmax;
      return absl::OkStatus();
    case v1::Denominator::kZeroRest:
      p.denominator = DenominatorKind::kZeroRest;
      return absl::OkStatus();
    case v1::Denominator::kSink: {
      const auto& logits = wire.denominator().sink().logit();
      p.denominator = DenominatorKind::kSink;
      p.sink_logits.assign(logits.begin(), logits.end());
      return absl::OkStatus();
    }
    case v1::Denominator::KIND_NOT_SET:
      break;
  }
  return FieldError(reason::kBadField, "problem.denominator", "one of softmax, zero_rest, sink",
                    "none");
}

void DecodeScalars(const v1::Problem& wire, Problem& p) {
  if (wire.has_scale()) p.scale = wire.scale();
  p.softcap = wire.softcap();
  p.causal = wire.causal();
  if (wire.has_window()) {
    p.window_left = wire.window().left();
    p.window_right = wire.window().right();
  }
  p.accumulate = wire.accumulate() == v1::ACCUMULATE_FLOAT16 ? AccumulateType::kFloat16
                                                             : AccumulateType::kFloat32;
  p.allow_nondeterministic = wire.allow_nondeterministic();
  p.shard = {wire.shard().batch_offset(), wire.shard().q_head_offset(),
             wire.shard().total_q_heads()};
}

// Says so where the caller would rather have this done elsewhere.
absl::Status LeaveItWhereItTakesLong(const CallersMasks& masks) {
  if (masks.takes_long == nullptr) return absl::OkStatus();
  *masks.takes_long = true;
  return absl::CancelledError();
}

absl::Status RefuseBesideId(const v1::MaskSpec& wire) {
  const bool alone = wire.pattern().empty() && wire.pattern_of().empty() && !wire.has_extents() &&
                     wire.empty_row() == v1::EMPTY_ROW_ZERO;
  if (alone) return absl::OkStatus();
  return FieldError(reason::kBadField, "problem.mask.id", "nothing but origin beside it", "more");
}

// What its lists outside of it take, within the limit; they may lie anywhere yet.
absl::StatusOr<int64_t> CheckMaskData(const v1::MaskSpec& wire, const CallersMasks& masks) {
  const absl::StatusOr<int64_t> bytes = MaskDataBytes(wire);
  if (!bytes.ok()) return Classified(bytes.status());
  const int64_t most = masks.store.limits().bytes_of_caller;
  if (*bytes <= most) return *bytes;
  const std::string expected =
      absl::StrCat("at most ", most, " bytes (a quarter of --mask_memory_mib)");
  const std::string got = absl::StrCat(*bytes);
  return Failure(absl::StatusCode::kOutOfRange, reason::kMaskTooLarge,
                 absl::StrCat("mask_data: expected ", expected, ", got ", got),
                 {{"field", "mask_data"},
                  {"expected", expected},
                  {"got", got},
                  {"limit", absl::StrCat(most)}});
}

// Whether they come in chunks behind this header, and have not yet.
bool FollowsLater(int64_t data_bytes, const CallersMasks& masks) {
  return data_bytes > 0 && masks.streamed != nullptr && masks.streamed->bytes.empty();
}

absl::Status TakeMask(const v1::MaskSpec& wire, const CallersMasks& masks,
                      ReadMaskData read_mask_data, DecodedProblem& decoded) {
  ASSIGN_OR_RETURN(const int64_t data_bytes, CheckMaskData(wire, masks));
  decoded.mask_data_bytes = data_bytes;
  const bool is_small = wire.ByteSizeLong() + static_cast<size_t>(data_bytes) <= kSmallMaskBytes;
  if (!is_small && !FollowsLater(data_bytes, masks)) {
    RETURN_IF_ERROR(LeaveItWhereItTakesLong(masks));
  }
  std::string data;
  if (data_bytes > 0) {
    ASSIGN_OR_RETURN(data, read_mask_data(data_bytes));
  }
  absl::StatusOr<MaskSpec> spec = DecodeMask(wire, data);
  if (!spec.ok()) return Classified(spec.status());
  auto kept = masks.store.Keep(*spec, MaskCallOf(decoded.problem), masks.caller);
  if (!kept.ok()) return Classified(kept.status());
  decoded.problem.mask = *std::move(kept);
  return absl::OkStatus();
}

// Last: a mask is checked against the sizes and options of the rest.
absl::Status DecodeMaskIn(const v1::Problem& wire, const CallersMasks& masks,
                          ReadMaskData read_mask_data, DecodedProblem& decoded) {
  if (!wire.has_mask()) return absl::OkStatus();
  const v1::MaskSpec& mask = wire.mask();
  Problem& p = decoded.problem;
  p.mask_origin = DecodeMaskOrigin(mask);
  if (mask.id().empty()) {
    RETURN_IF_ERROR(TakeMask(mask, masks, read_mask_data, decoded));
  } else {
    RETURN_IF_ERROR(RefuseBesideId(mask));
    ASSIGN_OR_RETURN(p.mask, masks.store.Find(mask.id(), masks.caller, !masks.is_repeated));
  }
  RETURN_IF_ERROR(Classified(Validate(p)));
  return PlanMask(masks, decoded);
}

}  // namespace

absl::Status PlanMask(const CallersMasks& masks, DecodedProblem& decoded) {
  Problem& p = decoded.problem;
  if (p.mask == nullptr) return absl::OkStatus();
  const bool rejects_empty_rows = p.mask->spec().empty_row == EmptyRow::kReject;
  MaskPlans& plans = masks.store.plans();
  decoded.plan = plans.Find(p, HostMaskOptions());
  if (decoded.plan == nullptr || rejects_empty_rows) {
    RETURN_IF_ERROR(LeaveItWhereItTakesLong(masks));
    auto plan = plans.Get(p, HostMaskOptions());
    if (!plan.ok()) return Classified(plan.status());
    decoded.plan = *std::move(plan);
  }
  p.mask_share = VisitedShare(*decoded.plan, p);
  if (!rejects_empty_rows) return absl::OkStatus();
  const absl::Status empty = CheckEmptyRows(*decoded.plan, p);
  if (!absl::IsInvalidArgument(empty)) return Classified(empty);
  return Failure(empty.code(), reason::kEmptyRow, empty.message(),
                 {{"field", "problem.mask.empty_row"}});
}

absl::Status RefuseMaskData(int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  return FieldError(reason::kSizeMismatch, "mask_data", "none without lists of problem.mask there",
                    absl::StrCat(bytes, " bytes"));
}

absl::StatusOr<DecodedProblem> DecodeProblem(const v1::Problem& wire, const CallersMasks& masks,
                                             ReadMaskData read_mask_data) {
  DecodedProblem decoded;
  Problem& p = decoded.problem;
  RETURN_IF_ERROR(DecodeSizes(wire, p));
  DecodeScalars(wire, p);
  RETURN_IF_ERROR(DecodeAlignment(wire, p));
  RETURN_IF_ERROR(DecodeLengths(wire, p));
  RETURN_IF_ERROR(DecodeMaskAndBias(wire, p));
  RETURN_IF_ERROR(DecodeDropout(wire, p));
  RETURN_IF_ERROR(DecodeDenominator(wire, p));
  RETURN_IF_ERROR(Classified(Validate(p)));
  RETURN_IF_ERROR(DecodeMaskIn(wire, masks, read_mask_data, decoded));
  return decoded;
}

}  // namespace attnd
