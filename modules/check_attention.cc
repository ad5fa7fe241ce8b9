#include <string>

#include "absl/strings/strip.h"
#include "attention/masks/mask_description.h"
#include "base/status_macros.h"
#include "modules/check_layout.h"
#include "modules/field_error.h"

namespace attnd {
namespace {

absl::Status CheckRotary(const AttentionOp& op, bool is_cross, absl::string_view path) {
  if (!op.rotary.has_value()) return absl::OkStatus();
  const std::string field = absl::StrCat(path, ".rotary");
  if (is_cross) return WrongField(field, "none where k is the memory's", "one");
  const int64_t count = static_cast<int64_t>(op.rotary->inverse_frequency.size());
  const std::string list = absl::StrCat(field, ".inverse_frequency");
  RETURN_IF_ERROR(FieldInRange(list, count, 1, kMaxRotaryFrequencies));
  if (2 * count > op.q.dim) {
    return WrongField(list, absl::StrCat("at most q.dim / 2 = ", op.q.dim / 2, " entries"), count);
  }
  for (float frequency : op.rotary->inverse_frequency) {
    RETURN_IF_ERROR(FieldIsFinite(list, frequency));
  }
  return FieldIsFinite(absl::StrCat(field, ".attention_factor"), op.rotary->attention_factor);
}

// "problem.softcap: expected ..." of one sequence with one row becomes "PATH.options.softcap: ...".
absl::Status Renamed(const absl::Status& status, absl::string_view path) {
  if (status.ok()) return status;
  const absl::string_view message = absl::StripPrefix(status.message(), "problem.");
  return absl::Status(status.code(), absl::StrCat(path, ".options.", message));
}

// A problem with the op's heads and options and one row: what can be wrong whatever the rows are.
Problem OneRow(const AttentionOp& op) {
  Problem p = op.options;
  p.batch = 1;
  p.q_heads = op.q.heads;
  p.kv_heads = op.k.heads;
  p.q_len = p.kv_len = 1;
  p.qk_head_dim = op.q.dim;
  p.v_head_dim = op.v.dim;
  p.layout = Layout::kBlhd;
  return p;
}

absl::Status CheckMask(const AttentionOp& op) {
  if (!op.mask.has_value()) return absl::OkStatus();
  const MaskExtents& extents = op.mask->extents;
  if ((extents.rows == 0) != (extents.keys == 0)) {
    return WrongField("mask.extents", "both rows and keys, or neither", "one");
  }
  const int64_t rows = extents.rows == 0 ? 1 : extents.rows;
  const int64_t keys = extents.keys == 0 ? 1 : extents.keys;
  RETURN_IF_ERROR(FieldInRange("mask.extents.rows", rows, 1, kMaxMaskLength));
  RETURN_IF_ERROR(FieldInRange("mask.extents.keys", keys, 1, kMaxMaskLength));
  return ValidateMask(*op.mask, {.batch = 1, .q_heads = op.q.heads, .rows = rows, .keys = keys});
}

}  // namespace

absl::Status CheckAttentionOptions(const AttentionOp& op, bool is_cross, absl::string_view path) {
  const std::string field = absl::StrCat(path, ".attention");
  RETURN_IF_ERROR(CheckRotary(op, is_cross, field));
  const Problem p = OneRow(op);
  const bool needs_diagonal = p.IsBounded() || !p.alibi_slopes.empty();
  if (is_cross && needs_diagonal && p.alignment == Alignment::kUnspecified) {
    return WrongField(absl::StrCat(field, ".options.alignment"),
                      "top_left, bottom_right or offsets, since causal, window or ALiBi of "
                      "cross-attention depend on it",
                      "none");
  }
  RETURN_IF_ERROR(Renamed(Validate(p), field));
  return Renamed(CheckMask(op), field);
}

}  // namespace attnd
