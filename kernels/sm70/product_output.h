// HalfOutput takes a warp's 64 × 64 sums of C to memory as float16: plus a bias, stored or added to
// what stands there, or through a curve (kernels/dense/product_params.h). Lanes round their numbers
// into the warp's own shared memory; then each has eight neighbours of a row at a time, of which
// nothing is read or written twice: C is not read again for its curve, and stored once, times the
// slope. What the slope is of is asked for ahead.
// Errors: none.
#pragma once

#include "kernels/dense/product_tiles.h"
#include "kernels/sm70/tile_math.h"

namespace attnd::sm70 {

inline constexpr int kProductWarpTile = kProductTile / 2, kProductGroups = kProductWarpTile / 16;

// Columns of B as lanes have them: OperandWords (product.h).
template <class BWords, bool kBByDepth>
class HalfOutput {
 public:
  static constexpr int kRowBytes = kProductWarpTile * 2;
  using Sums = float[kProductGroups][kProductGroups][8];
  // Chunk c of row r is at place c ^ Turn(r), so that no bank is met twice.
  struct Rows {
    alignas(128) char bytes[kProductWarpTile * kRowBytes];
  };

  // `place` is the warp's first row and column of C.
  ATTN_HD HalfOutput(const ProductDesc& desc, const ProductPlace& place, Lane lane) : lane_(lane) {
    const ProductDesc p = desc;  // read at once
    const int column = place.column + Chunk() * 8;
    row_bytes_ = static_cast<int>(p.c_stride) * 2;
    rows_left_ = column < p.columns ? p.rows - place.row - FirstRow() : 0;
    const auto at = [&](const void* tensor) {
      return ptx::Offset(static_cast<const char*>(tensor) + int64_t{column} * 2,
                         place.row + FirstRow(), row_bytes_);
    };
    stores_ = p.c != nullptr;
    adds_ = p.result != kProductStore;
    c_ = at(p.c);
    curve_ = p.curve.curve;
    is_slope_ = p.curve.at != nullptr;
    if (curve_ != 0) beside_ = at(is_slope_ ? p.curve.at : p.curve.value);
    LoadBias(p, place.column);
    if (is_slope_) Fetch(0);
  }

  ATTN_HD void Store(const Sums& sums, Rows& rows) {
    Put(sums, rows);
    ptx::SyncWarp();
    if (curve_ != 0) {
      WithCurve(curve_, [&](auto curve) {
        if (is_slope_) {
          Curve<decltype(curve)::kCode, true>(rows);
        } else {
          Curve<decltype(curve)::kCode, false>(rows);
        }
      });
    } else if (adds_) {
      Leave<true>(rows);
    } else {
      Leave<false>(rows);
    }
  }

 private:
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kRowsAtOnce = kWarpLanes / kChunks, kTogether = 4;
  using Numbers = float[kNeighbours];

  // ---- Numbers as products leave them: of a group of 16 × 16 a lane has two rows, two apart, and
  // two pairs of columns.
  ATTN_HD int SumRow() const {
    return (lane_.index & 1) | lane_.row_half() << 2 | lane_.upper() << 3;
  }
  ATTN_HD int Turn() const {
    return (lane_.index & 1) | lane_.row_half() << 1 | lane_.upper() << 2;
  }
  ATTN_HD static int TurnOf(int row) { return (row & 1) | (row >> 1 & 6); }
  ATTN_HD int ColumnOf(int group, int pair) const {
    return BWords::Of(group, BWords::InGroup((lane_.index & 2) | pair * 4, lane_.column_half()));
  }
  template <class Load>
  ATTN_HD void LoadPairs(const ProductDesc& p, int first, const Load& load) {
#pragma unroll
    for (int n = 0; n < kProductGroups; ++n) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int column = first + ColumnOf(n, pair);
        if (column < p.columns) load(column, bias_[n][pair]);
      }
    }
  }
  ATTN_HD void LoadBias(const ProductDesc& p, int first) {
#pragma unroll
    for (int n = 0; n < kProductGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) bias_[n][i >> 1][i & 1] = -0.0f;  // changes no sum
    }
    if (p.bias == nullptr) return;
    if (p.bias_element == kBiasFloat32) {
      LoadPairs(p, first, [&](int column, float(&of)[2]) {
        const uint2 words = ptx::LoadGlobal64(static_cast<const float*>(p.bias) + column);
        of[0] = ptx::BitsFloat(words.x), of[1] = ptx::BitsFloat(words.y);
      });
    } else if (p.bias_element == kBiasFloat16) {
      LoadPairsAs<Float16>(p, first);
    } else {
      LoadPairsAs<BFloat16>(p, first);
    }
  }
  template <class Element>
  ATTN_HD void LoadPairsAs(const ProductDesc& p, int first) {
    LoadPairs(p, first, [&](int column, float(&of)[2]) {
      const uint32_t word = ptx::LoadGlobal32(static_cast<const uint16_t*>(p.bias) + column);
      of[0] = Element::Low(word), of[1] = Element::High(word);
    });
  }
  ATTN_HD uint32_t Rounded(const Sums& sums, int m, int n, int e) const {
    const float(&bias)[2] = bias_[n][e >> 2];
    return Float16::Pack(ptx::Add(sums[m][n][e], bias[0]), ptx::Add(sums[m][n][e + 1], bias[1]));
  }
  // By depth, a lane's words of two groups are words w and w + 2 of one chunk: they stand side by
  // side.
  ATTN_HD void Put(const Sums& sums, Rows& rows) const {
    const int word = lane_.index >> 1 & 1, half = lane_.column_half();
    const int chunk = Turn() ^ (kBByDepth ? half * 4 : 0);
    const int within = kBByDepth ? word * 8 : half * 8 + word * 4;
    char* const base = rows.bytes + SumRow() * kRowBytes;
    const int first = chunk * 16 + within;
#pragma unroll
    for (int m = 0; m < kProductGroups; ++m) {
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        char* const row = base + (16 * m + (e & 2)) * kRowBytes;
        const int pair = e >> 2;
#pragma unroll
        for (int n = 0; n < kProductGroups; n += kBByDepth ? 2 : 1) {
          if constexpr (kBByDepth) {
            ptx::StoreShared64(row + (first ^ (n + pair) * 16),
                               make_uint2(Rounded(sums, m, n, e), Rounded(sums, m, n + 1, e)));
          } else {
            ptx::StoreShared32(row + (first ^ (2 * n + pair) * 16), Rounded(sums, m, n, e));
          }
        }
      }
    }
  }

  // ---- Rows: a lane has a chunk of each kRowsAtOnce.
  ATTN_HD int Chunk() const { return lane_.index % kChunks; }
  ATTN_HD int FirstRow() const { return lane_.index / kChunks; }
  // The lane's chunk of a row, which counts from the lane's first on.
  ATTN_HD uint4 Words(const Rows& rows, int row) const {
    const int of = row + FirstRow();
    const uint4 w = ptx::LoadShared128(rows.bytes + of * kRowBytes + (Chunk() ^ TurnOf(of)) * 16);
    return kBByDepth ? make_uint4(w.x, w.z, w.y, w.w) : w;
  }
  ATTN_HD void StoreAt(const char* tensor, int row, uint4 words) const {
    if (row < rows_left_) {
      ptx::StoreGlobal128(const_cast<char*>(ptx::Offset(tensor, row, row_bytes_)), words);
    }
  }
  template <bool kAdds>
  ATTN_HD void Leave(const Rows& rows) const {
    constexpr int kLoads = 4;
#pragma unroll
    for (int first = 0; first < kProductWarpTile; first += kLoads * kRowsAtOnce) {
      uint4 old[kLoads] = {};
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        const int row = first + n * kRowsAtOnce;
        if (kAdds && row < rows_left_) {
          old[n] = ptx::LoadGlobal128(ptx::Offset(c_, row, row_bytes_));
        }
      }
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        const int row = first + n * kRowsAtOnce;
        const uint4 words = Words(rows, row);
        StoreAt(c_, row, kAdds ? Sum(old[n], words) : words);
      }
    }
  }
  ATTN_HD static uint4 Sum(uint4 stands, uint4 words) {
    Numbers a, b;
    Unpack<Float16>(stands, a);
    Unpack<Float16>(words, b);
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) a[i] = ptx::Add(a[i], b[i]);
    return Packed<Float16>(a);
  }

  ATTN_HD void Fetch(int first) {
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      const int row = first + n * kRowsAtOnce;
      if (row < rows_left_) {
        next_[n] = ptx::LoadGlobal128(ptx::Offset(beside_, row, row_bytes_));
      }
    }
  }
  template <int32_t kCurve, bool kIsSlope>
  ATTN_HD void Curve(const Rows& rows) {
#pragma unroll 1
    for (int first = 0; first < kProductWarpTile; first += kTogether * kRowsAtOnce) {
      uint4 at[kTogether] = {};
      if constexpr (kIsSlope) {
#pragma unroll
        for (int n = 0; n < kTogether; ++n) at[n] = next_[n];
        if (first + kTogether * kRowsAtOnce < kProductWarpTile) {
          Fetch(first + kTogether * kRowsAtOnce);
        }
      }
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int row = first + n * kRowsAtOnce;
        const uint4 words = Words(rows, row);
        Numbers numbers, x;
        Unpack<Float16>(words, numbers);
        Unpack<Float16>(at[n], x);
#pragma unroll
        for (int i = 0; i < kNeighbours; ++i) {
          numbers[i] =
              kIsSlope ? SlopeTimes<kCurve>(x[i], numbers[i]) : CurveValue<kCurve>(numbers[i]);
        }
        if (!kIsSlope && stores_) StoreAt(c_, row, words);
        StoreAt(kIsSlope ? c_ : beside_, row, Packed<Float16>(numbers));
      }
    }
  }

  Lane lane_;
  const char* c_;  // of the lane's first number
  const char* beside_ = nullptr;
  int row_bytes_, rows_left_;  // from the lane's first on
  int32_t curve_;
  bool stores_, adds_, is_slope_;
  float bias_[kProductGroups][2][2];
  uint4 next_[kTogether] = {};  // of the curve's argument
};

}  // namespace attnd::sm70
