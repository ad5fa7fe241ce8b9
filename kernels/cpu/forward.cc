// Forward of the CPU engine: one item is a tile of queries of one head, in one pass over the keys.
//   S = scale·Q·Kᵀ, masked      P = exp2(S − m)      O = P·V      lse = ln 2·(m + log2(l))
// (m, l, O) describe the keys seen so far, in units of log2: m is the row maximum, l the sum of P.
// A new tile rescales l and O by exp2(m_old − m_new). (Dao 2023, FlashAttention-2, Algorithm 1)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/forward.cc"
#include "kernels/cpu/targets.h"
//
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/check.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/scores-inl.h"
#include "kernels/cpu/workspace.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

RowsOf RowsAt(const Problem& p, const void* data, const TensorStrides& strides, int64_t first,
              int rows, int64_t count) {
  return {static_cast<const uint8_t*>(data) + first * ElementBytes(p.element), strides.row, rows,
          static_cast<int>(count)};
}

struct FloatRows {
  const float* data;
  int64_t stride;
};

// Rows as float32: where they lie, or copied with padding. Enough for reading number by number.
FloatRows AsFloats(const Problem& p, const RowsOf& from, float* copy) {
  if (p.element == ElementType::kFloat32) {
    return {static_cast<const float*>(from.data), from.stride};
  }
  CopyRows(p.element, from, copy, PaddedDim(from.count));
  return {copy, PaddedDim(from.count)};
}

void PackKeysImpl(const ForwardCall& call, int64_t b, int64_t kv_head, int64_t tile,
                  float* scratch) {
  const Problem& p = *call.problem;
  const Sequence s = p.SequenceAt(b);
  const int64_t first = tile * ForwardTileSize(p).kv_rows;
  const int rows = static_cast<int>(HWY_MIN(s.kv_len - first, int64_t{ForwardTileSize(p).kv_rows}));
  const ForwardWorkspace work(p, call.workspace);
  const int64_t place = kv_head * work.rows() + ForwardWorkspace::FirstRow(p, b, s) + first;
  const TensorStrides k_strides = KeyStrides(p), v_strides = ValueStrides(p);
  if (PacksKeys(p, s.q_len)) {
    const RowsOf keys = RowsAt(p, call.k, k_strides, k_strides.Row(b, kv_head, s.kv_begin + first),
                               rows, p.qk_head_dim);
    const FloatRows k = AsFloats(p, keys, scratch);
    TransposeToPanels(k.data, k.stride, rows, keys.count, work.keys() + place * keys.count);
  }
  if (IsReadInPlace(p, v_strides, p.v_head_dim)) return;
  constexpr int kUnit = ForwardWorkspace::kUnit;
  for (int r = 0; r < rows; r += kUnit) {
    const RowsOf values =
        RowsAt(p, call.v, v_strides, v_strides.Row(b, kv_head, s.kv_begin + first + r),
               HWY_MIN(kUnit, rows - r), p.v_head_dim);
    work.finite()[(place + r) / kUnit] =
        CopyRows(p.element, values, work.values() + (place + r) * PaddedDim(p.v_head_dim),
                 PaddedDim(p.v_head_dim));
  }
}

// ForwardPass: the state of one item while it walks over the keys.
class ForwardPass {
 public:
  ForwardPass(const ForwardCall& call, int64_t b, int64_t h, int64_t tile, float* scratch)
      : call_(call),
        p_(*call.problem),
        rules_(call, b, h),
        factor_(rules_.factor() * kLog2E),
        work_(p_, call.workspace),
        first_row_(tile * ForwardTileSize(p_).q_rows),
        dim_(static_cast<int>(p_.qk_head_dim)),
        v_stride_(PaddedDim(p_.v_head_dim)) {
    rows_ = static_cast<int>(
        HWY_MIN(rules_.sequence.q_len - first_row_, int64_t{ForwardTileSize(p_).q_rows}));
    few_ = !PacksKeys(p_, rules_.sequence.q_len);
    Layout(scratch);
  }

  void Run() {
    if (rows_ <= 0) return;
    Start();
    const int64_t step = ForwardTileSize(p_).kv_rows;
    for (int64_t key = 0; key < rules_.sequence.kv_len; key += step) {
      if (call_.stop.stop_requested()) return;
      tile_.first_row = first_row_;
      tile_.first_column = key;
      tile_.rows = rows_;
      tile_.columns = static_cast<int>(HWY_MIN(rules_.sequence.kv_len - key, step));
      if (FindSpans(rules_, tile_)) VisitTile();
    }
    Finish();
  }

 private:
  void Layout(float* scratch) {
    const float* end = scratch + kScratchFloats;
    auto take = [&](int64_t floats) {
      float* place = scratch;
      scratch += floats;
      return place;
    };
    q_copy_ = take(kMaxQueryRows * PaddedDim(dim_));
    s_ = take(kMaxQueryRows * kMaxKeyRows);
    o_ = take(kMaxQueryRows * v_stride_);
    keep_ = reinterpret_cast<uint8_t*>(take(kMaxQueryRows * kMaxKeyRows / 4));
    q_panels_ = take(int64_t{dim_} * kMaxPanelColumns);
    k_copy_ = take(kMaxKeyRows * PaddedDim(dim_));
    s_transposed_ = take(kMaxKeyRows * kFewQueries);
    CHECK(scratch <= end);
  }

  void Start() {
    const TensorStrides strides = QueryStrides(p_);
    const RowsOf queries =
        RowsAt(p_, call_.q, strides,
               strides.Row(rules_.batch_index, rules_.q_head, rules_.sequence.q_begin + first_row_),
               rows_, dim_);
    q_ = AsFloats(p_, queries, q_copy_);
    if (few_) TransposeToPanels(q_.data, q_.stride, rows_, dim_, q_panels_);
    std::memset(o_, 0, sizeof(float) * rows_ * v_stride_);
    for (int r = 0; r < rows_; ++r) {
      max_[r] = kHidden;
      sum_[r] = 0;
      visible_[r] = 0;
    }
  }

  void VisitTile() {
    const int64_t place = p_.KvHead(rules_.q_head) * work_.rows() +
                          ForwardWorkspace::FirstRow(p_, rules_.batch_index, rules_.sequence) +
                          tile_.first_column;
    few_ ? ScoresOfFew() : Scores(place);
    if (p_.dropout.threshold > 0) {
      FillDropout(rules_, tile_, keep_, kMaxKeyRows);
      tile_.full ? Softmax<false, true>() : Softmax<true, true>();
    } else {
      tile_.full ? Softmax<false, false>() : Softmax<true, false>();
    }
    AccumulateValues(place);
  }

  void Scores(int64_t place) {
    Multiply({.a = q_.data,
              .a_row = q_.stride,
              .a_k = 1,
              .b = work_.keys() + place * dim_,
              .b_k = kPanelColumns,
              .b_panel = int64_t{dim_} * kPanelColumns,
              .c = s_,
              .c_row = kMaxKeyRows,
              .rows = rows_,
              .columns = tile_.columns,
              .depth = dim_,
              .accumulate = false,
              .column_limits = tile_.full ? nullptr : tile_.columns_of_rows});
  }

  // Sᵀ = K·Qᵀ, turned around.
  void ScoresOfFew() {
    const TensorStrides strides = KeyStrides(p_);
    const RowsOf keys = RowsAt(p_, call_.k, strides,
                               strides.Row(rules_.batch_index, p_.KvHead(rules_.q_head),
                                           rules_.sequence.kv_begin + tile_.first_column),
                               tile_.columns, dim_);
    const FloatRows k = AsFloats(p_, keys, k_copy_);
    Multiply({.a = k.data,
              .a_row = k.stride,
              .a_k = 1,
              .b = q_panels_,
              .b_k = kPanelColumns,
              .b_panel = int64_t{dim_} * kPanelColumns,
              .c = s_transposed_,
              .c_row = kFewQueries,
              .rows = tile_.columns,
              .columns = rows_,
              .depth = dim_,
              .accumulate = false});
    for (int r = 0; r < rows_; ++r) {
      for (int c = 0; c < tile_.columns; ++c) {
        s_[r * kMaxKeyRows + c] = s_transposed_[c * kFewQueries + r];
      }
    }
  }

  void AccumulateValues(int64_t place) {
    const float* values = Values(place);
    Product product = {.a = s_,
                       .a_row = kMaxKeyRows,
                       .a_k = 1,
                       .b = values,
                       .b_k = v_stride_,
                       .b_panel = kPanelColumns,
                       .c = o_,
                       .c_row = v_stride_,
                       .rows = rows_,
                       .columns = static_cast<int>(p_.v_head_dim),
                       .depth = tile_.columns,
                       .accumulate = true,
                       .depth_limits = tile_.full ? nullptr : tile_.columns_of_rows};
    tile_.full || AreValuesFinite(values, place) ? Multiply(product) : MultiplyVisible(product);
  }

  // V of the tile, in place or in the workspace: rows of v_stride_ either way.
  const float* Values(int64_t place) const {
    const TensorStrides strides = ValueStrides(p_);
    if (!IsReadInPlace(p_, strides, p_.v_head_dim)) return work_.values() + place * v_stride_;
    return static_cast<const float*>(call_.v) +
           strides.Row(rules_.batch_index, p_.KvHead(rules_.q_head),
                       rules_.sequence.kv_begin + tile_.first_column);
  }

  bool AreValuesFinite(const float* values, int64_t place) const {
    if (IsReadInPlace(p_, ValueStrides(p_), p_.v_head_dim)) {
      return AreFinite({values, v_stride_, tile_.columns, static_cast<int>(p_.v_head_dim)});
    }
    bool finite = true;
    for (int c = 0; c < tile_.columns; c += ForwardWorkspace::kUnit) {
      finite &= work_.finite()[(place + c) / ForwardWorkspace::kUnit] != 0;
    }
    return finite;
  }

  // Some rows at a time: while one row's maximum is reduced, the exponentials of others can run.
  template <bool kMasked, bool kDropout>
  void Softmax() {
    constexpr int kStep = 8;
    for (int first = 0; first < rows_; first += kStep) {
      const int end = HWY_MIN(rows_, first + kStep);
      for (int r = first; r < end; ++r) {
        float* s = s_ + r * kMaxKeyRows;
        const bool as_is = !kMasked && rules_.plain;
        visible_[r] += as_is ? tile_.columns : PrepareRow(rules_, tile_, r, s);
        UpdateMaximum(r, s, WholeVectors(tile_.row(r)));
      }
      for (int r = first; r < end; ++r) {
        float* s = s_ + r * kMaxKeyRows;
        const Span whole = WholeVectors(tile_.row(r));
        sum_[r] += ExponentialRow<kMasked, kDropout>(r, s, whole);
        if (kMasked) {
          FillHidden(s, 0, whole.begin);
          FillHidden(s, whole.end, tile_.columns);
        }
      }
    }
  }

  void UpdateMaximum(int r, const float* s, const Span& whole) {
    const FloatTag d;
    if (whole.empty()) return;
    FloatVector most = hn::LoadU(d, s + whole.begin);
    for (int c = whole.begin + kLanes; c < whole.end; c += kLanes) {
      most = hn::Max(most, hn::LoadU(d, s + c));
    }
    float row_max = hn::GetLane(hn::MaxOfLanes(d, most)) * factor_;
    if (!(row_max > max_[r])) return;  // a NaN among the scores shows in P
    const float rescale = Exp2One(max_[r] - row_max);
    max_[r] = row_max;
    if (sum_[r] == 0) return;  // O is still zero
    sum_[r] *= rescale;
    float* o = o_ + r * v_stride_;
    for (int n = 0; n < p_.v_head_dim; n += kLanes) {
      hn::StoreU(hn::Mul(hn::Set(d, rescale), hn::LoadU(d, o + n)), d, o + n);
    }
  }

  template <bool kMasked, bool kDropout>
  float ExponentialRow(int r, float* s, const Span& whole) {
    const FloatTag d;
    const FloatVector factor = hn::Set(d, factor_), max = hn::Set(d, max_[r]);
    const uint8_t* keep = keep_ + r * kMaxKeyRows;
    FloatVector sum = hn::Zero(d);
    for (int c = whole.begin; c < whole.end; c += kLanes) {
      FloatVector score = hn::LoadU(d, s + c);
      FloatVector probability = Exp2(hn::MulSub(score, factor, max));
      auto hidden = hn::Eq(score, hn::Set(d, kHidden));
      if (kMasked) probability = hn::IfThenElse(hidden, hn::Zero(d), probability);
      sum = hn::Add(sum, probability);
      // A product, so that a dropped NaN stays one.
      if (kDropout) {
        probability = hn::Mul(probability, hn::IfThenElseZero(Kept(keep + c, p_.dropout.threshold),
                                                              hn::Set(d, 1.0f)));
      }
      if (kMasked) probability = hn::IfThenElse(hidden, hn::Set(d, kHiddenZero), probability);
      hn::StoreU(probability, d, s + c);
    }
    return hn::GetLane(hn::SumOfLanes(d, sum));
  }

  // Normalises and writes O and lse.
  void Finish() {
    const TensorStrides strides = OutputStrides(p_);
    const float kept = DropoutScale(p_.dropout.threshold);
    const int count = static_cast<int>(p_.v_head_dim);
    for (int r = 0; r < rows_; ++r) {
      const int64_t row = first_row_ + r;
      const int64_t at =
          strides.Row(rules_.batch_index, rules_.q_head, rules_.sequence.q_begin + row);
      uint8_t* out = static_cast<uint8_t*>(call_.o) + at * ElementBytes(p_.element);
      float& lse = call_.lse[p_.LseIndex(rules_.batch_index, rules_.q_head, rules_.sequence, row)];
      float* o = o_ + r * v_stride_;
      if (visible_[r] == 0) {
        lse = -std::numeric_limits<float>::infinity();
        StoreRow(p_.element, o, 0.0f, count, out);
        continue;
      }
      const float rescale = AddToDenominator(r);
      lse = sum_[r] == 0 ? std::numeric_limits<float>::quiet_NaN()
                         : static_cast<float>((std::log2(double{sum_[r]}) + max_[r]) * kLn2);
      StoreRow(p_.element, o, rescale * kept / sum_[r], count, out);
    }
  }

  // Adds the sink or the keys counted as logit 0 to l; returns what O must be multiplied by for it.
  float AddToDenominator(int r) {
    float logit = 0, count = 0;
    if (p_.denominator == DenominatorKind::kSink) {
      logit = p_.sink_logits[rules_.q_head] * kLog2E;
      count = 1;
    } else if (p_.denominator == DenominatorKind::kZeroRest) {
      count = static_cast<float>(rules_.sequence.kv_len - visible_[r]);
    }
    if (count == 0) return 1.0f;
    const float max = HWY_MAX(max_[r], logit);
    const float rescale = Exp2One(max_[r] - max);
    sum_[r] = sum_[r] * rescale + count * Exp2One(logit - max);
    max_[r] = max;
    return rescale;
  }

  const ForwardCall& call_;
  const Problem& p_;
  const HeadRules rules_;
  const float factor_;  // of scores, to units of log2
  const ForwardWorkspace work_;
  const int64_t first_row_;
  const int dim_;
  const int64_t v_stride_;
  int rows_;
  bool few_;         // K is not packed
  float* q_copy_;    // [rows][PaddedDim(dim)], unless Q is float32
  FloatRows q_;      // the copy, or Q itself
  float* q_panels_;  // Qᵀ, k_copy_ [keys][PaddedDim(dim)] and s_transposed_ [keys][kFewQueries]:
  float* k_copy_;    // for few queries
  float* s_transposed_;
  float* s_;       // [rows][kMaxKeyRows]
  float* o_;       // [rows][v_stride]
  uint8_t* keep_;  // [rows][kMaxKeyRows]
  ScoreTile tile_;
  float max_[kMaxQueryRows], sum_[kMaxQueryRows];
  int64_t visible_[kMaxQueryRows];
};

void ForwardItemImpl(const ForwardCall& call, int64_t b, int64_t h, int64_t tile, float* scratch) {
  ForwardPass(call, b, h, tile, scratch).Run();
}

// Multiplies for some milliseconds: the rate that a thread reaches in the products of a tile.
double MeasureFlopsPerSecondImpl(float* scratch) {
  constexpr int kRows = 96, kColumns = 256, kDepth = 64, kRepeats = 3;
  std::fill_n(scratch, kScratchFloats, 0.5f);
  const Product product = {.a = scratch,
                           .a_row = kDepth,
                           .a_k = 1,
                           .b = scratch + kRows * kDepth,
                           .b_k = kPanelColumns,
                           .b_panel = kDepth * kPanelColumns,
                           .c = scratch + kRows * kDepth + kColumns * kDepth,
                           .c_row = kColumns,
                           .rows = kRows,
                           .columns = kColumns,
                           .depth = kDepth,
                           .accumulate = false};
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    for (int n = 0; n < 16; ++n) Multiply(product);
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    best = HWY_MAX(best, 16 * 2.0 * kRows * kColumns * kDepth / HWY_MAX(spent.count(), 1e-9));
  }
  return best;
}

const char* TargetNameImpl() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {

HWY_EXPORT(PackKeysImpl);
HWY_EXPORT(ForwardItemImpl);
HWY_EXPORT(TargetNameImpl);
HWY_EXPORT(MeasureFlopsPerSecondImpl);

void PackKeys(const ForwardCall& call, int64_t batch_index, int64_t kv_head, int64_t tile,
              float* scratch) {
  HWY_DYNAMIC_DISPATCH(PackKeysImpl)(call, batch_index, kv_head, tile, scratch);
}

void ForwardItem(const ForwardCall& call, int64_t batch_index, int64_t q_head, int64_t tile,
                 float* scratch) {
  HWY_DYNAMIC_DISPATCH(ForwardItemImpl)(call, batch_index, q_head, tile, scratch);
}

std::string CpuTargetName() { return HWY_DYNAMIC_DISPATCH(TargetNameImpl)(); }

int64_t CompiledCpuTargets() { return HWY_TARGETS; }

double MeasureFlopsPerSecond(float* scratch) {
  return HWY_DYNAMIC_DISPATCH(MeasureFlopsPerSecondImpl)(scratch);
}

}  // namespace attnd
#endif
