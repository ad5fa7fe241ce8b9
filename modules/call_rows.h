// CallRows: the sequences of one call, and its place in the micro-batch that it is a part of. x is
// [rows, width], the memory [memory rows, memory_width], each with its sequences end to end.
// Dense: `batch` sequences of `length` rows (the memory's of memory_length), of which key lengths
// may say how many exist. Packed: cu_seqlens. A value; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/problem.h"
#include "modules/block_shapes.h"

namespace attnd {

// Rows count in 32 bits in dropout's generator.
inline constexpr int64_t kMaxCallRows = int64_t{1} << 32;

struct CallRows {
  int64_t batch = 0;
  int64_t length = 0;                 // 0: packed
  std::vector<int32_t> kv_lengths;    // dense: [batch] or empty
  std::vector<int32_t> cu_seqlens;    // packed: [batch + 1]
  std::optional<BoolMask> bool_mask;  // of attention over x's own keys
  std::vector<uint32_t> positions;    // [rows], for rotary; empty: 0, 1, ... in each sequence
  // The place of this call's first row and sequence in the whole micro-batch; dropout depends on
  // it.
  int64_t first_row = 0;
  int64_t first_sequence = 0;
  int64_t memory_length = 0;
  std::vector<int32_t> memory_kv_lengths;
  std::vector<int32_t> memory_cu_seqlens;

  bool is_packed() const { return length == 0; }
  int64_t rows() const { return is_packed() ? cu_seqlens.back() : batch * length; }
  int64_t memory_rows() const {
    if (memory_cu_seqlens.empty()) return batch * memory_length;
    return memory_cu_seqlens.back();
  }
  int64_t RowsOf(RowKind kind) const { return kind == RowKind::kInput ? rows() : memory_rows(); }
  std::vector<uint32_t> ResolvedPositions() const;  // [rows]
  // Sequences first .. first + count of these as a call of their own. Of dense calls; its mask bits
  // are those of the same sequences.
  CallRows Sequences(int64_t first, int64_t count) const;
};

// Seed and number of the micro-batch of a call's dropout; in training alone there is any.
struct CallDropout {
  bool is_training = false;
  uint64_t seed = 0;
  uint32_t offset = 0;
};

}  // namespace attnd
