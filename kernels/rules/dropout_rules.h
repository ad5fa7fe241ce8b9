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
ATTN_HD bool IsDropped(const ScoreContext& at, int row, int key) {
  return DropoutByte(DropoutStreamOf(at), row, key) < at.problem.dropout_threshold;
}

}  // namespace attnd
