#include "proto/attnd/v1/attention_op_codec.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "modules/field_error.h"
#include "proto/attnd/v1/mask_codec.h"
#include "proto/attnd/v1/problem_codec.h"

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

// An op's slopes are those of its own heads, and its alignment is named without the case in it.
absl::Status CheckSpelling(const v1::Problem& wire, const std::string& path) {
  const v1::Alignment& alignment = wire.alignment();
  if ((alignment.has_top_left() && !alignment.top_left()) ||
      (alignment.has_bottom_right() && !alignment.bottom_right())) {
    return WrongField(absl::StrCat(path, ".alignment"), "true when present", "false");
  }
  if (wire.has_alibi() && wire.alibi().slope().empty()) {
    return WrongField(absl::StrCat(path, ".alibi.slope"), "q.heads entries", 0);
  }
  return absl::OkStatus();
}

absl::StatusOr<Problem> DecodeOpOptions(const v1::Problem& wire, const std::string& path) {
  RETURN_IF_ERROR(CheckOnlyOptions(wire, path));
  RETURN_IF_ERROR(CheckSpelling(wire, path));
  return DecodeProblemOptions(wire, path);
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
  ASSIGN_OR_RETURN(op.options, DecodeOpOptions(wire.options(), absl::StrCat(path, ".options")));
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
  EncodeProblemOptions(op.options, *wire.mutable_options());
  if (op.mask.has_value()) *wire.mutable_options()->mutable_mask() = EncodeMaskSpec(*op.mask);
  if (op.q_norm.has_value()) wire.set_q_norm(static_cast<uint32_t>(*op.q_norm));
  if (op.k_norm.has_value()) wire.set_k_norm(static_cast<uint32_t>(*op.k_norm));
  wire.set_qk_norm_epsilon(op.qk_norm_epsilon);
  wire.set_qk_norm_weight_offset(op.qk_norm_weight_offset);
  wire.set_qk_norm_round_before_weight(op.qk_norm_round_before_weight);
  return wire;
}

}  // namespace attnd
