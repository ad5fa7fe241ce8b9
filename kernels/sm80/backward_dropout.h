// Dropout's replay in backward, where a lane holds scores of Sᵀ: 32 keys along rows, queries along
// columns. A generator call serves two queries (bit 3) and eight keys (bits 0, 3, 4), of which a
// lane holds one parity: four calls for 32 queries, half of them made by the lane of the other
// parity (lane ^ 4). Errors: none. [warp]
//   Mask(m, r, t)   of the two queries of group t (eight queries) and the key r of key tile m
#pragma once

#include "kernels/sm80/dropout.h"

namespace attnd::sm80 {

template <int kQueryGroups>
class KeepAll {
 public:
  static constexpr bool kDrops = false;
  ATTN_HD KeepAll(const ScoreContext&, int, int, int) {}
  ATTN_HD static uint32_t Mask(int, int, int) { return 0xffffffffu; }
};

// kQueryGroups: 2 or 4, each pair of them 16 queries.
template <int kQueryGroups>
class ReplayDropout {
 public:
  static constexpr bool kDrops = true;
  // `first_row`, a multiple of 16, and `first_key`, of 32.
  ATTN_HD ReplayDropout(const ScoreContext& at, int first_row, int first_key, int lane) {
    const uint32_t threshold_bytes = at.problem.dropout_threshold * 0x01010101u;
    const DropoutStream stream = DropoutStreamOf(at);
    const int key = lane >> 2, query = (lane & 3) * 2;
    const uint32_t odd = static_cast<uint32_t>(key & 1);
    // Selects the bytes of a word's even keys, then those of odd ones; the own parity's come first.
    const uint32_t own = odd ? 0x0031u : 0x0020u, other = odd ? 0x0020u : 0x0031u;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      // One query each of the two parities: this lane makes the call of its key's parity.
      const uint32_t place = static_cast<uint32_t>(query + static_cast<int>(odd)) * 4 +
                             static_cast<uint32_t>(key >> 1);
      const PhiloxBlock bytes = DropoutBytes(stream, static_cast<uint32_t>((first_row >> 4) + n),
                                             static_cast<uint32_t>(first_key >> 5), place);
      uint32_t mine[2], theirs[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t low = KeepSigns(bytes.word[2 * r], threshold_bytes);
        const uint32_t high = KeepSigns(bytes.word[2 * r + 1], threshold_bytes);
        mine[r] = ptx::Permute(low, high, own | (own + 0x44u) << 8);
        theirs[r] = ptx::ShuffleXor(ptx::Permute(low, high, other | (other + 0x44u) << 8), 4);
        even_[n][r] = odd ? theirs[r] : mine[r];
        odd_[n][r] = odd ? mine[r] : theirs[r];
      }
    }
  }
  // Byte [key bits 4, 3] of the word of a query's block and bit 3.
  ATTN_HD uint32_t Mask(int m, int r, int t) const {
    const uint32_t byte = static_cast<uint32_t>(2 * m + r);
    return ptx::Permute(even_[t >> 1][t & 1], odd_[t >> 1][t & 1], 0xcc88u + byte * 0x1111u);
  }

 private:
  static constexpr int kBlocks = kQueryGroups / 2;
  uint32_t even_[kBlocks][2], odd_[kBlocks][2];  // signs, of the even query and the odd one
};

}  // namespace attnd::sm80
