// Dropout's decisions in backward (backward.h): each of the four warps that bring makes those of 32
// keys, a round of 64 queries at a time, for the consumers' lanes. Errors: none.
//
// A generator call serves two queries (bit 3) and eight keys (bits 0, 3, 4), which four lanes of
// two consumer warps hold. Half a warp makes the calls of 32 queries: a lane four, which fill half
// a word of each of four consumers.
//   Decide(round, row, head)   the warp's share; rounds in turn
//   IsKept(word, t, e)         element e of group t of eight queries, of a consumer's word
#pragma once

#include "kernels/sm90/backward_layout.h"

namespace attnd::sm90 {

template <class Layout>
class DropoutDecider {
 public:
  using Shared = typename Layout::Shared;
  using Work = typename Layout::Work;

  ATTN_HD DropoutDecider(const Work& work, int warp, int lane, Shared& shared)
      : work_(work), shared_(shared), warp_(warp), lane_(lane) {}

  ATTN_HD void Decide(int round, int row, int head) const {
    const int slot = round % Layout::kKeepStages;
    const uint32_t threshold_bytes = work_.problem.dropout_threshold * 0x01010101u;
    const uint32_t column = static_cast<uint32_t>((work_.first_key >> 5) + warp_);
    const uint32_t block = static_cast<uint32_t>((row >> 4) + 2 * half());
    const uint32_t place = static_cast<uint32_t>(8 * query_pair() + key_pair());
    constexpr bool kRolled = Layout::kHeadDim > 64;  // then registers are few
    const DropoutColumn<kRolled> generator(DropoutStreamOf(work_.At(head)), column);
    // By bit 4 of the key: of bits 3 and 0 of the key a byte each.
    uint32_t kept[2] = {};
#pragma unroll 1
    for (uint32_t n = 0; n < 4; ++n) {  // block n / 2, the even or odd query of a pair
      const PhiloxBlock bytes = generator.Bytes(block + (n >> 1), place + (n & 1) * 4);
#pragma unroll
      for (uint32_t w = 0; w < 4; ++w) {
        const uint32_t signs = KeepSigns(bytes.word[w], threshold_bytes) & 0x80808080u;
        kept[w & 1] |= signs >> (2 * n + (w >> 1));
      }
    }
    ptx::WaitForPhase(&shared_.empty_kept[slot], Layout::Parity(round, Layout::kKeepStages) ^ 1);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int consumer = 2 * warp_ + (n >> 1), row_of_key = 2 * key_pair() + (n & 1);
      char* word = reinterpret_cast<char*>(
          &shared_.kept[slot][consumer * kWarpLanes + row_of_key * 4 + query_pair()]);
      ptx::StoreShared16(word + 2 * half(),
                         ptx::Permute(kept[n >> 1], 0, n & 1 ? 0x4431u : 0x4420u));
    }
    ptx::SyncWarp();
    if (lane_ == 0) ptx::Arrive(&shared_.full_kept[slot]);
  }

  ATTN_HD static bool IsKept(uint32_t word, int t, int e) {
    const int bit = 7 - (4 * (t >> 1 & 1) + 2 * (e & 1) + (t & 1));
    return word >> (16 * (t >> 2) + 8 * (e >> 1) + bit) & 1;
  }

 private:
  ATTN_HD int query_pair() const { return lane_ & 3; }
  ATTN_HD int key_pair() const { return lane_ >> 2 & 3; }
  ATTN_HD int half() const { return lane_ >> 4; }

  const Work& work_;
  Shared& shared_;
  const int warp_, lane_;
};

// Where all scores are kept.
template <class Layout>
struct NoDecider {
  ATTN_HD NoDecider(const typename Layout::Work&, int, int, typename Layout::Shared&) {}
  ATTN_HD static void Decide(int, int, int) {}
  ATTN_HD static bool IsKept(uint32_t, int, int) { return true; }
};
template <class Layout, bool kDrops = Layout::Dropout::kDrops>
struct DeciderFor {
  using Type = NoDecider<Layout>;
};
template <class Layout>
struct DeciderFor<Layout, true> {
  using Type = DropoutDecider<Layout>;
};
template <class Layout>
using DeciderOf = typename DeciderFor<Layout>::Type;

}  // namespace attnd::sm90
