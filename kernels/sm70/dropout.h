// Dropout's keep decisions in the lane maps of sm70/tile_math.h: a lane owns whole generator calls
// (attention/dropout.h), so that no random byte is made twice or thrown away.
//   NoDropout         keeps everything; costs nothing
//   PhiloxDropout     two row tiles × 32 keys a step: one call for each row tile
// KeepPair(m, group, r, k) is the mask of one half2 of P: row tile m, 16-key group, the lane's row
// r (float32 accumulators; for float16 ones the pair of keys r), k step k.
#pragma once

#include "attention/dropout.h"
#include "kernels/score_rules.h"
#include "kernels/sm70/tile_math.h"

namespace attnd::sm70 {

struct NoDropout {
  ATTN_HD NoDropout(const ScoreContext&, int) {}
  ATTN_HD void StartStep(int, int) {}
  ATTN_HD uint32_t KeepPair(int, int, int, int) const { return 0xffffffffu; }
  ATTN_HD static bool Drops(const ScoreContext&, int, int) { return false; }
};

// The sign of each byte tells whether that byte of `bytes` is at least the threshold (unsigned).
ATTN_HD uint32_t KeepSigns(uint32_t bytes, uint32_t threshold_bytes) {
  uint32_t low7 = (bytes | 0x80808080u) - (threshold_bytes & 0x7f7f7f7fu);
  return (bytes & ~threshold_bytes) | (~(bytes ^ threshold_bytes) & low7);
}
// Masks of two float16: `pair` 0 or 1 names the two lower or upper bytes. Four bytes are compared
// at once; PRMT then spreads their signs.
ATTN_HD uint32_t KeepMask(uint32_t bytes, uint32_t threshold_bytes, int pair) {
  return ptx::Permute(KeepSigns(bytes, threshold_bytes), 0, pair ? 0xbbaau : 0x9988u);
}

// For Float32Accumulate: the lane's rows r (bit 3 of the row) and keys (bits 0, 3, 4) are what one
// call serves, so word 2r + group holds [k step][pair] of that row and group.
class PhiloxDropout {
 public:
  ATTN_HD static DropoutStream StreamOf(const ScoreContext& at) {
    const ProblemDesc& p = at.problem;
    return {p.dropout_key_lo, p.dropout_key_hi, p.dropout_offset_lo,
            p.dropout_head + at.batch * p.dropout_batch + at.head};
  }

  ATTN_HD PhiloxDropout(const ScoreContext& at, int lane)
      : threshold_bytes_(at.problem.dropout_threshold * 0x01010101u),
        stream_(StreamOf(at)),
        column_(Float32Accumulate::Col(0, lane)) {}

  // `row`: of the lane's element 0 of row tile 0. `first_key`: of the step's 32.
  ATTN_HD void StartStep(int row, int first_key) {
    uint32_t lane = (row & 7) * 4 + (column_ >> 1);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      calls_[m] = DropoutBytes(stream_, (row >> 4) + m, first_key >> 5, lane);
    }
  }
  ATTN_HD static bool Drops(const ScoreContext& at, int row, int key) {
    return DropoutByte(StreamOf(at), row, key) < at.problem.dropout_threshold;
  }
  ATTN_HD uint32_t KeepPair(int m, int group, int r, int k) const {
    const uint32_t* word = calls_[m].word;
    return KeepMask(group ? word[2 * r + 1] : word[2 * r], threshold_bytes_, k);
  }

 private:
  uint32_t threshold_bytes_;
  DropoutStream stream_;
  int column_;
  PhiloxBlock calls_[2];
};

}  // namespace attnd::sm70
