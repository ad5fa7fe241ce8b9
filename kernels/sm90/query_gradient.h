// dQ's sums into place (rules/query_gradient_quads.h) while backward's last tiles are at work: the
// launch overlaps that of the backward kernel, whose blocks leave their SMs one after another.
// Errors: none.
#pragma once

#include "kernels/sm80/backward_passes.h"
#include "kernels/sm90/backward_layout.h"

namespace attnd::sm90 {

// Heads one after another, as backward visits them. From the first one that is not all written on
// it waits for backward's end.
class AsWritten {
 public:
  static constexpr bool kLastFirst = false, kStartsAhead = true;
  ATTN_HD void Await(const ProblemDesc& p, const SequenceDesc& s, const TileWork& tile) {
    if (has_ended_) return;
    const uint32_t* bounds = GradientBounds(p, tile.batch, tile.head / p.group);
    // Tiles that no row sees, and heads without keys, wait for no zeros.
    if (!HasCounted(bounds + kZeroedBlocks, p.group * static_cast<int>(DqBlocks(s.q_len))) ||
        !HasCounted(bounds + kWrittenTiles,
                    (s.kv_len + kBackwardKeys - 1) / kBackwardKeys * kListRuns)) {
      End();
    }
    ptx::FenceBulk();
  }
  ATTN_HD void End() {
    ptx::WaitForLaunchBefore();
    has_ended_ = true;
  }

 private:
  ATTN_HD static bool HasCounted(const uint32_t* counter, int wanted) {
    return ptx::LoadAcquire(reinterpret_cast<const int32_t*>(counter)) >= wanted;
  }
  bool has_ended_ = false;
};

template <class Math, int kHeadDim, class DqSums>
using DqKernel = QuadDqKernel<sm80::DqLayout<kHeadDim>, Math, RoundedP, DqSums, AsWritten>;

}  // namespace attnd::sm90
