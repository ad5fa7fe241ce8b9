#include "proto/attnd/v1/problem_codec.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/dropout.h"
#include "attention/masks/mask_description.h"
#include "base/status_macros.h"
#include "modules/field_error.h"
#include "proto/attnd/v1/enum_names.h"
#include "proto/attnd/v1/mask_codec.h"

namespace attnd {
namespace {

using google::protobuf::RepeatedField;

// The path is put together only where there is an error.
template <class Expected, class Got>
absl::Status WrongIn(absl::string_view path, absl::string_view field, const Expected& expected,
                     const Got& got) {
  return WrongField(absl::StrCat(path, ".", field), expected, got);
}

absl::StatusOr<ElementType> DecodeElementOf(absl::string_view path, absl::string_view field,
                                            v1::Element element) {
  if (element != v1::ELEMENT_UNSPECIFIED) return static_cast<ElementType>(element);
  return WrongIn(path, field, EnumNames(*v1::Element_descriptor()), "ELEMENT_UNSPECIFIED");
}

// ---- From the wire.

absl::Status DecodeSizes(const v1::Problem& wire, Problem& p) {
  p.batch = wire.batch();
  p.q_heads = wire.q_heads();
  p.kv_heads = wire.kv_heads();
  p.q_len = wire.q_len();
  p.kv_len = wire.kv_len();
  p.qk_head_dim = wire.qk_head_dim();
  p.v_head_dim = wire.v_head_dim();
  ASSIGN_OR_RETURN(p.element, DecodeElementOf("problem", "element", wire.element()));
  if (wire.layout() == v1::LAYOUT_UNSPECIFIED) {
    return WrongIn("problem", "layout", EnumNames(*v1::Layout_descriptor()), "LAYOUT_UNSPECIFIED");
  }
  p.layout = static_cast<Layout>(wire.layout());
  return absl::OkStatus();
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

// A bool in a oneof means something only when true.
absl::Status MustBeTrue(absl::string_view path, absl::string_view field, bool value) {
  if (value) return absl::OkStatus();
  return WrongIn(path, field, "true when present", "false");
}

absl::Status DecodeAlignment(const v1::Problem& wire, absl::string_view path, Problem& p) {
  if (!wire.has_alignment()) return absl::OkStatus();
  const v1::Alignment& alignment = wire.alignment();
  switch (alignment.kind_case()) {
    case v1::Alignment::kTopLeft:
      p.alignment = Alignment::kTopLeft;
      return MustBeTrue(path, "alignment.top_left", alignment.top_left());
    case v1::Alignment::kBottomRight:
      p.alignment = Alignment::kBottomRight;
      return MustBeTrue(path, "alignment.bottom_right", alignment.bottom_right());
    case v1::Alignment::kOffsets:
      p.alignment = Alignment::kOffsets;
      p.offsets.assign(alignment.offsets().offset().begin(), alignment.offsets().offset().end());
      return absl::OkStatus();
    case v1::Alignment::KIND_NOT_SET:
      break;
  }
  return WrongIn(path, "alignment", "one of top_left, bottom_right, offsets", "none");
}

absl::Status DecodeProblemLengths(absl::string_view path, absl::string_view field,
                                  const RepeatedField<uint32_t>& wire, std::vector<int32_t>& out) {
  if (wire.size() > kMaxBatch + 1) {
    return WrongIn(path, field, absl::StrCat("at most ", kMaxBatch + 1, " entries"), wire.size());
  }
  out.reserve(wire.size());
  for (int n = 0; n < wire.size(); ++n) {
    if (wire[n] > static_cast<uint32_t>(kMaxLength)) {
      return WrongIn(path, absl::StrCat(field, "[", n, "]"), absl::StrCat("0..", kMaxLength),
                     wire[n]);
    }
    out.push_back(static_cast<int32_t>(wire[n]));
  }
  return absl::OkStatus();
}

absl::Status DecodeLengths(const v1::Lengths& wire, absl::string_view path, Problem& p) {
  RETURN_IF_ERROR(DecodeProblemLengths(path, "lengths.kv_len", wire.kv_len(), p.kv_lengths));
  RETURN_IF_ERROR(
      DecodeProblemLengths(path, "lengths.cu_seqlens_q", wire.cu_seqlens_q(), p.cu_seqlens_q));
  return DecodeProblemLengths(path, "lengths.cu_seqlens_k", wire.cu_seqlens_k(), p.cu_seqlens_k);
}

absl::Status DecodeBoolMaskAndBias(const v1::Problem& wire, absl::string_view path, Problem& p) {
  if (wire.has_mask() && wire.has_bool_mask()) {
    return WrongIn(path, "mask", "one of mask and bool_mask", "both");
  }
  if (wire.has_bool_mask()) {
    ASSIGN_OR_RETURN(const BroadcastShape shape,
                     DecodeShape(path, "bool_mask.shape", wire.bool_mask().shape()));
    p.bool_mask = BoolMask{shape};
  }
  if (wire.has_bias()) {
    ASSIGN_OR_RETURN(const BroadcastShape shape,
                     DecodeShape(path, "bias.shape", wire.bias().shape()));
    ASSIGN_OR_RETURN(const ElementType element,
                     DecodeElementOf(path, "bias.element", wire.bias().element()));
    p.bias = Bias{element, shape, wire.bias().want_gradient()};
  }
  return absl::OkStatus();
}

absl::Status DecodeAlibi(const v1::Problem& wire, absl::string_view path, Problem& p) {
  if (!wire.has_alibi()) return absl::OkStatus();
  p.alibi_slopes.assign(wire.alibi().slope().begin(), wire.alibi().slope().end());
  if (!p.alibi_slopes.empty()) return absl::OkStatus();
  return WrongIn(path, "alibi.slope", "q_heads or batch·q_heads entries", 0);
}

absl::Status DecodeDenominator(const v1::Problem& wire, absl::string_view path, Problem& p) {
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
  return WrongIn(path, "denominator", "one of softmax, zero_rest, sink", "none");
}

absl::Status DecodeOptionsInto(const v1::Problem& wire, absl::string_view path, Problem& p) {
  DecodeScalars(wire, p);
  RETURN_IF_ERROR(DecodeAlignment(wire, path, p));
  RETURN_IF_ERROR(DecodeLengths(wire.lengths(), path, p));
  RETURN_IF_ERROR(DecodeBoolMaskAndBias(wire, path, p));
  RETURN_IF_ERROR(DecodeAlibi(wire, path, p));
  const v1::Dropout& dropout = wire.dropout();
  ASSIGN_OR_RETURN(const uint32_t threshold, DecodeDropoutP(path, "dropout.p", dropout.p()));
  p.dropout = {threshold, dropout.seed(), dropout.offset()};
  return DecodeDenominator(wire, path, p);
}

// ---- To the wire.

void EncodeSizes(const Problem& p, v1::Problem& wire) {
  wire.set_batch(p.batch);
  wire.set_q_heads(p.q_heads);
  wire.set_kv_heads(p.kv_heads);
  wire.set_q_len(p.q_len);
  wire.set_kv_len(p.kv_len);
  wire.set_qk_head_dim(p.qk_head_dim);
  wire.set_v_head_dim(p.v_head_dim);
  wire.set_element(static_cast<v1::Element>(p.element));
  wire.set_layout(static_cast<v1::Layout>(p.layout));
}

void EncodeLengths(const Problem& p, v1::Problem& wire) {
  if (p.kv_lengths.empty() && p.cu_seqlens_q.empty() && p.cu_seqlens_k.empty()) return;
  v1::Lengths& lengths = *wire.mutable_lengths();
  lengths.mutable_kv_len()->Assign(p.kv_lengths.begin(), p.kv_lengths.end());
  lengths.mutable_cu_seqlens_q()->Assign(p.cu_seqlens_q.begin(), p.cu_seqlens_q.end());
  lengths.mutable_cu_seqlens_k()->Assign(p.cu_seqlens_k.begin(), p.cu_seqlens_k.end());
}

void EncodeDiagonal(const Problem& p, v1::Problem& wire) {
  switch (p.alignment) {
    case Alignment::kUnspecified:
      break;
    case Alignment::kTopLeft:
      wire.mutable_alignment()->set_top_left(true);
      break;
    case Alignment::kBottomRight:
      wire.mutable_alignment()->set_bottom_right(true);
      break;
    case Alignment::kOffsets:
      wire.mutable_alignment()->mutable_offsets()->mutable_offset()->Assign(p.offsets.begin(),
                                                                            p.offsets.end());
      break;
  }
  wire.set_causal(p.causal);
  if (p.window_left >= 0 || p.window_right >= 0) {
    wire.mutable_window()->set_left(p.window_left);
    wire.mutable_window()->set_right(p.window_right);
  }
}

void EncodeShape(const BroadcastShape& shape, RepeatedField<uint32_t>& wire) {
  for (int64_t dimension : {shape.batch, shape.heads, shape.rows, shape.columns}) {
    wire.Add(dimension);
  }
}

void EncodeScores(const Problem& p, v1::Problem& wire) {
  if (p.scale.has_value()) wire.set_scale(*p.scale);
  wire.set_softcap(p.softcap);
  if (p.bool_mask) EncodeShape(p.bool_mask->shape, *wire.mutable_bool_mask()->mutable_shape());
  if (p.bias) {
    wire.mutable_bias()->set_element(static_cast<v1::Element>(p.bias->element));
    EncodeShape(p.bias->shape, *wire.mutable_bias()->mutable_shape());
    wire.mutable_bias()->set_want_gradient(p.bias->want_gradient);
  }
  if (!p.alibi_slopes.empty()) {
    wire.mutable_alibi()->mutable_slope()->Assign(p.alibi_slopes.begin(), p.alibi_slopes.end());
  }
}

void EncodeSoftmax(const Problem& p, v1::Problem& wire) {
  if (p.dropout.threshold != 0) {
    wire.mutable_dropout()->set_p(static_cast<float>(p.dropout.threshold) / 256.0f);
    wire.mutable_dropout()->set_seed(p.dropout.seed);
    wire.mutable_dropout()->set_offset(p.dropout.offset);
  }
  if (p.denominator == DenominatorKind::kZeroRest) wire.mutable_denominator()->mutable_zero_rest();
  if (p.denominator == DenominatorKind::kSink) {
    wire.mutable_denominator()->mutable_sink()->mutable_logit()->Assign(p.sink_logits.begin(),
                                                                        p.sink_logits.end());
  }
  if (p.accumulate == AccumulateType::kFloat16) wire.set_accumulate(v1::ACCUMULATE_FLOAT16);
  wire.set_allow_nondeterministic(p.allow_nondeterministic);
}

void EncodeShard(const Shard& shard, v1::Problem& wire) {
  if (shard.batch_offset == 0 && shard.q_head_offset == 0 && shard.total_q_heads == 0) return;
  wire.mutable_shard()->set_batch_offset(shard.batch_offset);
  wire.mutable_shard()->set_q_head_offset(shard.q_head_offset);
  wire.mutable_shard()->set_total_q_heads(shard.total_q_heads);
}

v1::MaskSpec EncodeMaskAs(const Problem& p, MaskForm form) {
  if (p.mask == nullptr) return v1::MaskSpec();
  if (form == MaskForm::kWhole) return EncodeMaskSpec(p.mask->spec());
  v1::MaskSpec named;
  named.set_id(p.mask->id().data(), p.mask->id().size());
  return named;
}

}  // namespace

absl::StatusOr<Problem> DecodeProblemFields(const v1::Problem& wire) {
  Problem p;
  RETURN_IF_ERROR(DecodeSizes(wire, p));
  RETURN_IF_ERROR(DecodeOptionsInto(wire, "problem", p));
  return p;
}

absl::StatusOr<Problem> DecodeProblemOptions(const v1::Problem& wire, absl::string_view path) {
  Problem p;
  RETURN_IF_ERROR(DecodeOptionsInto(wire, path, p));
  return p;
}

v1::Problem EncodeProblem(const Problem& p, MaskForm mask) {
  return EncodeProblem(p, EncodeMaskAs(p, mask));
}

v1::Problem EncodeProblem(const Problem& p, v1::MaskSpec mask) {
  v1::Problem wire;
  EncodeSizes(p, wire);
  EncodeProblemOptions(p, wire);
  if (p.mask != nullptr) {
    EncodeMaskOrigin(p.mask_origin, mask);
    *wire.mutable_mask() = std::move(mask);
  }
  return wire;
}

void EncodeProblemOptions(const Problem& p, v1::Problem& wire) {
  EncodeLengths(p, wire);
  EncodeDiagonal(p, wire);
  EncodeScores(p, wire);
  EncodeSoftmax(p, wire);
  EncodeShard(p.shard, wire);
}

absl::StatusOr<BroadcastShape> DecodeShape(absl::string_view path, absl::string_view field,
                                           const RepeatedField<uint32_t>& shape) {
  if (shape.size() != 4) return WrongIn(path, field, "4 entries", shape.size());
  return BroadcastShape{shape[0], shape[1], shape[2], shape[3]};
}

absl::StatusOr<uint32_t> DecodeDropoutP(absl::string_view path, absl::string_view field, float p) {
  // Compared this way round so that NaN fails.
  if (p >= 0 && p < 1 && DropoutThreshold(p) <= 255) return DropoutThreshold(p);
  return WrongIn(path, field, "0 ≤ p < 1 that does not round to 1 in steps of 1/256", p);
}

}  // namespace attnd
