// row_math.h is shared by the small kernels around backward (backward_passes.h, query_gradient.h):
// a block's tiles, sums and maxima over rows that four lanes read, and bounds of KV heads. Errors:
// none.
#pragma once

#include "attention/score_rule.h"
#include "kernels/rules/gradient_scale.h"

namespace attnd {

// Sums and maxima over rows that four lanes share, or over numbers that are finite.
template <class Element>
struct RowMath {
  ATTN_HD static float Max(uint4 x) {
    return ptx::Max(ptx::Max(Larger(x.x), Larger(x.y)), ptx::Max(Larger(x.z), Larger(x.w)));
  }
  ATTN_HD static float FiniteMax(uint4 chunk) { return Max(FiniteHalves<Element>(chunk)); }
  ATTN_HD static float Norm(uint4 chunk) { return Dot(chunk, chunk); }
  ATTN_HD static float FiniteNorm(uint4 chunk) { return Norm(FiniteHalves<Element>(chunk)); }
  ATTN_HD static float SumOfQuad(float x) {
    x += ptx::ShuffleXor(x, 1);
    return x + ptx::ShuffleXor(x, 2);
  }
  ATTN_HD static float Dot(uint4 a, uint4 b) {
    return Dot(a.x, b.x) + Dot(a.y, b.y) + (Dot(a.z, b.z) + Dot(a.w, b.w));
  }

 private:
  ATTN_HD static float Larger(uint32_t word) {
    word &= Element::kMagnitude;
    return ptx::Max(Element::Low(word), Element::High(word));
  }
  ATTN_HD static float Dot(uint32_t a, uint32_t b) {
    return ptx::Fma(Element::Low(a), Element::Low(b), Element::High(a) * Element::High(b));
  }
};

// use(tile) of a block's tiles: as many as the other blocks', or one more. The next one is looked
// up meanwhile.
template <class Use>
ATTN_HD void ForTilesOf(const LaunchParams& params, ThreadIndex at, const Use& use) {
  const int each = params.tile_count / at.blocks, more = params.tile_count % at.blocks;
  const int begin = at.block * each + MinInt(at.block, more);
  const int end = begin + each + (at.block < more ? 1 : 0);
  TileWork next = params.tiles[begin];
#pragma unroll 1
  for (int n = begin; n < end; ++n) {
    const TileWork tile = next;
    next = params.tiles[MinInt(n + 1, end - 1)];
    use(tile);
  }
}

// Bounds of the KV head at whose tiles a block is: kCount of them from the one at kFirst on, of
// what the thread has seen so far. A head costs a block one atomic operation a bound.
template <int kFirst, int kCount>
class BlockBounds {
 public:
  struct Shared {
    uint32_t of_warps[kCount][8];
  };
  ATTN_HD BlockBounds(int thread, Shared& shared) : shared_(shared), thread_(thread) {}

  // Sets the head for the bounds that follow. All threads call it.
  ATTN_HD void Open(uint32_t* of_head) {
    if (of_head == of_head_) return;
    if (of_head_ != nullptr) Close();
    of_head_ = of_head;
#pragma unroll
    for (int n = 0; n < kCount; ++n) largest_[n] = 0;
  }
  // `value` is at least 0 and not NaN.
  ATTN_HD void Widen(GradientBound bound, float value) {
    float& largest = largest_[bound - kFirst];
    largest = ptx::Max(largest, value);
  }
  // All threads call it.
  ATTN_HD void Close() {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      float value = largest_[n];
#pragma unroll
      for (int mask = 1; mask < 32; mask <<= 1) {
        value = ptx::Max(value, ptx::ShuffleXor(value, mask));
      }
      if ((thread_ & 31) == 0) {
        ptx::StoreShared32(&shared_.of_warps[n][thread_ >> 5], ptx::FloatBits(value));
      }
    }
    ptx::SyncThreads();
    if (thread_ < kCount) {
      uint32_t largest = 0;
#pragma unroll
      for (int warp = 0; warp < 8; ++warp) {
        const uint32_t bits = ptx::LoadShared32(&shared_.of_warps[thread_][warp]);
        if (bits > largest) largest = bits;
      }
      if (largest != 0) ptx::ReduceMax(of_head_ + kFirst + thread_, largest);
    }
    ptx::SyncThreads();
  }

 private:
  Shared& shared_;
  const int thread_;
  uint32_t* of_head_ = nullptr;
  float largest_[kCount];
};

// A lane's quarter of two rows, so many chunks each, several loads at a time:
// use(chunk of a, of b), zeros beyond the end.
template <class Use>
ATTN_HD void ForQuarters(const char* a, int a_chunks, const char* b, int b_chunks, int thread,
                         const Use& use) {
  constexpr int kAhead = 4;
#pragma unroll 1
  for (int first = thread & 3; first < a_chunks || first < b_chunks; first += 4 * kAhead) {
    uint4 of_a[kAhead], of_b[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int c = first + 4 * n;
      of_a[n] = of_b[n] = make_uint4(0, 0, 0, 0);
      ptx::LoadConstant128If(of_a[n], a + c * 16, c < a_chunks);
      ptx::LoadConstant128If(of_b[n], b + c * 16, c < b_chunks);
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) use(of_a[n], of_b[n]);
  }
}

}  // namespace attnd
