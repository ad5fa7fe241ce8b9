// What backward needs before and after its one large kernel: bounds, and what belongs to a row
// (delta, stabiliser, factor of dQ); query_gradient.h puts dQ's sums into place. Small kernels,
// bound by memory; a block has a share of the tiles, 64 rows each. Errors: none.
#pragma once

#include "kernels/rules/descriptors.h"
#include "kernels/rules/gradient_scale.h"
#include "kernels/rules/half_element.h"
#include "kernels/rules/non_finite_rows.h"
#include "kernels/rules/online_softmax.h"
#include "kernels/rules/row_math.h"

namespace attnd {

// float16 reaches down to 6e-8 only, so P is kept as P·2^10 (at most 1025) and
// dS as kernels/rules/gradient_scale.h says; the last factors take it back. Powers of
// two, so no bits are lost.
inline constexpr int kProbabilityShift = 10;

// How dQ is summed over tiles of keys.
struct FixedPointSums {
  static constexpr bool kFixedPoint = true;
};
struct FloatSums {
  static constexpr bool kFixedPoint = false;
};

// dQ as integers, whose sum does not depend on the order. For dQ's product alone, a row of dS in
// float16 is multiplied by a power of two of its own and K by one of the KV head's, such that
// products are in units of one. Since a row of P sums to 1,
//   |Σ_j dS·2^row| ≤ (Z·‖dO‖·max‖V‖ + |delta|)·2^row < 2^16
//   |K|·2^key < 2^(bits − 16)
// and with 30 bits a rounding costs 2^-31 of the row's bound, little beside the errors of dP and
// delta. Not so where dropout, softcap, zero_rest or a sink may leave a row a tiny part of its
// bound: there a second integer sums what the first one's rounding left, in units 2^-RestBits.
// With 28 bits rows of P may sum to eight (an lse that is off by 2, as float16 accumulation's may
// be). No sum overflows: over n tiles, 2^30·(1 + 2^-9) + n/2 < 2^31 for n < 2^29. A rounding leaves
// at most 1/2, or 2^-22 of a sum beyond 2^22 (sm90's, whose sizes add up to 2^30): at most
// n/2 + 2^8 in all, and that is less than 2^(31 − RestBits).
// What is not finite is marked (dq_non_finite).
struct FixedPoint {
  // 2^row times what GradientExponent's power of two will be; DeltaKernel stores it.
  ATTN_HD static float OfRow(const ProblemDesc& p, const uint32_t* bounds, float norm,
                             float delta) {
    const float value = SquareRoot(ptx::BitsFloat(ptx::LoadConstant32(bounds + kValueBound)));
    const float bound = ptx::Fma(norm, value * p.dropout_scale, delta < 0 ? -delta : delta);
    return PowerOfTwo(MinInt(15 - Exponent(bound), 80));
  }
  // 2^row, at least a half; float16 ends at 2^15.
  ATTN_HD static float RowFactor(float of_row, float ungain) {
    return -ptx::Max(-of_row * ungain, -32768.0f);
  }
  ATTN_HD static int KeyExponent(const ProblemDesc& p, const uint32_t* bounds) {
    const float key = ptx::BitsFloat(ptx::LoadConstant32(bounds + kKeyBound));
    return MinInt(p.dq_bits - 17 - Exponent(key), 60);
  }
  ATTN_HD static int RestBits(int keys) {
    const int tiles = keys / kFewestKeys + 1;  // at most
    return 31 - Exponent(static_cast<float>(tiles + 512));
  }
  static constexpr int kFewestKeys = 32;  // of backward's tiles
  // Whether a row of dQ may be so small a part of its bound that it needs a second integer, where
  // rows choose. o is the sum of p·z·v, so max‖V‖·Σpz is at least ‖o‖: unless o is small, dS and
  // the errors that it has anyway are no small part of their bound. Softcap's slope may be.
  ATTN_HD static bool NeedsRest(const ProblemDesc& p, const uint32_t* bounds, float squared_o) {
    const float squared_v = ptx::BitsFloat(ptx::LoadConstant32(bounds + kValueBound));
    return p.softcap != 0 || !(squared_o >= squared_v * kSmallOutput * kSmallOutput);
  }
  static constexpr float kSmallOutput = 0x1p-10f;
  ATTN_HD static int Exponent(float x) {
    return static_cast<int>(ptx::FloatBits(x) >> 23 & 255u) - 127;
  }
};

// Bits of one row of dQ whose sums are not finite: one for each column.
template <int kHeadDim>
ATTN_HD uint32_t* DqNonFinite(const ProblemDesc& p, int batch, int head, int row) {
  return p.dq_non_finite + (int64_t{batch} * p.q_heads + head) * p.non_finite_head +
         int64_t{row} * (kHeadDim / 32);
}

// max‖V‖ and max|K| of the keys that some row sees. The tiles of a KV head's query heads share its
// keys: 64 at a time, four lanes a key.
template <class Element>
struct KeyBoundsKernel {
  using RowMath = attnd::RowMath<Element>;
  static constexpr int kThreads = 256;
  using Bounds = BlockBounds<kValueBound, 2>;
  struct Shared {
    typename Bounds::Shared bounds;
    Descriptors descriptors;
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    Bounds bounds(at.thread, shared.bounds);
    KeptDescriptors descriptors(shared.descriptors);
    ForTilesOf(params, at, [&](const TileWork& tile) {
      const Descriptors& of = descriptors.Of(params, tile, at.thread, kThreads);
      Widen(of.problem, of.sequence, tile, at.thread, bounds);
    });
    bounds.Close();
  }

 private:
  ATTN_HD static void Widen(const ProblemDesc& p, const SequenceDesc& s, const TileWork& tile,
                            int thread, Bounds& bounds) {
    const int kv_head = tile.head / p.group, blocks = static_cast<int>(DqBlocks(s.q_len));
    // Sums of floats have no use for max|K|.
    const int k_chunks = p.dq_bits == 0 ? 0 : p.qk_chunks;
    const int share = (tile.head - kv_head * p.group) * blocks + tile.tile;
    bounds.Open(GradientBounds(p, tile.batch, kv_head));
    for (int first = share * kDqBlockRows; first < s.kv_len;
         first += p.group * blocks * kDqBlockRows) {
      const int key = first + (thread >> 2);
      float norm = 0, largest = 0;
      if (key < s.kv_len && IsSeen(p, s, tile.batch, kv_head, key)) {
        const int64_t at_key = int64_t{s.kv_begin} + key;
        ForQuarters(RowOf(p.v, s.batch, kv_head, at_key), p.v_chunks,
                    RowOf(p.k, s.batch, kv_head, at_key), k_chunks, thread,
                    [&](uint4 of_v, uint4 of_k) {
                      norm += RowMath::Norm(of_v);
                      largest = ptx::Max(largest, RowMath::Max(of_k));
                    });
        if (!(norm < Infinity()) || !(largest < Infinity())) {  // once more, of what is finite
          norm = largest = 0;
          ForQuarters(RowOf(p.v, s.batch, kv_head, at_key), p.v_chunks,
                      RowOf(p.k, s.batch, kv_head, at_key), k_chunks, thread,
                      [&](uint4 of_v, uint4 of_k) {
                        norm += RowMath::FiniteNorm(of_v);
                        largest = ptx::Max(largest, RowMath::FiniteMax(of_k));
                      });
        }
      }
      bounds.Widen(kValueBound, RowMath::SumOfQuad(norm));
      bounds.Widen(kKeyBound, largest);
    }
  }
  // By some row of a query head that shares the key. A bias of −infinity hides nothing here.
  ATTN_HD static bool IsSeen(const ProblemDesc& p, const SequenceDesc& s, int batch, int kv_head,
                             int key) {
    const Range rows = RowsThatSee(VisibilityOf(s), key, key + 1);
    if (p.tile_lists.lines == nullptr) return rows.begin < rows.end;
    for (int head = kv_head * p.group; head < (kv_head + 1) * p.group; ++head) {
      if (IsShown(p.tile_lists, batch, head, key, rows.begin, rows.end)) return true;
    }
    return false;
  }
};

// What belongs to a row: delta = rowsum(dO∘O) − dlse, the stabiliser of P and the factor of dQ; 64
// rows of a query head, four lanes a row. Also max‖dO‖ and max|delta| of the KV head, and whether
// it has rows that are not finite (non_finite_rows.h). Where rows choose whether they have second
// integers, zeros for those of a block in which one does.
template <class Element, class Rounding>
struct DeltaKernel {
  using RowMath = attnd::RowMath<Element>;
  static constexpr int kThreads = 256;
  using Bounds = BlockBounds<kOutputGradientBound, 3>;
  struct Shared {
    typename Bounds::Shared bounds;
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
    uint32_t* of_head = GradientBounds(p, tile.batch, tile.head / p.group);
    bounds.Open(of_head);
    const int row = tile.tile * kDqBlockRows + (thread >> 2);
    const bool exists = row < s.q_len;
    const int64_t at_row = int64_t{s.q_begin} + (exists ? row : 0);
    const int64_t index = s.batch * p.lse_batch + tile.head * p.lse_head + at_row;
    const int chunks = exists ? p.v_chunks : 0;
    // Under way before the rows, which are waited for.
    float lse = 0, d_lse = 0;
    ptx::LoadConstantFloatIf(lse, p.lse + index, exists);
    ptx::LoadConstantFloatIf(d_lse, p.d_lse + index, p.d_lse != nullptr);
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
    const bool has_rest = p.dq_rests_by_row && exists && lse != -Infinity() &&
                          FixedPoint::NeedsRest(p, of_head, norm_of_o);
    if (exists && (thread & 3) == 0) {
      ptx::StoreGlobalFloat(p.delta + index, sum);
      const float factor = FixedPoint::OfRow(p, of_head, SquareRoot(norm), sum);
      ptx::StoreGlobalFloat(p.dq_factor + index, has_rest ? -factor : factor);
      ptx::StoreGlobalFloat(p.stabilizer + index, StabilizerOf(lse));
    }
    const float size = sum < 0 ? -sum : sum;
    bool non_finite = exists && (lse != lse || !(size < Infinity()));
    if (exists && MayHideInfinities(p, lse)) {
      non_finite |= !IsFinite(RowOf(p.q, s.batch, tile.head, at_row), p.qk_chunks, thread);
    }
    bounds.Widen(kOutputGradientBound, norm);
    bounds.Widen(kDeltaBound, exists && size < Infinity() ? size : 0);
    bounds.Widen(kNonFiniteRows, non_finite ? 1.0f : 0.0f);
    if (p.dq_rests_by_row) ClearRests(p, tile, thread, has_rest, shared);
  }
  // By all threads.
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
  // Whether a row's Q may be infinite or NaN although its lse is not NaN.
  ATTN_HD static bool MayHideInfinities(const ProblemDesc& p, float lse) {
    return lse == -Infinity() || p.softcap != 0 || p.denominator != kDenominatorSoftmax;
  }
  // Of the thread's quarter of a row.
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
