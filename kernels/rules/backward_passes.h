// backward_passes.h: the kernels before and after backward's one large kernel. They make bounds,
// and for each row delta, stabiliser and factor of dQ; query_gradient.h puts dQ's sums into place.
// They are small and bound by memory; a block has a share of the tiles, 64 rows each. Errors: none.
#pragma once

#include "kernels/rules/descriptors.h"
#include "kernels/rules/gradient_scale.h"
#include "kernels/rules/half_element.h"
#include "kernels/rules/non_finite_rows.h"
#include "kernels/rules/online_softmax.h"
#include "kernels/rules/row_math.h"
#include "kernels/rules/seen_keys.h"

namespace attnd {

// float16 reaches down to 6e-8 only, so P is kept as P·2^10 (at most 1025) and
// dS as kernels/rules/gradient_scale.h says; the last factors take it back. Powers of
// two, so no bits are lost.
inline constexpr int kProbabilityShift = 10;

// FixedPointSums adds dQ up over tiles of keys as integers.
struct FixedPointSums {
  static constexpr bool kFixedPoint = true;
};
struct FloatSums {
  static constexpr bool kFixedPoint = false;
};

// dQ as integers, whose sum does not depend on the order. A block's share of a row of dQ is
// multiplied by a power of two of the row's, such that sums are in units of one. Since a row of P
// sums to 1, and over the keys that the row sees,
//   |Σ_j dS·K| ≤ (Z·‖dO‖·max‖V‖ + |delta|)·max|K| < 2^(bits − row)
// and with 30 bits a rounding costs 2^-31 of the row's bound, little beside the errors of dP and
// delta. Not so where dropout, softcap, zero_rest or a sink may leave a row a tiny part of its
// bound: there a second integer sums what the first one's rounding left, in units 2^-RestBits.
// With 28 bits rows of P may sum to eight (an lse that is off by 2, as float16 accumulation's may
// be). No sum overflows: over n tiles, 2^30·(1 + 2^-9) + n/2 < 2^31 for n < 2^29. A rounding leaves
// at most 1/2, or 2^-22 of a sum beyond 2^22 (sm90's, whose sizes add up to 2^30): at most
// n/2 + 2^8 in all, and that is less than 2^(31 − RestBits).
// What is not finite is marked (dq_non_finite).
//
// Why the unit is a row's: a head's, over all of its keys, let numbers that a row does not see (of
// padding, of later rows) turn its dQ into noise. The seen ones cost nothing to find (seen_keys.h).
struct FixedPoint {
  // 2^row, of what the row sees; DeltaKernel stores it.
  ATTN_HD static float OfRow(const ProblemDesc& p, float bound, uint32_t seen) {
    const int row = p.dq_bits - 2 - FloatExponent(bound) - KeySize::KeyExponent(seen);
    return PowerOfTwo(row < -126 ? -126 : row > 126 ? 126 : row);
  }
  // A row's sums of dS·2^gain are multiplied by this factor.
  ATTN_HD static float RowFactor(float of_row, float ungain) {
    return -ptx::Max(-of_row * ungain, -0x1p126f);
  }
  ATTN_HD static int RestBits(int keys) {
    const int tiles = keys / kFewestKeys + 1;  // at most
    return 31 - FloatExponent(static_cast<float>(tiles + 512));
  }
  static constexpr int kFewestKeys = 32;  // of backward's tiles
  // Tells whether a row of dQ may be so small a part of its bound that it needs a second integer,
  // where rows choose. o is the sum of p·z·v, so max‖V‖·Σpz is at least ‖o‖: unless o is small, dS
  // and the errors that it has anyway are no small part of their bound. Softcap's slope may be.
  ATTN_HD static bool NeedsRest(const ProblemDesc& p, float norm_of_v, float squared_o) {
    const float small = norm_of_v * kSmallOutput;
    return p.softcap != 0 || !(squared_o >= small * small);
  }
  static constexpr float kSmallOutput = 0x1p-10f;
};

// Bits of one row of dQ whose sums are not finite: one for each column.
template <int kHeadDim>
ATTN_HD uint32_t* DqNonFinite(const ProblemDesc& p, int batch, int head, int row) {
  return p.dq_non_finite + (int64_t{batch} * p.q_heads + head) * p.non_finite_head +
         int64_t{row} * (kHeadDim / 32);
}

// KeyBoundsKernel finds how large K and V of each key are (KeySize). The tiles of a KV head's query
// heads share its keys: 64 at a time, four lanes a key.
template <class Element>
struct KeyBoundsKernel {
  using RowMath = attnd::RowMath<Element>;
  static constexpr int kThreads = 256;
  struct Shared {
    Descriptors descriptors;
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    KeptDescriptors descriptors(shared.descriptors);
    ForTilesOf(params, at, [&](const TileWork& tile) {
      const Descriptors& of = descriptors.Of(params, tile, at.thread, kThreads);
      Measure(of.problem, of.sequence, tile, at.thread);
    });
  }

 private:
  ATTN_HD static void Measure(const ProblemDesc& p, const SequenceDesc& s, const TileWork& tile,
                              int thread) {
    const int kv_head = tile.head / p.group, blocks = static_cast<int>(DqBlocks(s.q_len));
    const int share = (tile.head - kv_head * p.group) * blocks + tile.tile;
    const KeySizes sizes(p, tile.batch, kv_head);
    for (int first = share * kDqBlockRows; first < s.kv_len;
         first += p.group * blocks * kDqBlockRows) {
      const int key = first + (thread >> 2);
      const uint32_t size = SizeOf(p, s, kv_head, key, thread);
      uint32_t of_group = size;
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) {
        of_group = KeySize::Max(of_group, ptx::ShuffleXor(of_group, mask));
      }
      if (key >= s.kv_len) continue;
      if ((thread & 3) == 0) ptx::StoreGlobal32(sizes.keys + key, size);
      if ((thread & 31) == 0) ptx::StoreGlobal32(sizes.groups + key / kKeyGroup, of_group);
    }
  }
  // Whole warps call it, four lanes a key; the size is 0 beyond the last key.
  ATTN_HD static uint32_t SizeOf(const ProblemDesc& p, const SequenceDesc& s, int kv_head, int key,
                                 int thread) {
    const bool exists = key < s.kv_len;
    const int64_t at_key = int64_t{s.kv_begin} + (exists ? key : 0);
    const char* const v = RowOf(p.v, s.batch, kv_head, at_key);
    const char* const k = RowOf(p.k, s.batch, kv_head, at_key);
    // Sums of floats have no use for max|K|.
    const int v_chunks = exists ? p.v_chunks : 0;
    const int k_chunks = exists && p.dq_bits != 0 ? p.qk_chunks : 0;
    float norm = 0, of_v = 1, of_k = 0;
    ForQuarters(v, v_chunks, k, k_chunks, thread, [&](uint4 chunk_v, uint4 chunk_k) {
      norm += RowMath::Norm(chunk_v);
      of_k = ptx::Max(of_k, RowMath::Max(chunk_k));
    });
    float sum = RowMath::SumOfQuad(norm);
    of_k = MaxOfQuad(of_k);
    if (ptx::VoteAny(exists && (!KeySize::IsSafe(sum) || !(of_k < Infinity())))) {
      // Once more, of what is finite, and of V also the largest.
      norm = of_v = of_k = 0;
      ForQuarters(v, v_chunks, k, k_chunks, thread, [&](uint4 chunk_v, uint4 chunk_k) {
        norm += RowMath::FiniteNorm(chunk_v);
        of_v = ptx::Max(of_v, RowMath::FiniteMax(chunk_v));
        of_k = ptx::Max(of_k, RowMath::FiniteMax(chunk_k));
      });
      sum = RowMath::SumOfQuad(norm);
      of_v = MaxOfQuad(of_v);
      of_k = MaxOfQuad(of_k);
    }
    return exists ? KeySize::Of(sum, of_v, of_k) : 0;
  }
  ATTN_HD static float MaxOfQuad(float x) {
    x = ptx::Max(x, ptx::ShuffleXor(x, 1));
    return ptx::Max(x, ptx::ShuffleXor(x, 2));
  }
};

// DeltaKernel computes for each row delta = rowsum(dO∘O) − dlse, the stabiliser of P and the factor
// of dQ; 64 rows of a query head, four lanes a row. It also finds the gain of these rows, the
// highest and the lowest gain of the KV head, and whether the head has rows that are not finite
// (non_finite_rows.h). Where rows choose whether they have second integers, it clears those of a
// block in which a row does.
template <class Element, class Rounding>
struct DeltaKernel {
  using RowMath = attnd::RowMath<Element>;
  static constexpr int kThreads = 256;
  using Bounds = BlockBounds<kNonFiniteRows, 3>;
  struct Shared {
    typename Bounds::Shared bounds;
    SeenKeys::Shared seen;
    float largest[8];       // bound of each warp's rows
    uint32_t has_rests[8];  // of each warp's rows
    Descriptors descriptors;
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    Bounds bounds(at.thread, shared.bounds);
    KeptDescriptors descriptors(shared.descriptors);
    ForTilesOf(params, at, [&](const TileWork& tile) {
      const Descriptors& of = descriptors.Of(params, tile, at.thread, kThreads);
      RunTile(of.problem, of.sequence, tile, at.thread, bounds, shared);
    });
    bounds.Close();
  }

 private:
  ATTN_HD static void RunTile(const ProblemDesc& p, const SequenceDesc& s, const TileWork& tile,
                              int thread, Bounds& bounds, Shared& shared) {
    bounds.Open(GradientBounds(p, tile.batch, tile.head / p.group));
    const int row = tile.tile * kDqBlockRows + (thread >> 2);
    const bool exists = row < s.q_len;
    const int64_t at_row = int64_t{s.q_begin} + (exists ? row : 0);
    const int64_t index = s.batch * p.lse_batch + tile.head * p.lse_head + at_row;
    const int chunks = exists ? p.v_chunks : 0;
    // These loads are under way before the rows, which are waited for.
    float lse = -Infinity(), d_lse = 0;
    ptx::LoadConstantFloatIf(lse, p.lse + index, exists);
    ptx::LoadConstantFloatIf(d_lse, p.d_lse + index, p.d_lse != nullptr);
    const uint32_t seen = SeenKeys(p, s, tile, thread).OfRow(shared.seen);
    float sum = 0, norm = 0, norm_of_o = 0;
    const char* o = RowOf(p.o, s.batch, tile.head, at_row);
    const char* d_o = RowOf(p.d_o, s.batch, tile.head, at_row);
    ForQuarters(o, chunks, d_o, chunks, thread, [&](uint4 of_o, uint4 of_d_o) {
      sum += RowMath::Dot(of_o, of_d_o);
      norm += RowMath::Norm(of_d_o);
      norm_of_o += RowMath::Norm(of_o);
    });
    if (!(norm < Infinity())) {  // once more, of what is finite
      norm = 0;
      ForQuarters(o, 0, d_o, chunks, thread,
                  [&](uint4, uint4 of_d_o) { norm += RowMath::FiniteNorm(of_d_o); });
    }
    sum = RowMath::SumOfQuad(sum);
    if (p.d_lse != nullptr) sum -= d_lse;
    norm = RowMath::SumOfQuad(norm);
    norm_of_o = RowMath::SumOfQuad(norm_of_o);
    const bool sees = lse != -Infinity();  // else dS is 0, whatever dO is
    const float norm_of_v = KeySize::NormOf(seen);
    const float size = sum < 0 ? -sum : sum;
    const float bound = BoundOf(p, norm, norm_of_v, size);
    const bool has_rest =
        p.dq_rests_by_row && sees && FixedPoint::NeedsRest(p, norm_of_v, norm_of_o);
    if (exists && (thread & 3) == 0) {
      ptx::StoreGlobalFloat(p.delta + index, sum);
      const float factor = FixedPoint::OfRow(p, bound, seen);
      ptx::StoreGlobalFloat(p.dq_factor + index, has_rest ? -factor : factor);
      ptx::StoreGlobalFloat(p.stabilizer + index, StabilizerOf(lse));
    }
    bool non_finite = exists && (lse != lse || !(size < Infinity()));
    if (exists && MayHideInfinities(p, lse)) {
      non_finite |= !IsFinite(RowOf(p.q, s.batch, tile.head, at_row), p.qk_chunks, thread);
    }
    bounds.Widen(kNonFiniteRows, non_finite ? 1.0f : 0.0f);
    SetGain(p, tile, thread, sees ? bound : 0, bounds, shared);
    if (p.dq_rests_by_row) ClearRests(p, tile, thread, has_rest, shared);
  }
  // Returns a bound of |dS|. The least norm is for squares below float32's range.
  ATTN_HD static float BoundOf(const ProblemDesc& p, float squared_norm, float norm_of_v,
                               float size_of_delta) {
    const float delta = size_of_delta < Infinity() ? size_of_delta : 0;
    if (squared_norm == 0 || norm_of_v == 0) return delta;
    const float norm = SquareRoot(ptx::Max(squared_norm, 0x1p-118f));
    return ptx::Fma(norm, norm_of_v * p.dropout_scale, delta);
  }
  // Sets the gain of the tile's rows from the `bound` of each thread's. All threads call it.
  ATTN_HD static void SetGain(const ProblemDesc& p, const TileWork& tile, int thread, float bound,
                              Bounds& bounds, Shared& shared) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) bound = ptx::Max(bound, ptx::ShuffleXor(bound, mask));
    ptx::SyncThreads();  // the tile before is done
    if ((thread & 31) == 0) ptx::StoreSharedFloat(&shared.largest[thread >> 5], bound);
    ptx::SyncThreads();
    bound = ptx::LoadSharedFloat(&shared.largest[thread & 7]);
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) bound = ptx::Max(bound, ptx::ShuffleXor(bound, mask));
    const int gain = GainOf(bound * Rounding::kMargin);
    if (gain != kNoGain) {
      bounds.Widen(kHighestGain, kGainZero + static_cast<float>(gain));
      bounds.Widen(kLowestGain, kGainZero - static_cast<float>(gain));
    }
    if (thread == 0) {
      ptx::StoreGlobal32(GainsOfHead(p, tile.batch, tile.head) + tile.tile,
                         static_cast<uint32_t>(gain));
    }
  }
  // All threads call it.
  ATTN_HD static void ClearRests(const ProblemDesc& p, const TileWork& tile, int thread,
                                 bool has_rest, Shared& shared) {
    const bool warp_has_rests = ptx::VoteAny(has_rest);
    ptx::SyncThreads();  // the tile before is done
    if ((thread & 31) == 0) ptx::StoreShared32(&shared.has_rests[thread >> 5], warp_has_rests);
    ptx::SyncThreads();
    uint32_t any = 0;
#pragma unroll
    for (int warp = 0; warp < 8; ++warp) any |= ptx::LoadShared32(&shared.has_rests[warp]);
    if (any == 0) return;
    float* rests = p.dq_sums + p.dq_rest +
                   (int64_t{tile.batch} * p.q_heads + tile.head) * p.dq_head +
                   tile.tile * p.dq_block;
#pragma unroll 1
    for (int n = thread * 4; n < p.dq_block; n += kThreads * 4) {
      ptx::StoreGlobal128(rests + n, make_uint4(0, 0, 0, 0));
    }
  }
  // Tells whether a row's Q may be infinite or NaN although its lse is not NaN.
  ATTN_HD static bool MayHideInfinities(const ProblemDesc& p, float lse) {
    return lse == -Infinity() || p.softcap != 0 || p.denominator != kDenominatorSoftmax;
  }
  // Tells whether the thread's quarter of a row is finite.
  ATTN_HD static bool IsFinite(const char* row, int chunks, int thread) {
    uint32_t bad = 0;
    for (int c = thread & 3; c < chunks; c += 4) {
      const uint4 words = NonFiniteHalves<Element>(ptx::LoadConstant128(row + c * 16));
      bad |= words.x | words.y | words.z | words.w;
    }
    return bad == 0;
  }
  ATTN_HD static float StabilizerOf(float lse) {
    if (lse == -Infinity()) return Infinity();
    return ptx::Fma(lse, kLog2E, -(Rounding::kBias + kProbabilityShift));
  }
};

}  // namespace attnd
