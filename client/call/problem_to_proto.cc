#include "client/call/problem_to_proto.h"

#include <utility>

#include "attention/masks/mask_description.h"
#include "proto/attnd/v1/mask_codec.h"

namespace attnd {
namespace {

v1::Element ToProto(ElementType element) { return static_cast<v1::Element>(element); }

void SetSizes(const Problem& p, v1::Problem& out) {
  out.set_batch(p.batch);
  out.set_q_heads(p.q_heads);
  out.set_kv_heads(p.kv_heads);
  out.set_q_len(p.q_len);
  out.set_kv_len(p.kv_len);
  out.set_qk_head_dim(p.qk_head_dim);
  out.set_v_head_dim(p.v_head_dim);
  out.set_element(ToProto(p.element));
  out.set_layout(static_cast<v1::Layout>(p.layout));
}

void SetLengths(const Problem& p, v1::Problem& out) {
  if (p.kv_lengths.empty() && p.cu_seqlens_q.empty() && p.cu_seqlens_k.empty()) return;
  v1::Lengths& lengths = *out.mutable_lengths();
  lengths.mutable_kv_len()->Assign(p.kv_lengths.begin(), p.kv_lengths.end());
  lengths.mutable_cu_seqlens_q()->Assign(p.cu_seqlens_q.begin(), p.cu_seqlens_q.end());
  lengths.mutable_cu_seqlens_k()->Assign(p.cu_seqlens_k.begin(), p.cu_seqlens_k.end());
}

void SetDiagonal(const Problem& p, v1::Problem& out) {
  switch (p.alignment) {
    case Alignment::kUnspecified:
      break;
    case Alignment::kTopLeft:
      out.mutable_alignment()->set_top_left(true);
      break;
    case Alignment::kBottomRight:
      out.mutable_alignment()->set_bottom_right(true);
      break;
    case Alignment::kOffsets:
      out.mutable_alignment()->mutable_offsets()->mutable_offset()->Assign(p.offsets.begin(),
                                                                           p.offsets.end());
      break;
  }
  out.set_causal(p.causal);
  if (p.window_left >= 0 || p.window_right >= 0) {
    out.mutable_window()->set_left(p.window_left);
    out.mutable_window()->set_right(p.window_right);
  }
}

template <class Field>
void SetShape(const BroadcastShape& shape, Field* field) {
  for (int64_t dimension : {shape.batch, shape.heads, shape.rows, shape.columns}) {
    field->Add(dimension);
  }
}

void SetScores(const Problem& p, v1::Problem& out) {
  if (p.scale.has_value()) out.set_scale(*p.scale);
  out.set_softcap(p.softcap);
  if (p.bool_mask) SetShape(p.bool_mask->shape, out.mutable_bool_mask()->mutable_shape());
  if (p.bias) {
    out.mutable_bias()->set_element(ToProto(p.bias->element));
    SetShape(p.bias->shape, out.mutable_bias()->mutable_shape());
    out.mutable_bias()->set_want_gradient(p.bias->want_gradient);
  }
  if (!p.alibi_slopes.empty()) {
    out.mutable_alibi()->mutable_slope()->Assign(p.alibi_slopes.begin(), p.alibi_slopes.end());
  }
}

void SetSoftmax(const Problem& p, v1::Problem& out) {
  if (p.dropout.threshold != 0) {
    out.mutable_dropout()->set_p(static_cast<float>(p.dropout.threshold) / 256.0f);
    out.mutable_dropout()->set_seed(p.dropout.seed);
    out.mutable_dropout()->set_offset(p.dropout.offset);
  }
  if (p.denominator == DenominatorKind::kZeroRest) out.mutable_denominator()->mutable_zero_rest();
  if (p.denominator == DenominatorKind::kSink) {
    out.mutable_denominator()->mutable_sink()->mutable_logit()->Assign(p.sink_logits.begin(),
                                                                       p.sink_logits.end());
  }
  if (p.accumulate == AccumulateType::kFloat16) out.set_accumulate(v1::ACCUMULATE_FLOAT16);
  out.set_allow_nondeterministic(p.allow_nondeterministic);
}

void SetShard(const Shard& shard, v1::Problem& out) {
  if (shard.batch_offset == 0 && shard.q_head_offset == 0 && shard.total_q_heads == 0) return;
  out.mutable_shard()->set_batch_offset(shard.batch_offset);
  out.mutable_shard()->set_q_head_offset(shard.q_head_offset);
  out.mutable_shard()->set_total_q_heads(shard.total_q_heads);
}

v1::MaskSpec EncodeMask(const Problem& p, MaskForm form) {
  if (form == MaskForm::kWhole) return EncodeMaskSpec(p.mask->spec());
  v1::MaskSpec named;
  named.set_id(p.mask->id().data(), p.mask->id().size());
  return named;
}

}  // namespace

v1::Problem ToProto(const Problem& p, MaskForm mask) {
  return ToProto(p, p.mask == nullptr ? v1::MaskSpec() : EncodeMask(p, mask));
}

v1::Problem ToProto(const Problem& p, v1::MaskSpec mask) {
  v1::Problem out;
  SetSizes(p, out);
  SetLengths(p, out);
  SetDiagonal(p, out);
  SetScores(p, out);
  SetSoftmax(p, out);
  SetShard(p.shard, out);
  if (p.mask != nullptr) {
    EncodeMaskOrigin(p.mask_origin, mask);
    *out.mutable_mask() = std::move(mask);
  }
  return out;
}

}  // namespace attnd
