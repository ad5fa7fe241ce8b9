// Small matrix products for one thread, the inner loop of the CPU engine:
//     C[m][n] (+)= Σ_k A(m, k)·B[k][n]        m < rows, n < columns, k < depth, all float32
// A is read element by element, so rows or columns of it may be contiguous (dV and dK take P and dS
// transposed in place). B is read in vectors: row-major with rows of `b_k` floats, cut into panels
// of kPanelColumns columns that lie `b_panel` floats apart. C is row-major. B and C are padded:
// columns are computed up to the next whole vector.
//
// A register tile is kTileRows × kPanelVectors vectors: on AVX-512 6 × 4 accumulators of 32
// registers, so each step of k reads 4 vectors and 6 broadcasts for 24 multiply-adds.
// Where a key is not visible, P and dS hold kHiddenZero, −0: it adds nothing to a sum, and tells
// MultiplyVisible to leave the term out, for B that may hold infinities and NaN in rows that some
// row of A must not see. A visible key's zero is +0. Both give the same bits where all of B is
// finite. The order of the sums over k depends on the shape alone.
//
// Included once per Highway target; kernels/cpu only.
#if defined(ATTND_KERNELS_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_CPU_GEMM_INL_H_
#undef ATTND_KERNELS_CPU_GEMM_INL_H_
#else
#define ATTND_KERNELS_CPU_GEMM_INL_H_
#endif

#include <hwy/highway.h>

#include "attention/element.h"
#include "kernels/cpu/tiles.h"
#include "kernels/cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int kTileRows = 6;
// 16 registers hold 6 × 2 accumulators, 32 hold 6 × 4.
constexpr int kPanelVectors = HWY_TARGET == HWY_AVX3 ? 4 : 2;
constexpr int kPanelColumns = kPanelVectors * kLanes;
static_assert(kMaxPanelColumns % kPanelColumns == 0);
// Rows of a panel read before the next row tile, and how many products a register adds up before C
// takes the sum: 64·64 floats are half of a 32 KiB first-level cache. Twice as many move C half as
// often, 2 to 4 % of a product with 128 columns, and round more: so everywhere but in the scores of
// backward, whose errors reach dK (docs/PERFORMANCE.md).
constexpr int kDepthStep = 64;
constexpr int kLongDepthStep = 2 * kDepthStep;

struct Product {
  const float* a;
  int64_t a_row, a_k;  // A(m, k) = a[m·a_row + k·a_k]
  const float* b;
  int64_t b_k, b_panel;
  float* c;
  int64_t c_row;
  int rows, columns, depth;
  bool accumulate;  // otherwise C is overwritten
  // Optional, one span per kTileRows rows of C: the columns that are wanted (others stay as they
  // were), and the k that contribute (A is zero elsewhere, or B must not be read).
  const Span* column_limits = nullptr;
  const Span* depth_limits = nullptr;
  // Optional, also per kTileRows rows: bit n says the same of columns, or k, from n·kSkipKeys.
  const uint8_t* column_panels = nullptr;
  const uint8_t* depth_panels = nullptr;
  int depth_step = kDepthStep;
};

// Stretches of k, ascending: all, or those between gaps in kLongDepthStep of it.
struct DepthRuns {
  Span at[kLongDepthStep / kSkipKeys / 2 + 1];
  int count = 0;
};

template <int kRows, int kVectors>
void RegisterTile(const float* HWY_RESTRICT a, int64_t a_row, int64_t a_k,
                  const float* HWY_RESTRICT b, int64_t b_k, const DepthRuns& runs,
                  float* HWY_RESTRICT c, int64_t c_row, bool accumulate) {
  const FloatTag d;
  FloatVector sum[kRows][kVectors];
  HWY_UNROLL(6)
  for (int m = 0; m < kRows; ++m) {
    HWY_UNROLL(4)
    for (int n = 0; n < kVectors; ++n) sum[m][n] = hn::Zero(d);
  }
  for (int run = 0; run < runs.count; ++run) {
    const float* HWY_RESTRICT a_at = a + runs.at[run].begin * a_k;
    const float* HWY_RESTRICT b_at = b + runs.at[run].begin * b_k;
    for (int k = runs.at[run].begin; k < runs.at[run].end; ++k, a_at += a_k, b_at += b_k) {
      FloatVector row[kVectors];
      HWY_UNROLL(4)
      for (int n = 0; n < kVectors; ++n) row[n] = hn::LoadU(d, b_at + n * kLanes);
      HWY_UNROLL(6)
      for (int m = 0; m < kRows; ++m) {
        FloatVector scalar = hn::Set(d, a_at[m * a_row]);
        HWY_UNROLL(4)
        for (int n = 0; n < kVectors; ++n) sum[m][n] = hn::MulAdd(scalar, row[n], sum[m][n]);
      }
    }
  }
  // A loop for each case, and one pointer that steps: otherwise compilers keep 24 addresses.
  if (accumulate) {
    HWY_UNROLL(6)
    for (int m = 0; m < kRows; ++m, c += c_row) {
      HWY_UNROLL(4)
      for (int n = 0; n < kVectors; ++n) {
        hn::StoreU(hn::Add(sum[m][n], hn::LoadU(d, c + n * kLanes)), d, c + n * kLanes);
      }
    }
  } else {
    HWY_UNROLL(6)
    for (int m = 0; m < kRows; ++m, c += c_row) {
      HWY_UNROLL(4)
      for (int n = 0; n < kVectors; ++n) hn::StoreU(sum[m][n], d, c + n * kLanes);
    }
  }
}

using RegisterTileFunction = void (*)(const float*, int64_t, int64_t, const float*, int64_t,
                                      const DepthRuns&, float*, int64_t, bool);

template <int kVectors>
RegisterTileFunction ChooseRows(int rows) {
  switch (rows) {
    case 1:
      return &RegisterTile<1, kVectors>;
    case 2:
      return &RegisterTile<2, kVectors>;
    case 3:
      return &RegisterTile<3, kVectors>;
    case 4:
      return &RegisterTile<4, kVectors>;
    case 5:
      return &RegisterTile<5, kVectors>;
    default:
      return &RegisterTile<6, kVectors>;
  }
}

inline RegisterTileFunction ChooseTile(int rows, int vectors) {
#if HWY_TARGET == HWY_AVX3
  if (vectors == 3) return ChooseRows<3>(rows);
  if (vectors == 4) return ChooseRows<4>(rows);
#endif
  return vectors == 1 ? ChooseRows<1>(rows) : ChooseRows<2>(rows);
}

constexpr float kHiddenZero = -0.0f;

// RegisterTile<rows, vectors> without the terms whose A is kHiddenZero; slow.
inline void VisibleTile(int rows, int vectors, const Product& p, const float* a, const float* b,
                        const DepthRuns& runs, float* c, bool accumulate) {
  const FloatTag d;
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < vectors * kLanes; n += kLanes) {
      FloatVector sum = hn::Zero(d);
      for (int run = 0; run < runs.count; ++run) {
        for (int k = runs.at[run].begin; k < runs.at[run].end; ++k) {
          const float factor = a[m * p.a_row + k * p.a_k];
          if (BitsOf(factor) == BitsOf(kHiddenZero)) continue;
          sum = hn::MulAdd(hn::Set(d, factor), hn::LoadU(d, b + k * p.b_k + n), sum);
        }
      }
      float* place = c + m * p.c_row + n;
      if (accumulate) sum = hn::Add(sum, hn::LoadU(d, place));
      hn::StoreU(sum, d, place);
    }
  }
}

// The parts of [begin, end) that row group `group` wants.
inline DepthRuns RunsOf(const Product& p, int group, int begin, int end) {
  DepthRuns runs;
  if (p.depth_limits != nullptr) {
    begin = HWY_MAX(begin, p.depth_limits[group].begin);
    end = HWY_MIN(end, p.depth_limits[group].end);
  }
  if (begin >= end) return runs;
  runs.at[runs.count++] = {begin, end};
  if (p.depth_panels == nullptr) return runs;
  runs.count = 0;
  for (int at = begin; at < end;) {
    const int next = HWY_MIN(end, (at / kSkipKeys + 1) * kSkipKeys);
    if ((p.depth_panels[group] >> (at / kSkipKeys) & 1) != 0) {
      if (runs.count == 0 || runs.at[runs.count - 1].end < at) runs.at[runs.count++].begin = at;
      runs.at[runs.count - 1].end = next;
    }
    at = next;
  }
  return runs;
}

// The vectors of the panel at `column` that row group `group` wants, and those between.
inline Span VectorsOf(const Product& p, int group, int column, int vectors) {
  constexpr int kStep = HWY_MIN(kPanelColumns, kSkipKeys) / kLanes;
  Span wanted = {0, vectors};
  auto is_wanted = [&](int vector) {
    const int at = column + vector * kLanes;
    if (p.column_limits != nullptr) {
      const Span& limits = p.column_limits[group];
      if (limits.end <= at || limits.begin >= at + kStep * kLanes) return false;
    }
    return p.column_panels == nullptr || (p.column_panels[group] >> (at / kSkipKeys) & 1) != 0;
  };
  while (!wanted.empty() && !is_wanted(wanted.begin)) wanted.begin += kStep;
  while (!wanted.empty() && !is_wanted((wanted.end - 1) / kStep * kStep)) {
    wanted.end = (wanted.end - 1) / kStep * kStep;
  }
  return wanted;
}

// One panel, one stretch [k_begin, k_end) of the depth: every row tile.
template <bool kVisibleOnly>
void MultiplyPanel(const Product& p, int column, int k_begin, int k_end) {
  const int width = HWY_MIN(kPanelColumns, p.columns - column);
  const int vectors = (width + kLanes - 1) / kLanes;
  const float* panel = p.b + (column / kPanelColumns) * p.b_panel;
  RegisterTileFunction whole = ChooseTile(kTileRows, vectors);
  const bool accumulate = p.accumulate || k_begin > 0;
  for (int row = 0, group = 0; row < p.rows; row += kTileRows, ++group) {
    const Span wanted = VectorsOf(p, group, column, vectors);
    if (wanted.empty()) continue;
    const DepthRuns runs = RunsOf(p, group, k_begin, k_end);
    if (runs.count == 0 && accumulate) continue;
    const int rows = HWY_MIN(kTileRows, p.rows - row), some = wanted.end - wanted.begin;
    const float* a = p.a + row * p.a_row;
    const float* b = panel + wanted.begin * kLanes;
    float* c = p.c + row * p.c_row + column + wanted.begin * kLanes;
    if constexpr (kVisibleOnly) {
      VisibleTile(rows, some, p, a, b, runs, c, accumulate);
    } else {
      RegisterTileFunction tile =
          rows == kTileRows && some == vectors ? whole : ChooseTile(rows, some);
      tile(a, p.a_row, p.a_k, b, p.b_k, runs, c, p.c_row, accumulate);
    }
  }
}

template <bool kVisibleOnly>
void MultiplyAll(const Product& p) {
  for (int column = 0; column < p.columns; column += kPanelColumns) {
    int k = 0;
    do {
      int end = HWY_MIN(p.depth, k + p.depth_step);
      MultiplyPanel<kVisibleOnly>(p, column, k, end);
      k = end;
    } while (k < p.depth);
  }
}

inline void Multiply(const Product& p) { MultiplyAll<false>(p); }
inline void MultiplyVisible(const Product& p) { MultiplyAll<true>(p); }

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();
#endif
