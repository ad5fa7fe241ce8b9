#include "proto/attnd/v1/rows_codec.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "modules/field_error.h"
#include "proto/attnd/v1/problem_codec.h"

namespace attnd {
namespace {

using google::protobuf::RepeatedField;

absl::StatusOr<std::vector<int32_t>> DecodeLengthList(absl::string_view field,
                                                      const RepeatedField<uint32_t>& wire) {
  RETURN_IF_ERROR(FieldInRange(field, wire.size(), 0, kMaxBatch + 1));
  const auto large =
      std::find_if(wire.begin(), wire.end(), [](uint32_t n) { return n > kMaxLength; });
  if (large != wire.end()) {
    return FieldInRange(absl::StrCat(field, "[", large - wire.begin(), "]"), *large, 0, kMaxLength);
  }
  return std::vector<int32_t>(wire.begin(), wire.end());
}

absl::Status CheckNone(absl::string_view field, const RepeatedField<uint32_t>& wire) {
  return wire.empty() ? absl::OkStatus() : WrongField(field, "none", wire.size());
}

}  // namespace

absl::StatusOr<CallRows> DecodeRows(const v1::Rows& wire) {
  CallRows rows{.batch = wire.batch(), .length = wire.length()};
  RETURN_IF_ERROR(CheckNone("rows.lengths.cu_seqlens_k", wire.lengths().cu_seqlens_k()));
  RETURN_IF_ERROR(
      CheckNone("rows.memory_lengths.cu_seqlens_q", wire.memory_lengths().cu_seqlens_q()));
  ASSIGN_OR_RETURN(rows.kv_lengths,
                   DecodeLengthList("rows.lengths.kv_len", wire.lengths().kv_len()));
  ASSIGN_OR_RETURN(rows.cu_seqlens,
                   DecodeLengthList("rows.lengths.cu_seqlens_q", wire.lengths().cu_seqlens_q()));
  ASSIGN_OR_RETURN(rows.memory_kv_lengths,
                   DecodeLengthList("rows.memory_lengths.kv_len", wire.memory_lengths().kv_len()));
  ASSIGN_OR_RETURN(rows.memory_cu_seqlens, DecodeLengthList("rows.memory_lengths.cu_seqlens_k",
                                                            wire.memory_lengths().cu_seqlens_k()));
  if (wire.has_bool_mask()) {
    ASSIGN_OR_RETURN(const BroadcastShape shape,
                     DecodeShape("rows", "bool_mask.shape", wire.bool_mask().shape()));
    rows.bool_mask = BoolMask{shape};
  }
  rows.positions.assign(wire.position().begin(), wire.position().end());
  if (wire.first_row() > static_cast<uint64_t>(kMaxCallRows)) {
    return WrongField("rows.first_row", absl::StrCat("at most ", kMaxCallRows), wire.first_row());
  }
  rows.first_row = static_cast<int64_t>(wire.first_row());
  rows.first_sequence = wire.first_sequence();
  rows.memory_length = wire.memory_length();
  return rows;
}

}  // namespace attnd
