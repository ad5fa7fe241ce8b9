// Forward of the CPU engine: one item is some tiles of queries that share a KV head, in one pass
// over the keys.
//   S = Q·Kᵀ, masked      P = exp(f·(S − m))      O = P·V      lse = f·m + ln l
// (m, l, O) describe the keys seen so far: m is the row maximum, l the sum of P, f what the scores
// must still be multiplied by. The difference comes first, so that equal scores of any size have
// equal P. A new tile rescales l and O by exp(f·(m_old − m_new)). (Dao 2023, FlashAttention-2,
// Algorithm 1)
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
#include <optional>

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

// QueryTile: some rows of one head, and what an item knows of them so far.
struct QueryTile {
  QueryTile(const ForwardCall& call, int64_t b, int64_t head, int64_t tile)
      : rules(call, b, head),
        first_row(tile * kMaxQueryRows),
        rows(static_cast<int>(HWY_MIN(rules.sequence.q_len - first_row, int64_t{kMaxQueryRows}))),
        factor(rules.factor() * kLog2E) {}

  HeadRules rules;
  int64_t first_row;
  int rows;
  float factor;   // of scores, to logarithms to base 2
  FloatRows q;    // Q itself, or its copy
  float* panels;  // Qᵀ, for few queries
  float* o;       // [rows][v_stride]
  float max[kMaxQueryRows], sum[kMaxQueryRows];
  int64_t visible[kMaxQueryRows];
};

// ForwardPass: one item. K and V of a tile of keys are brought into place once and used by all of
// the item's query tiles while they are in the second-level cache.
class ForwardPass {
 public:
  ForwardPass(const ForwardCall& call, const ForwardRange& range, float* scratch)
      : call_(call),
        p_(*call.problem),
        range_(range),
        sequence_(p_.SequenceAt(range.batch_index)),
        few_(HasFewQueries(p_, sequence_.q_len)),
        dim_(static_cast<int>(p_.qk_head_dim)),
        v_dim_(static_cast<int>(p_.v_head_dim)),
        q_stride_(PaddedDim(dim_)),
        v_stride_(PaddedDim(v_dim_)) {
    Layout(scratch);
  }

  void Run() {
    const int64_t tiles_of_head = QueryTiles(sequence_.q_len);
    for (int n = 0; n < range_.count; ++n) {
      const int64_t unit = range_.first + n;
      tiles_[n].emplace(call_, range_.batch_index,
                        range_.kv_head * p_.group_size() + unit / tiles_of_head,
                        unit % tiles_of_head);
      Start(n);
    }
    for (int64_t key = 0; key < sequence_.kv_len; key += kMaxKeyRows) {
      if (call_.stop.stop_requested()) return;
      VisitKeys(key);
    }
    for (int n = 0; n < range_.count; ++n) Finish(*tiles_[n]);
  }

 private:
  void Layout(float* scratch) {
    const float* end = scratch + kScratchFloats;
    auto take = [&](int64_t floats) {
      float* place = scratch;
      scratch += floats;
      return place;
    };
    q_copies_ = take(range_.count * kMaxQueryRows * q_stride_);
    o_ = take(range_.count * kMaxQueryRows * v_stride_);
    s_ = take(kMaxQueryRows * kMaxKeyRows);
    keep_ = reinterpret_cast<uint8_t*>(take(kMaxQueryRows * kMaxKeyRows / 4));
    k_ = take(kMaxKeyRows * q_stride_);
    v_copy_ = take(kMaxKeyRows * v_stride_);
    s_transposed_ = take(kMaxKeyRows * kFewQueries);
    CHECK(scratch <= end);
  }

  void Start(int n) {
    QueryTile& tile = *tiles_[n];
    const TensorStrides strides = QueryStrides(p_);
    const RowsOf queries = RowsAt(
        p_, call_.q, strides,
        strides.Row(range_.batch_index, tile.rules.q_head, sequence_.q_begin + tile.first_row),
        tile.rows, dim_);
    float* copy = q_copies_ + n * kMaxQueryRows * q_stride_;
    tile.panels = copy;
    tile.q = AsFloats(p_, queries, few_ ? copy + kMaxPanelColumns * q_stride_ : copy);
    if (few_) TransposeToPanels(tile.q.data, tile.q.stride, tile.rows, dim_, tile.panels);
    tile.o = o_ + n * kMaxQueryRows * v_stride_;
    std::memset(tile.o, 0, sizeof(float) * tile.rows * v_stride_);
    std::fill_n(tile.max, tile.rows, kHidden);
    std::fill_n(tile.sum, tile.rows, 0.0f);
    std::fill_n(tile.visible, tile.rows, 0);
  }

  void VisitKeys(int64_t key) {
    bool loaded = false;
    for (int n = 0; n < range_.count; ++n) {
      QueryTile& tile = *tiles_[n];
      scores_.first_row = tile.first_row;
      scores_.rows = tile.rows;
      scores_.first_column = key;
      scores_.columns = static_cast<int>(HWY_MIN(sequence_.kv_len - key, int64_t{kMaxKeyRows}));
      if (!FindSpans(tile.rules, scores_)) continue;
      if (!loaded) LoadKeys();
      loaded = true;
      VisitTile(tile);
    }
  }

  // Brings K into panels, or with few queries into float rows, and V into float rows. Where K is
  // packed and not float32 its rows pass through the space of S.
  void LoadKeys() {
    const int64_t row = sequence_.kv_begin + scores_.first_column;
    const TensorStrides k_strides = KeyStrides(p_), v_strides = ValueStrides(p_);
    const RowsOf keys =
        RowsAt(p_, call_.k, k_strides, k_strides.Row(range_.batch_index, range_.kv_head, row),
               scores_.columns, dim_);
    keys_ = few_ ? AsFloats(p_, keys, k_) : FloatRows{k_, 0};
    if (!few_) PackKeys(keys);
    const RowsOf values =
        RowsAt(p_, call_.v, v_strides, v_strides.Row(range_.batch_index, range_.kv_head, row),
               scores_.columns, v_dim_);
    values_ = static_cast<const float*>(values.data);
    finite_ = Finite::kUnknown;
    if (IsReadInPlace(p_, v_strides, v_dim_)) return;
    values_ = v_copy_;
    finite_ = CopyRows(p_.element, values, v_copy_, v_stride_) ? Finite::kYes : Finite::kNo;
  }

  void PackKeys(const RowsOf& keys) {
    const int64_t row_bytes = keys.stride * ElementBytes(p_.element);
    for (int r = 0; r < keys.rows; r += kMaxPanelColumns) {
      const RowsOf some = {static_cast<const uint8_t*>(keys.data) + r * row_bytes, keys.stride,
                           HWY_MIN(kMaxPanelColumns, keys.rows - r), dim_};
      const FloatRows k = AsFloats(p_, some, s_);
      TransposeToPanels(k.data, k.stride, some.rows, dim_, k_ + int64_t{r} * dim_);
    }
  }

  void VisitTile(QueryTile& tile) {
    few_ ? ScoresOfFew(tile) : Scores(tile);
    const bool full = scores_.full;
    if (p_.dropout.threshold > 0) {
      FillDropout(tile.rules, scores_, keep_, kMaxKeyRows);
      full ? Softmax<false, true>(tile) : Softmax<true, true>(tile);
    } else {
      full ? Softmax<false, false>(tile) : Softmax<true, false>(tile);
    }
    AccumulateValues(tile);
  }

  void Scores(const QueryTile& tile) {
    Multiply({.a = tile.q.data,
              .a_row = tile.q.stride,
              .a_k = 1,
              .b = k_,
              .b_k = kPanelColumns,
              .b_panel = int64_t{dim_} * kPanelColumns,
              .c = s_,
              .c_row = kMaxKeyRows,
              .rows = tile.rows,
              .columns = scores_.columns,
              .depth = dim_,
              .accumulate = false,
              .column_limits = scores_.full ? nullptr : scores_.columns_of_rows,
              .depth_step = kLongDepthStep});
  }

  // Sᵀ = K·Qᵀ, turned around.
  void ScoresOfFew(const QueryTile& tile) {
    Multiply({.a = keys_.data,
              .a_row = keys_.stride,
              .a_k = 1,
              .b = tile.panels,
              .b_k = kPanelColumns,
              .b_panel = int64_t{dim_} * kPanelColumns,
              .c = s_transposed_,
              .c_row = kFewQueries,
              .rows = scores_.columns,
              .columns = tile.rows,
              .depth = dim_,
              .accumulate = false,
              .depth_step = kLongDepthStep});
    for (int r = 0; r < tile.rows; ++r) {
      for (int c = 0; c < scores_.columns; ++c) {
        s_[r * kMaxKeyRows + c] = s_transposed_[c * kFewQueries + r];
      }
    }
  }

  void AccumulateValues(QueryTile& tile) {
    Product product = {.a = s_,
                       .a_row = kMaxKeyRows,
                       .a_k = 1,
                       .b = values_,
                       .b_k = v_stride_,
                       .b_panel = kPanelColumns,
                       .c = tile.o,
                       .c_row = v_stride_,
                       .rows = tile.rows,
                       .columns = v_dim_,
                       .depth = scores_.columns,
                       .accumulate = true,
                       .depth_limits = scores_.full ? nullptr : scores_.columns_of_rows,
                       .depth_step = kLongDepthStep};
    scores_.full || AreValuesFinite() ? Multiply(product) : MultiplyVisible(product);
  }

  // Looked for once a tile of keys, where a query tile sees some of them only.
  bool AreValuesFinite() {
    if (finite_ == Finite::kUnknown) {
      const bool finite = AreFinite({values_, v_stride_, scores_.columns, v_dim_});
      finite_ = finite ? Finite::kYes : Finite::kNo;
    }
    return finite_ == Finite::kYes;
  }

  // Some rows at a time: while one row's maximum is reduced, the exponentials of others can run.
  template <bool kMasked, bool kDropout>
  void Softmax(QueryTile& tile) {
    constexpr int kStep = 8;
    for (int first = 0; first < tile.rows; first += kStep) {
      const int end = HWY_MIN(tile.rows, first + kStep);
      for (int r = first; r < end; ++r) {
        float* s = s_ + r * kMaxKeyRows;
        const bool as_is = !kMasked && tile.rules.plain;
        tile.visible[r] += as_is ? scores_.columns : PrepareRow(tile.rules, scores_, r, s);
        UpdateMaximum(tile, r, s, WholeVectors(scores_.row(r)));
      }
      for (int r = first; r < end; ++r) {
        float* s = s_ + r * kMaxKeyRows;
        const Span whole = WholeVectors(scores_.row(r));
        tile.sum[r] += ExponentialRow<kMasked, kDropout>(tile, r, s, whole);
        if (kMasked) {
          FillHidden(s, 0, whole.begin);
          FillHidden(s, whole.end, scores_.columns);
        }
      }
    }
  }

  void UpdateMaximum(QueryTile& tile, int r, const float* s, const Span& whole) {
    const FloatTag d;
    if (whole.empty()) return;
    FloatVector most = hn::LoadU(d, s + whole.begin);
    for (int c = whole.begin + kLanes; c < whole.end; c += kLanes) {
      most = hn::Max(most, hn::LoadU(d, s + c));
    }
    const float row_max = hn::GetLane(hn::MaxOfLanes(d, most));
    if (!(row_max > tile.max[r])) return;  // a NaN among the scores shows in P
    const float rescale = Exp2One((tile.max[r] - row_max) * tile.factor);
    tile.max[r] = row_max;
    if (tile.sum[r] == 0) return;  // O is still zero
    tile.sum[r] *= rescale;
    float* o = tile.o + r * v_stride_;
    for (int n = 0; n < v_dim_; n += kLanes) {
      hn::StoreU(hn::Mul(hn::Set(d, rescale), hn::LoadU(d, o + n)), d, o + n);
    }
  }

  template <bool kMasked, bool kDropout>
  float ExponentialRow(const QueryTile& tile, int r, float* s, const Span& whole) const {
    const FloatTag d;
    const FloatVector factor = hn::Set(d, tile.factor), max = hn::Set(d, tile.max[r]);
    const uint8_t* keep = keep_ + r * kMaxKeyRows;
    FloatVector sum = hn::Zero(d);
    for (int c = whole.begin; c < whole.end; c += kLanes) {
      FloatVector score = hn::LoadU(d, s + c);
      FloatVector probability = Exp2(hn::Mul(hn::Sub(score, max), factor));
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
  void Finish(QueryTile& tile) const {
    const TensorStrides strides = OutputStrides(p_);
    const float kept = DropoutScale(p_.dropout.threshold);
    const int64_t head = tile.rules.q_head;
    for (int r = 0; r < tile.rows; ++r) {
      const int64_t row = tile.first_row + r;
      const int64_t at = strides.Row(range_.batch_index, head, sequence_.q_begin + row);
      uint8_t* out = static_cast<uint8_t*>(call_.o) + at * ElementBytes(p_.element);
      float& lse = call_.lse[p_.LseIndex(range_.batch_index, head, sequence_, row)];
      const float* o = tile.o + r * v_stride_;
      if (tile.visible[r] == 0) {
        lse = -std::numeric_limits<float>::infinity();
        StoreRow(p_.element, o, 0.0f, v_dim_, out);
        continue;
      }
      double max = double{tile.max[r]} * tile.rules.factor();
      const float rescale = AddToDenominator(tile, r, max);
      const float sum = tile.sum[r];
      lse = sum == 0 ? std::numeric_limits<float>::quiet_NaN()
                     : static_cast<float>(std::log(double{sum}) + max);
      StoreRow(p_.element, o, rescale * kept / sum, v_dim_, out);
    }
  }

  // Adds the sink or the keys counted as logit 0 to l, which stands for exp(max) each, and makes
  // `max` the larger of both; returns what O must be multiplied by for it.
  float AddToDenominator(QueryTile& tile, int r, double& max) const {
    double logit = 0, count = 0;
    if (p_.denominator == DenominatorKind::kSink) {
      logit = p_.sink_logits[tile.rules.q_head];
      count = 1;
    } else if (p_.denominator == DenominatorKind::kZeroRest) {
      count = static_cast<double>(sequence_.kv_len - tile.visible[r]);
    }
    if (count == 0) return 1.0f;
    const double most = HWY_MAX(max, logit), rescale = std::exp(max - most);
    tile.sum[r] = static_cast<float>(tile.sum[r] * rescale + count * std::exp(logit - most));
    max = most;
    return static_cast<float>(rescale);
  }

  enum class Finite : uint8_t { kUnknown, kYes, kNo };

  const ForwardCall& call_;
  const Problem& p_;
  const ForwardRange range_;
  const Sequence sequence_;
  const bool few_;  // K is not packed
  const int dim_, v_dim_;
  const int64_t q_stride_, v_stride_;
  std::optional<QueryTile> tiles_[kMaxTilesPerItem];
  float* q_copies_;      // [tiles][kMaxQueryRows][q_stride]: Q unless it is float32, or panels
  float* o_;             // [tiles][kMaxQueryRows][v_stride]
  float* s_;             // [kMaxQueryRows][kMaxKeyRows]
  uint8_t* keep_;        // [kMaxQueryRows][kMaxKeyRows]
  float* k_;             // K in panels; as rows [keys][q_stride] with few queries
  float* v_copy_;        // [keys][v_stride], unless V is read in place
  float* s_transposed_;  // [keys][kFewQueries], with few queries
  // Of the tile of keys in work:
  FloatRows keys_ = {};            // with few queries
  const float* values_ = nullptr;  // [keys][v_stride]
  Finite finite_ = Finite::kUnknown;
  ScoreTile scores_;
};

void ForwardItemImpl(const ForwardCall& call, const ForwardRange& range, float* scratch) {
  ForwardPass(call, range, scratch).Run();
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

HWY_EXPORT(ForwardItemImpl);
HWY_EXPORT(TargetNameImpl);
HWY_EXPORT(MeasureFlopsPerSecondImpl);

void ForwardItem(const ForwardCall& call, const ForwardRange& range, float* scratch) {
  HWY_DYNAMIC_DISPATCH(ForwardItemImpl)(call, range, scratch);
}

std::string CpuTargetName() { return HWY_DYNAMIC_DISPATCH(TargetNameImpl)(); }

int64_t CompiledCpuTargets() { return HWY_TARGETS; }

double MeasureFlopsPerSecond(float* scratch) {
  return HWY_DYNAMIC_DISPATCH(MeasureFlopsPerSecondImpl)(scratch);
}

}  // namespace attnd
#endif
