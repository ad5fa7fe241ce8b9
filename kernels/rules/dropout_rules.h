// Dropout's decisions (attention/dropout.h) for kernels: a block's stream, four bytes at a time,
// and one score alone. Errors: none. Threads: pure functions.
#pragma once

#include "attention/dropout.h"
#include "kernels/rules/score_rules.h"

namespace attnd {

ATTN_HD DropoutStream DropoutStreamOf(const ScoreContext& at) {
  const ProblemDesc& p = at.problem;
  return {p.dropout_key_lo, p.dropout_key_hi, p.dropout_offset_lo,
          p.dropout_head + at.batch * p.dropout_batch + at.head};
}
// The sign of each byte tells whether that byte of `bytes` is at least the threshold (unsigned).
ATTN_HD uint32_t KeepSigns(uint32_t bytes, uint32_t threshold_bytes) {
  uint32_t low7 = (bytes | 0x80808080u) - (threshold_bytes & 0x7f7f7f7fu);
  return (bytes & ~threshold_bytes) | (~(bytes ^ threshold_bytes) & low7);
}
// DropoutBytes of one column of blocks (32 keys): what no row changes in the first three rounds is
// computed once, so that a call costs ten wide multiplications instead of fourteen.
class DropoutColumn {
 public:
  ATTN_HD DropoutColumn(const DropoutStream& stream, uint32_t column_block) {
    // Words 0, 1 and 3 of a counter (offset, row, head, column) do not need the row after a round.
    PhiloxBlock block = PhiloxRound({{stream.offset_lo, 0, stream.head_index, column_block}},
                                    stream.key_lo, stream.key_hi);
    first_ = block.word[0];
    uint32_t key_lo = stream.key_lo + kPhiloxKeyStep[0];
    uint32_t key_hi = stream.key_hi + kPhiloxKeyStep[1];
    second_ = block.word[3] ^ key_hi;
    // Words 0 and 1 after two rounds need neither row nor word 0 of the first.
    block = PhiloxRound(block, key_lo, key_hi);
    key_lo += kPhiloxKeyStep[0];
    key_hi += kPhiloxKeyStep[1];
    third_[0] = block.word[1] ^ key_lo;
    third_[1] = MultiplyHigh(kPhiloxMultiplier[0], block.word[0]) ^ key_hi;
    third_[2] = kPhiloxMultiplier[0] * block.word[0];
    key_lo_ = key_lo + kPhiloxKeyStep[0];
    key_hi_ = key_hi + kPhiloxKeyStep[1];
  }
  ATTN_HD PhiloxBlock Bytes(uint32_t row_block, uint32_t lane) const {
    const uint32_t row = first_ ^ (row_block * 32 + lane);
    const uint32_t word2 = MultiplyHigh(kPhiloxMultiplier[0], row) ^ second_;
    const uint32_t word3 = kPhiloxMultiplier[0] * row;
    PhiloxBlock block = {{MultiplyHigh(kPhiloxMultiplier[1], word2) ^ third_[0],
                          kPhiloxMultiplier[1] * word2, third_[1] ^ word3, third_[2]}};
    uint32_t key_lo = key_lo_, key_hi = key_hi_;
#pragma unroll
    for (int round = 3; round < 7; ++round) {
      block = PhiloxRound(block, key_lo, key_hi);
      key_lo += kPhiloxKeyStep[0];
      key_hi += kPhiloxKeyStep[1];
    }
    return block;
  }

 private:
  uint32_t first_, second_, third_[3], key_lo_, key_hi_;
};
// The same for whole blocks of rows and columns: after three rounds what a row's place gave meets
// what a column gave for the first time, so a call costs eight wide multiplications.
class DropoutPlane {
 public:
  struct alignas(16) Row {
    uint32_t high, low, first;
  };
  struct Column {
    uint32_t high, low, first;
  };
  ATTN_HD explicit DropoutPlane(const DropoutStream& stream)
      : key_lo_(stream.key_lo), key_hi_(stream.key_hi) {
    start_ = PhiloxRound({{stream.offset_lo, 0, stream.head_index, 0}}, key_lo_, key_hi_);
  }
  ATTN_HD Row RowOf(uint32_t row_block, uint32_t lane) const {
    const uint64_t first =
        ptx::MultiplyWide(start_.word[0] ^ (row_block * 32 + lane), kPhiloxMultiplier[0]);
    const uint64_t second = ptx::MultiplyWide(
        High(first) ^ start_.word[3] ^ (key_hi_ + kPhiloxKeyStep[1]), kPhiloxMultiplier[1]);
    return {High(second), Low(second), Low(first)};
  }
  ATTN_HD Column ColumnOf(uint32_t column_block) const {
    const uint64_t first = ptx::MultiplyWide(start_.word[2] ^ column_block, kPhiloxMultiplier[1]);
    const uint64_t second = ptx::MultiplyWide(
        High(first) ^ start_.word[1] ^ (key_lo_ + kPhiloxKeyStep[0]), kPhiloxMultiplier[0]);
    return {High(second) ^ (key_hi_ + 2 * kPhiloxKeyStep[1]), Low(second),
            Low(first) ^ (key_lo_ + 2 * kPhiloxKeyStep[0])};
  }
  ATTN_HD PhiloxBlock Bytes(const Row& row, const Column& column) const {
    PhiloxBlock block = {{row.high ^ column.first, row.low, column.high ^ row.first, column.low}};
    uint32_t key_lo = key_lo_ + 2 * kPhiloxKeyStep[0], key_hi = key_hi_ + 2 * kPhiloxKeyStep[1];
#pragma unroll
    for (int round = 3; round < 7; ++round) {
      key_lo += kPhiloxKeyStep[0];
      key_hi += kPhiloxKeyStep[1];
      const uint64_t first = ptx::MultiplyWide(block.word[0], kPhiloxMultiplier[0]);
      const uint64_t second = ptx::MultiplyWide(block.word[2], kPhiloxMultiplier[1]);
      block = {{High(second) ^ block.word[1] ^ key_lo, Low(second),
                High(first) ^ block.word[3] ^ key_hi, Low(first)}};
    }
    return block;
  }

 private:
  ATTN_HD static uint32_t High(uint64_t x) { return static_cast<uint32_t>(x >> 32); }
  ATTN_HD static uint32_t Low(uint64_t x) { return static_cast<uint32_t>(x); }

  uint32_t key_lo_, key_hi_;
  PhiloxBlock start_;  // after a round, but for rows and columns
};
ATTN_HD bool IsDropped(const ScoreContext& at, int row, int key) {
  return DropoutByte(DropoutStreamOf(at), row, key) < at.problem.dropout_threshold;
}

}  // namespace attnd
