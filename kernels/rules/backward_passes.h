// What backward needs before and after its one large kernel: bounds, what belongs to a row (delta,
// stabiliser, factor of dQ), and dQ's sums put into place. Small kernels, bound by memory; 64 rows
// a block. Errors: none.
#pragma once

#include "kernels/rules/gradient_scale.h"
#include "kernels/rules/half_element.h"
#include "kernels/rules/non_finite_rows.h"
#include "kernels/rules/online_softmax.h"

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
// bound: there a second integer sums what the first one's rounding left, in units 2^-RestBits, and
// with 28 bits rows of P may sum to eight (an lse that is off by 2, as float16 accumulation's may
// be). No sum overflows: over n tiles, 2^30·(1 + 2^-9) + n/2 < 2^31 for n < 2^29; what roundings
// left is at most 2^(RestBits − 1) each, n of them less than 2^31.
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
    return MinInt((p.dq_rest != 0 ? 28 : 30) - 17 - Exponent(key), 60);
  }
  ATTN_HD static int RestBits(int keys) {
    const int tiles = keys / 64 + 1;  // at most
    return MinInt(24, 31 - Exponent(static_cast<float>(tiles)));
  }
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

// Sums and maxima over rows that four lanes share, or over numbers that are finite.
template <class Element>
struct RowMath {
  ATTN_HD static float FiniteMax(uint4 chunk) {
    const uint4 x = FiniteHalves<Element>(chunk);
    return ptx::Max(ptx::Max(Larger(x.x), Larger(x.y)), ptx::Max(Larger(x.z), Larger(x.w)));
  }
  ATTN_HD static float FiniteNorm(uint4 chunk) {
    return Dot(FiniteHalves<Element>(chunk), FiniteHalves<Element>(chunk));
  }
  ATTN_HD static float SumOfQuad(float x) {
    x += ptx::ShuffleXor(x, 1);
    return x + ptx::ShuffleXor(x, 2);
  }
  ATTN_HD static void Widen(uint32_t* bound, float value, int thread) {
    for (int mask = 1; mask < 32; mask <<= 1) value = ptx::Max(value, ptx::ShuffleXor(value, mask));
    if ((thread & 31) == 0) ptx::ReduceMax(bound, ptx::FloatBits(value));
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

// max‖V‖ and max|K| of the keys that some row sees. The blocks of a KV head's query heads share its
// keys: 64 at a time, four lanes a key.
template <class Element>
struct KeyBoundsKernel {
  using RowMath = attnd::RowMath<Element>;
  static constexpr int kThreads = 256;
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const TileWork& tile = params.tiles[at.block];
    const ProblemDesc& p = params.problems[tile.problem];
    const SequenceDesc& s = p.sequences[tile.batch];
    const int kv_head = tile.head / p.group, blocks = static_cast<int>(DqBlocks(s.q_len));
    const int share = (tile.head - kv_head * p.group) * blocks + tile.tile;
    float value_norm = 0, largest_key = 0;
    for (int first = share * kDqBlockRows; first < s.kv_len;
         first += p.group * blocks * kDqBlockRows) {
      const int key = first + (at.thread >> 2);
      float norm = 0;
      if (key < s.kv_len && IsSeen(p, s, tile.batch, kv_head, key)) {
        const char* v = RowOf(p.v, s.batch, kv_head, int64_t{s.kv_begin} + key);
        for (int c = at.thread & 3; c < p.v_chunks; c += 4) {
          norm += RowMath::FiniteNorm(ptx::LoadConstant128(v + c * 16));
        }
        const char* k = RowOf(p.k, s.batch, kv_head, int64_t{s.kv_begin} + key);
        for (int c = at.thread & 3; c < p.qk_chunks; c += 4) {
          largest_key = ptx::Max(largest_key, RowMath::FiniteMax(ptx::LoadConstant128(k + c * 16)));
        }
      }
      value_norm = ptx::Max(value_norm, RowMath::SumOfQuad(norm));
    }
    uint32_t* bounds = GradientBounds(p, tile.batch, kv_head);
    RowMath::Widen(bounds + kValueBound, value_norm, at.thread);
    RowMath::Widen(bounds + kKeyBound, largest_key, at.thread);
  }

 private:
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
// it has rows that are not finite (non_finite_rows.h).
template <class Element, class Rounding>
struct DeltaKernel {
  using RowMath = attnd::RowMath<Element>;
  static constexpr int kThreads = 256;
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const TileWork& tile = params.tiles[at.block];
    const ProblemDesc& p = params.problems[tile.problem];
    const SequenceDesc& s = p.sequences[tile.batch];
    const int row = tile.tile * kDqBlockRows + (at.thread >> 2);
    const bool exists = row < s.q_len;
    const int64_t at_row = int64_t{s.q_begin} + (exists ? row : 0);
    const char* o = RowOf(p.o, s.batch, tile.head, at_row);
    const char* d_o = RowOf(p.d_o, s.batch, tile.head, at_row);
    float sum = 0, norm = 0;
    if (exists) {
      for (int c = at.thread & 3; c < p.v_chunks; c += 4) {
        const uint4 chunk = ptx::LoadConstant128(d_o + c * 16);
        sum += RowMath::Dot(ptx::LoadConstant128(o + c * 16), chunk);
        norm += RowMath::FiniteNorm(chunk);
      }
    }
    sum = RowMath::SumOfQuad(sum);
    const int64_t index = s.batch * p.lse_batch + tile.head * p.lse_head + at_row;
    if (p.d_lse != nullptr) sum -= ptx::LoadConstantFloat(p.d_lse + index);
    norm = RowMath::SumOfQuad(norm);
    uint32_t* bounds = GradientBounds(p, tile.batch, tile.head / p.group);
    const float lse = exists ? ptx::LoadConstantFloat(p.lse + index) : 0;
    if (exists && (at.thread & 3) == 0) {
      ptx::StoreGlobalFloat(p.delta + index, sum);
      ptx::StoreGlobalFloat(p.dq_factor + index,
                            FixedPoint::OfRow(p, bounds, SquareRoot(norm), sum));
      ptx::StoreGlobalFloat(p.stabilizer + index, StabilizerOf(lse));
    }
    RowMath::Widen(bounds + kOutputGradientBound, norm, at.thread);
    const float size = sum < 0 ? -sum : sum;
    RowMath::Widen(bounds + kDeltaBound, exists && size < Infinity() ? size : 0, at.thread);
    bool non_finite = exists && (lse != lse || !(size < Infinity()));
    if (exists && MayHideInfinities(p, lse)) {
      non_finite |= !IsFinite(RowOf(p.q, s.batch, tile.head, at_row), p.qk_chunks, at.thread);
    }
    if (ptx::VoteAny(non_finite) && (at.thread & 31) == 0) {
      ptx::ReduceMax(bounds + kNonFiniteRows, 1);
    }
  }

 private:
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

// dQ's sums into place: 64 rows of a query head. `Dq` says where the sums of kColumns columns lie:
//   kParts, kSums         sums of a lane: parts of kOut columns, kSums each
//   kFloats, kBlockFloats numbers of a part and of 64 queries
//   Query, Column(n, warp, lane)   of sum n; 2n and 2n + 1 are neighbours in a row
template <class Dq, class Element, class Rounding, class DqSums>
struct DqKernel {
  static constexpr int kThreads = 256;
  struct Shared {};
  static constexpr int kColumns = Dq::kColumns;

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const TileWork& tile = params.tiles[at.block];
    const ProblemDesc& p = params.problems[tile.problem];
    const SequenceDesc& s = p.sequences[tile.batch];
    const int lane = at.thread & 31, warp = at.thread >> 5;
    const float* from = p.dq_sums + (int64_t{tile.batch} * p.q_heads + tile.head) * p.dq_head +
                        int64_t{tile.tile} * Dq::kBlockFloats + warp * Dq::kSums * 32 + lane;
    const Head head(p, s, tile);
#pragma unroll 1
    for (int part = 0; part < Dq::kParts; ++part, from += Dq::kFloats) {
#pragma unroll
      for (int n = 0; n < Dq::kSums; n += 2) {
        const int row = tile.tile * kDqBlockRows + Dq::Query(n, warp, lane);
        const int column = part * Dq::kOut + Dq::Column(n, warp, lane);
        if (row < s.q_len && column * Element::kBytes < p.qk_chunks * 16) {
          Write(head, row, column, from + n * 32);
        }
      }
    }
    RestoreRows(p, s, tile, warp, lane);
  }

 private:
  // What all rows of the block share, looked up once.
  struct Head {
    const ProblemDesc& p;
    const SequenceDesc& s;
    const TileWork& tile;
    int gain, key_exponent, rest_bits;
    bool has_rest;
    ATTN_HD Head(const ProblemDesc& problem, const SequenceDesc& sequence, const TileWork& of)
        : p(problem),
          s(sequence),
          tile(of),
          gain(GradientExponent(p, of.batch, of.head / p.group, Rounding::kMargin)),
          key_exponent(FixedPoint::KeyExponent(p, GradientBounds(p, of.batch, of.head / p.group))),
          rest_bits(FixedPoint::RestBits(s.kv_len)),
          has_rest(p.dq_rest != 0) {}
    // The sums are dQ / scale times 2^this.
    ATTN_HD int SumExponent(int row) const {
      if constexpr (!DqSums::kFixedPoint) return gain;
      const int64_t index = s.batch * p.lse_batch + tile.head * p.lse_head + s.q_begin + row;
      const float factor =
          FixedPoint::RowFactor(ptx::LoadConstantFloat(p.dq_factor + index), PowerOfTwo(-gain));
      return gain + FixedPoint::Exponent(factor) + key_exponent;
    }
  };
  ATTN_HD static void Write(const Head& head, int row, int column, const float* sums) {
    const ProblemDesc& p = head.p;
    const GradientWriter writer(p, p.scale * (1.0f + Rounding::kLoss),
                                p.d_q_exponent - head.SumExponent(row));
    float low = Sum(head, sums), high = Sum(head, sums + 32);
    if constexpr (DqSums::kFixedPoint) {
      const uint32_t marks =
          ptx::LoadGlobal32(DqNonFinite<kColumns>(p, head.tile.batch, head.tile.head, row) +
                            (column >> 5)) >>
          (column & 31);
      if (marks & 1) low = ptx::BitsFloat(0x7fffffffu);
      if (marks & 2) high = ptx::BitsFloat(0x7fffffffu);
    }
    char* out = RowOf(p.d_q, head.s.batch, head.tile.head, int64_t{head.s.q_begin} + row);
    out += Element::kBytes * column;
    if constexpr (Element::kBytes == 4) {
      ptx::StoreGlobal64(out, writer.Floats(low, high));
    } else {
      ptx::StoreGlobal32(out, writer.Pack(low, high));
    }
  }
  ATTN_HD static void RestoreRows(const ProblemDesc& p, const SequenceDesc& s, const TileWork& tile,
                                  int warp, int lane) {
    const uint32_t* bounds = GradientBounds(p, tile.batch, tile.head / p.group);
    if (!ptx::LoadConstant32(bounds + kNonFiniteRows)) return;
    const NonFiniteRows<Element> rows(p, s, tile);
    const int first = tile.tile * kDqBlockRows, end = MinInt(first + kDqBlockRows, s.q_len);
    for (int row = first + warp; row < end; row += kThreads / 32) rows.Restore(row, lane);
  }
  ATTN_HD static float Sum(const Head& head, const float* at) {
    if constexpr (!DqSums::kFixedPoint) return ptx::LoadGlobalFloat(at);
    const int64_t sum = static_cast<int32_t>(ptx::LoadGlobal32(at));
    if (!head.has_rest) return static_cast<float>(sum);
    const int64_t rest = static_cast<int32_t>(ptx::LoadGlobal32(at + head.p.dq_rest));
    return static_cast<float>((sum << head.rest_bits) + rest) * PowerOfTwo(-head.rest_bits);
  }
};

}  // namespace attnd
