// Dropout's replay in backward, where a lane holds scores of Sᵀ: rows are keys, columns queries.
// A generator call serves two queries (bit 3) and eight keys (bits 0, 3, 4) of which a lane of a
// 32-key warp tile holds four: it makes two calls for 16 queries, one for each parity of the query,
// and uses half of their bytes (a quarter with 16 keys).
//   KeepPair(m, k, r)   mask of the pair of queries of key tile m, k step k, the lane's key r
//   Kept(mark, x, y)    x, or y if the handed-over P of a score is marked by its sign as dropped
//   Factor(problem)     what dP of kept scores is multiplied by
#pragma once

#include "kernels/sm70/dropout.h"

namespace attnd::sm70 {

struct KeepAll {
  ATTN_HD KeepAll(const ScoreContext&, int, int, int) {}
  ATTN_HD uint32_t KeepPair(int, int, int) const { return 0xffffffffu; }
  ATTN_HD static float Kept(uint32_t, float kept, float) { return kept; }
  ATTN_HD static float Factor(const ProblemDesc&) { return 1; }
  ATTN_HD static uint32_t Unmarked(uint32_t pair) { return pair; }
};

class ReplayDropout {
 public:
  // `first_row` and `first_key` are the first of the group's 16 queries and of the warp's keys.
  ATTN_HD ReplayDropout(const ScoreContext& at, int first_row, int first_key, int lane)
      : threshold_bytes_(at.problem.dropout_threshold * 0x01010101u) {
    const DropoutStream stream = DropoutStreamOf(at);
    const int key = first_key + Float32Accumulate::Row(0, lane);
    const int query = first_row + Float32Accumulate::Col(0, lane);  // even
    first_word_ = (first_key >> 4) & 1;
    byte_ = (lane & 1) * 0x1111u;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const uint32_t place = ((query + odd) & 7) * 4 + ((key & 7) >> 1);
      calls_[odd] = DropoutBytes(stream, first_row >> 4, key >> 5, place);
    }
  }
  // Word [query bit 3][key bit 4], byte [key bit 3][key bit 0] of either call.
  ATTN_HD uint32_t KeepPair(int m, int k, int r) const {
    const bool upper = (first_word_ + m) & 1;
    const uint32_t even = upper ? calls_[0].word[2 * k + 1] : calls_[0].word[2 * k];
    const uint32_t odd = upper ? calls_[1].word[2 * k + 1] : calls_[1].word[2 * k];
    return ptx::Permute(KeepSigns(even, threshold_bytes_), KeepSigns(odd, threshold_bytes_),
                        (r ? 0xeeaau : 0xcc88u) + byte_);
  }
  ATTN_HD static float Kept(uint32_t mark, float kept, float dropped) {
    return mark ? dropped : kept;
  }
  ATTN_HD static float Factor(const ProblemDesc& problem) { return problem.dropout_scale; }
  ATTN_HD static uint32_t Unmarked(uint32_t pair) { return pair & 0x7fff7fffu; }

 private:
  uint32_t threshold_bytes_, first_word_, byte_;
  PhiloxBlock calls_[2];
};

}  // namespace attnd::sm70
