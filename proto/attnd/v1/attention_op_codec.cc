#include "proto/attnd/v1/attention_op_codec.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "attention/dropout.h"
#include "base/status_macros.h"
#include "modules/field_error.h"
#include "proto/attnd/v1/mask_codec.h"

namespace attnd {
namespace {

HeadColumns DecodeHeads(const v1::Heads& wire) {
  return {wire.value(), wire.first_column(), wire.heads(), wire.dim()};
}

Rotary DecodeRotary(const v1::Rotary& wire) {
  return {.inverse_frequency = {wire.inverse_frequency().begin(), wire.inverse_frequency().end()},
          .attention_factor = wire.attention_factor() == 0 ? 1 : wire.attention_factor(),
          .interleaved = wire.interleaved()};
}

// Sizes and the like are the call's: nothing of them may be said here, so that nothing is ignored.
absl::Status CheckOnlyOptions(const v1::Problem& wire, const std::string& path) {
  const std::pair<absl::string_view, bool> absent[] = {
      {"batch", wire.batch() == 0},
      {"q_heads", wire.q_heads() == 0},
      {"kv_heads", wire.kv_heads() == 0},
      {"q_len", wire.q_len() == 0},
      {"kv_len", wire.kv_len() == 0},
      {"qk_head_dim", wire.qk_head_dim() == 0},
      {"v_head_dim", wire.v_head_dim() == 0},
      {"element", wire.element() == v1::ELEMENT_UNSPECIFIED},
      {"layout", wire.layout() == v1::LAYOUT_UNSPECIFIED},
      {"lengths", !wire.has_lengths()},
      {"bias", !wire.has_bias()},
      {"bool_mask", !wire.has_bool_mask()},
      {"shard", !wire.has_shard()},
      {"accumulate", wire.accumulate() == v1::ACCUMULATE_UNSPECIFIED},
      {"allow_nondeterministic", !wire.allow_nondeterministic()},
      {"dropout.seed", wire.dropout().seed() == 0},
      {"dropout.offset", wire.dropout().offset() == 0},
      {"mask.id", wire.mask().id().empty()},
      {"mask.origin", !wire.mask().has_origin()}};
  for (const auto& [field, is_absent] : absent) {
    if (!is_absent) {
      return WrongField(absl::StrCat(path, ".", field), "none in a layout", "some");
    }
  }
  return absl::OkStatus();
}

absl::Status DecodeAlignment(const v1::Problem& wire, const std::string& path, Problem& p) {
  const v1::Alignment& alignment = wire.alignment();
  const std::string field = absl::StrCat(path, ".alignment");
  switch (alignment.kind_case()) {
    case v1::Alignment::kTopLeft:
      p.alignment = Alignment::kTopLeft;
      if (!alignment.top_left()) return WrongField(field, "true when present", "false");
      return absl::OkStatus();
    case v1::Alignment::kBottomRight:
      p.alignment = Alignment::kBottomRight;
      if (!alignment.bottom_right()) return WrongField(field, "true when present", "false");
      return absl::OkStatus();
    case v1::Alignment::kOffsets:
      p.alignment = Alignment::kOffsets;
      p.offsets.assign(alignment.offsets().offset().begin(), alignment.offsets().offset().end());
      return absl::OkStatus();
    case v1::Alignment::KIND_NOT_SET:
      break;
  }
  if (!wire.has_alignment()) return absl::OkStatus();
  return WrongField(field, "one of top_left, bottom_right, offsets", "none");
}

absl::Status DecodeDenominator(const v1::Problem& wire, const std::string& path, Problem& p) {
  if (!wire.has_denominator()) return absl::OkStatus();
  switch (wire.denominator().kind_case()) {
    case v1::Denominator::kSoftmax:
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
  return WrongField(absl::StrCat(path, ".denominator"), "one of softmax, zero_rest, sink", "none");
}

absl::StatusOr<Problem> DecodeOptions(const v1::Problem& wire, const std::string& path) {
  Problem p;
  RETURN_IF_ERROR(CheckOnlyOptions(wire, path));
  if (wire.has_scale()) p.scale = wire.scale();
  p.softcap = wire.softcap();
  p.causal = wire.causal();
  if (wire.has_window()) {
    p.window_left = wire.window().left();
    p.window_right = wire.window().right();
  }
  RETURN_IF_ERROR(DecodeAlignment(wire, path, p));
  p.alibi_slopes.assign(wire.alibi().slope().begin(), wire.alibi().slope().end());
  if (wire.has_alibi() && p.alibi_slopes.empty()) {
    return WrongField(absl::StrCat(path, ".alibi.slope"), "q.heads entries", 0);
  }
  const float probability = wire.dropout().p();
  if (!(probability >= 0 && probability < 1) || DropoutThreshold(probability) > 255) {
    return WrongField(absl::StrCat(path, ".dropout.p"),
                      "0 ≤ p < 1 that does not round to 1 in steps of 1/256", probability);
  }
  p.dropout.threshold = DropoutThreshold(probability);
  RETURN_IF_ERROR(DecodeDenominator(wire, path, p));
  return p;
}

void EncodeAlignment(const Problem& p, v1::Problem& wire) {
  switch (p.alignment) {
    case Alignment::kUnspecified:
      return;
    case Alignment::kTopLeft:
      wire.mutable_alignment()->set_top_left(true);
      return;
    case Alignment::kBottomRight:
      wire.mutable_alignment()->set_bottom_right(true);
      return;
    case Alignment::kOffsets:
      auto* offsets = wire.mutable_alignment()->mutable_offsets();
      for (int32_t offset : p.offsets) offsets->add_offset(offset);
      return;
  }
}

void EncodeOptions(const Problem& p, v1::Problem& wire) {
  if (p.scale.has_value()) wire.set_scale(*p.scale);
  wire.set_softcap(p.softcap);
  wire.set_causal(p.causal);
  if (p.window_left >= 0 || p.window_right >= 0) {
    wire.mutable_window()->set_left(static_cast<int32_t>(p.window_left));
    wire.mutable_window()->set_right(static_cast<int32_t>(p.window_right));
  }
  EncodeAlignment(p, wire);
  for (float slope : p.alibi_slopes) wire.mutable_alibi()->add_slope(slope);
  if (p.dropout.threshold > 0) {
    wire.mutable_dropout()->set_p(static_cast<float>(p.dropout.threshold) / 256);
  }
  if (p.denominator == DenominatorKind::kZeroRest) wire.mutable_denominator()->mutable_zero_rest();
  if (p.denominator == DenominatorKind::kSink) {
    auto* sink = wire.mutable_denominator()->mutable_sink();
    for (float logit : p.sink_logits) sink->add_logit(logit);
  }
}

void EncodeHeads(const HeadColumns& heads, v1::Heads& wire) {
  wire.set_value(static_cast<uint32_t>(heads.value));
  wire.set_first_column(static_cast<uint32_t>(heads.first_column));
  wire.set_heads(static_cast<uint32_t>(heads.heads));
  wire.set_dim(static_cast<uint32_t>(heads.dim));
}

}  // namespace

absl::StatusOr<AttentionOp> DecodeAttentionOp(const v1::AttentionOp& wire,
                                              const std::string& path) {
  AttentionOp op;
  op.q = DecodeHeads(wire.q());
  op.k = DecodeHeads(wire.k());
  op.v = DecodeHeads(wire.v());
  if (wire.has_rotary()) op.rotary = DecodeRotary(wire.rotary());
  ASSIGN_OR_RETURN(op.options, DecodeOptions(wire.options(), absl::StrCat(path, ".options")));
  if (wire.options().has_mask()) {
    absl::StatusOr<MaskSpec> mask = DecodeMask(wire.options().mask());
    if (!mask.ok()) {
      const absl::string_view message = absl::StripPrefix(mask.status().message(), "problem.");
      return absl::Status(mask.status().code(), absl::StrCat(path, ".options.", message));
    }
    op.mask = *std::move(mask);
  }
  if (wire.has_q_norm()) op.q_norm = wire.q_norm();
  if (wire.has_k_norm()) op.k_norm = wire.k_norm();
  op.qk_norm_epsilon = wire.qk_norm_epsilon();
  op.qk_norm_weight_offset = wire.qk_norm_weight_offset();
  op.qk_norm_round_before_weight = wire.qk_norm_round_before_weight();
  return op;
}

v1::AttentionOp EncodeAttentionOp(const AttentionOp& op) {
  v1::AttentionOp wire;
  EncodeHeads(op.q, *wire.mutable_q());
  EncodeHeads(op.k, *wire.mutable_k());
  EncodeHeads(op.v, *wire.mutable_v());
  if (op.rotary.has_value()) {
    v1::Rotary& rotary = *wire.mutable_rotary();
    for (float frequency : op.rotary->inverse_frequency) rotary.add_inverse_frequency(frequency);
    rotary.set_attention_factor(op.rotary->attention_factor);
    rotary.set_interleaved(op.rotary->interleaved);
  }
  EncodeOptions(op.options, *wire.mutable_options());
  if (op.mask.has_value()) *wire.mutable_options()->mutable_mask() = EncodeMaskSpec(*op.mask);
  if (op.q_norm.has_value()) wire.set_q_norm(static_cast<uint32_t>(*op.q_norm));
  if (op.k_norm.has_value()) wire.set_k_norm(static_cast<uint32_t>(*op.k_norm));
  wire.set_qk_norm_epsilon(op.qk_norm_epsilon);
  wire.set_qk_norm_weight_offset(op.qk_norm_weight_offset);
  wire.set_qk_norm_round_before_weight(op.qk_norm_round_before_weight);
  return wire;
}

}  // namespace attnd
