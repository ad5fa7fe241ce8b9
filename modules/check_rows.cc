#include "modules/check_rows.h"

#include <vector>

#include "base/status_macros.h"
#include "modules/attention_problem.h"
#include "modules/field_error.h"

namespace attnd {
namespace {

absl::Status CheckCuSeqlens(absl::string_view field, const std::vector<int32_t>& cu,
                            int64_t batch) {
  if (static_cast<int64_t>(cu.size()) != batch + 1) {
    return WrongField(field, absl::StrCat("batch + 1 = ", batch + 1, " entries"), cu.size());
  }
  if (cu[0] != 0) return WrongField(absl::StrCat(field, "[0]"), 0, cu[0]);
  for (size_t n = 1; n < cu.size(); ++n) {
    if (cu[n] >= cu[n - 1] && cu[n] <= kMaxLength) continue;
    return WrongField(absl::StrCat(field, "[", n, "]"), absl::StrCat(cu[n - 1], "..", kMaxLength),
                      cu[n]);
  }
  if (cu.back() > 0) return absl::OkStatus();
  return WrongField(absl::StrCat(field, "[", batch, "]"), "at least 1 row", 0);
}

absl::Status CheckAbsent(absl::string_view field, bool is_absent, absl::string_view where) {
  return is_absent ? absl::OkStatus() : WrongField(field, absl::StrCat("none ", where), "some");
}

absl::Status CheckPacked(const CallRows& rows, bool has_memory) {
  RETURN_IF_ERROR(CheckCuSeqlens("rows.lengths.cu_seqlens_q", rows.cu_seqlens, rows.batch));
  constexpr absl::string_view kWhere = "in a packed layout";
  RETURN_IF_ERROR(CheckAbsent("rows.lengths.kv_len", rows.kv_lengths.empty(), kWhere));
  RETURN_IF_ERROR(CheckAbsent("rows.memory_length", rows.memory_length == 0, kWhere));
  RETURN_IF_ERROR(
      CheckAbsent("rows.memory_lengths.kv_len", rows.memory_kv_lengths.empty(), kWhere));
  if (!has_memory) return absl::OkStatus();
  return CheckCuSeqlens("rows.memory_lengths.cu_seqlens_k", rows.memory_cu_seqlens, rows.batch);
}

absl::Status CheckKvLengths(absl::string_view field, const std::vector<int32_t>& lengths,
                            int64_t batch, int64_t most) {
  if (lengths.empty()) return absl::OkStatus();
  if (static_cast<int64_t>(lengths.size()) != batch) {
    return WrongField(field, absl::StrCat("batch = ", batch, " entries"), lengths.size());
  }
  for (size_t n = 0; n < lengths.size(); ++n) {
    if (lengths[n] >= 0 && lengths[n] <= most) continue;
    return FieldInRange(absl::StrCat(field, "[", n, "]"), lengths[n], 0, most);
  }
  return absl::OkStatus();
}

absl::Status CheckDense(const CallRows& rows, bool has_memory) {
  constexpr absl::string_view kWhere = "in a dense layout";
  RETURN_IF_ERROR(CheckAbsent("rows.lengths.cu_seqlens_q", rows.cu_seqlens.empty(), kWhere));
  RETURN_IF_ERROR(
      CheckAbsent("rows.memory_lengths.cu_seqlens_k", rows.memory_cu_seqlens.empty(), kWhere));
  RETURN_IF_ERROR(FieldInRange("rows.length", rows.length, 1, kMaxLength));
  RETURN_IF_ERROR(CheckKvLengths("rows.lengths.kv_len", rows.kv_lengths, rows.batch, rows.length));
  if (!has_memory) return absl::OkStatus();
  RETURN_IF_ERROR(FieldInRange("rows.memory_length", rows.memory_length, 1, kMaxLength));
  return CheckKvLengths("rows.memory_lengths.kv_len", rows.memory_kv_lengths, rows.batch,
                        rows.memory_length);
}

absl::Status CheckNoMemory(const CallRows& rows) {
  constexpr absl::string_view kWhere = "since memory_width is 0";
  RETURN_IF_ERROR(CheckAbsent("rows.memory_length", rows.memory_length == 0, kWhere));
  return CheckAbsent("rows.memory_lengths",
                     rows.memory_kv_lengths.empty() && rows.memory_cu_seqlens.empty(), kWhere);
}

absl::Status CheckPlace(const CallRows& rows) {
  RETURN_IF_ERROR(FieldInRange("rows.first_sequence", rows.first_sequence, 0, kMaxBatch));
  RETURN_IF_ERROR(FieldInRange("rows.first_row", rows.first_row, 0, kMaxCallRows));
  RETURN_IF_ERROR(
      FieldInRange("rows.first_row and rows", rows.first_row + rows.rows(), 1, kMaxCallRows));
  if (!rows.is_packed() && rows.first_row != rows.first_sequence * rows.length) {
    return WrongField("rows.first_row",
                      absl::StrCat("first_sequence · length = ", rows.first_sequence * rows.length),
                      rows.first_row);
  }
  const int64_t positions = static_cast<int64_t>(rows.positions.size());
  if (positions == 0 || positions == rows.rows()) return absl::OkStatus();
  return WrongField("rows.position", absl::StrCat("none or ", rows.rows(), " entries"), positions);
}

// Checks one layer of each block, since layers of a block differ in scale alone.
absl::Status CheckAttention(const ModuleGraph& graph, const CallRows& rows) {
  std::vector<bool> is_done(graph.layout().blocks.size());
  for (size_t layer = 0; layer < graph.layout().layers.size(); ++layer) {
    const int64_t block = graph.layout().layers[layer].block;
    if (is_done[block]) continue;
    is_done[block] = true;
    for (int64_t op : graph.shapes(block).attention_ops) {
      auto problem = ProblemOf(graph, layer, op, rows, {.is_training = true});
      if (problem.ok()) continue;
      return absl::Status(problem.status().code(),
                          absl::StrCat("rows: block[", block, "].op[", op,
                                       "].attention: ", problem.status().message()));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckRows(const ModuleGraph& graph, const CallRows& rows) {
  const bool has_memory = graph.layout().memory_width > 0;
  RETURN_IF_ERROR(FieldInRange("rows.batch", rows.batch, 1, kMaxBatch));
  if (!has_memory) RETURN_IF_ERROR(CheckNoMemory(rows));
  RETURN_IF_ERROR(rows.is_packed() ? CheckPacked(rows, has_memory) : CheckDense(rows, has_memory));
  RETURN_IF_ERROR(CheckPlace(rows));
  return CheckAttention(graph, rows);
}

}  // namespace attnd
