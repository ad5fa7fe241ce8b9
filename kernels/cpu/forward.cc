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

#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/forward_products-inl.h"
#include "kernels/cpu/forward_tiles-inl.h"
#include "kernels/cpu/scores-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

// QueryTile: some rows of one head, and what an item knows of them so far.
struct QueryTile {
  QueryTile(const CpuForwardCall& call, int64_t b, int64_t head, int64_t residue, int64_t tile)
      : rules(call, b, head, residue),
        first_row(tile * kMaxQueryRows),
        rows(static_cast<int>(HWY_MIN(rules.sequence.q_len - first_row, int64_t{kMaxQueryRows}))),
        factor(rules.factor() * kLog2E) {}

  HeadRules rules;
  int64_t first_row;
  int rows;
  float factor;  // of scores, to logarithms to base 2
  float* o;      // [rows][v_stride]
  float max[kMaxQueryRows], sum[kMaxQueryRows];
  int64_t visible[kMaxQueryRows];
};

// ForwardPass: one item. K and V of a tile of keys are brought into place once and used by all of
// the item's query tiles while they are in the second-level cache. `Products` is ForwardProducts or
// what has its interface.
template <class Products>
class ForwardPass {
 public:
  ForwardPass(const CpuForwardCall& call, const ForwardRange& range, Products& products,
              ScratchArena& scratch)
      : call_(call),
        p_(*call.problem),
        range_(range),
        rows_(RowClassOf(call, range.batch_index, range.residue)),
        sequence_(rows_.sequence),
        dim_(static_cast<int>(p_.qk_head_dim)),
        v_dim_(static_cast<int>(p_.v_head_dim)),
        v_stride_(PaddedDim(v_dim_)),
        products_(products) {
    o_ = scratch.Floats(range_.count * kMaxQueryRows * v_stride_);
    s_ = scratch.Floats(kStripRows * kMaxKeyRows);
    keep_ = scratch.Bytes(kMaxQueryRows * kMaxKeyRows);
  }

  void Run() {
    const int64_t tiles_of_head = QueryTiles(sequence_.q_len);
    for (int n = 0; n < range_.count; ++n) {
      const int64_t unit = range_.first + n;
      tiles_[n].emplace(call_, range_.batch_index,
                        range_.kv_head * p_.group_size() + unit / tiles_of_head, range_.residue,
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
  static constexpr int kStripRows = Products::kStripRows;

  void Start(int n) {
    QueryTile& tile = *tiles_[n];
    const TensorStrides strides = QueryStrides(p_);
    const int64_t row =
        strides.Row(range_.batch_index, tile.rules.q_head, rows_.QueryRow(tile.first_row));
    products_.LoadQueries(n, RowsAt(p_, call_.q, rows_.Stepping(strides), row, tile.rows, dim_));
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
      VisitTile(n);
    }
  }

  void LoadKeys() {
    const int64_t row = rows_.KeyRow(scores_.first_column);
    auto rows = [&](const void* data, const TensorStrides& strides, int dim) {
      return RowsAt(p_, data, rows_.Stepping(strides),
                    strides.Row(range_.batch_index, range_.kv_head, row), scores_.columns, dim);
    };
    products_.LoadKeys(rows(call_.k, KeyStrides(p_), dim_), rows(call_.v, ValueStrides(p_), v_dim_),
                       s_);
  }

  void VisitTile(int n) {
    QueryTile& tile = *tiles_[n];
    const bool full = scores_.full, dropout = p_.dropout.threshold > 0;
    if (dropout) FillDropout(tile.rules, scores_, keep_, kMaxKeyRows);
    for (int row = 0; row < tile.rows; row += kStripRows) {
      products_.Scores(n, scores_, row, s_);
      const Span rows = {row, HWY_MIN(tile.rows, row + kStripRows)};
      if (dropout) {
        full ? Softmax<false, true>(tile, rows) : Softmax<true, true>(tile, rows);
      } else {
        full ? Softmax<false, false>(tile, rows) : Softmax<true, false>(tile, rows);
      }
      products_.AddValues(scores_, row, s_, tile.o);
    }
  }

  // Row `r` of S, then of P.
  float* ScoreRow(int r) const { return s_ + r % kStripRows * kMaxKeyRows; }

  // Some rows at a time: while one row's maximum is reduced, the exponentials of others can run.
  template <bool kMasked, bool kDropout>
  void Softmax(QueryTile& tile, const Span& rows) {
    constexpr int kStep = 8;
    for (int first = rows.begin; first < rows.end; first += kStep) {
      const int end = HWY_MIN(rows.end, first + kStep);
      for (int r = first; r < end; ++r) {
        float* s = ScoreRow(r);
        const bool as_is = !kMasked && tile.rules.plain;
        tile.visible[r] += as_is ? scores_.columns : PrepareRow(tile.rules, scores_, r, s);
        UpdateMaximum(tile, r, s);
      }
      for (int r = first; r < end; ++r) {
        float* s = ScoreRow(r);
        if (!kMasked || !scores_.row(r).empty()) {
          tile.sum[r] += ExponentialRow<kMasked, kDropout>(tile, r, s);
        }
        if (!kMasked) continue;
        FillUnseen(scores_, r,
                   Products::kReadsWholeRows ? scores_.WholeRow() : scores_.WantedByRows(r), s);
      }
    }
  }

  void UpdateMaximum(QueryTile& tile, int r, const float* s) {
    const FloatTag d;
    if (scores_.row(r).empty()) return;
    const Stretches parts = StretchesOf(scores_, r);
    FloatVector most = hn::LoadU(d, s + parts.at[0].begin);
    for (const Span& part : parts) {
      for (int c = part.begin; c < part.end; c += kLanes) most = hn::Max(most, hn::LoadU(d, s + c));
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
  float ExponentialRow(const QueryTile& tile, int r, float* s) const {
    FloatVector sum = hn::Zero(FloatTag());
    for (const Span& part : StretchesOf(scores_, r)) {
      sum = Exponentials<kMasked, kDropout>(tile, r, s, part, sum);
    }
    return hn::GetLane(hn::SumOfLanes(FloatTag(), sum));
  }

  // Computes the exponentials of whole vectors and adds them to `sum`.
  template <bool kMasked, bool kDropout>
  FloatVector Exponentials(const QueryTile& tile, int r, float* s, const Span& whole,
                           FloatVector sum) const {
    const FloatTag d;
    const FloatVector factor = hn::Set(d, tile.factor), max = hn::Set(d, tile.max[r]);
    const uint8_t* keep = keep_ + r * kMaxKeyRows;
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
    return sum;
  }

  // Normalises and writes O and lse.
  void Finish(QueryTile& tile) const {
    const TensorStrides strides = OutputStrides(p_);
    const float kept = DropoutScale(p_.dropout.threshold);
    const int64_t head = tile.rules.q_head;
    for (int r = 0; r < tile.rows; ++r) {
      const int64_t row = tile.first_row + r;
      const int64_t at = strides.Row(range_.batch_index, head, rows_.QueryRow(row));
      uint8_t* out = static_cast<uint8_t*>(call_.o) + at * ElementBytes(p_.element);
      float& lse = call_.lse[rows_.LseIndex(p_, range_.batch_index, head, row)];
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
      count = static_cast<double>(rows_.all_keys - tile.visible[r]);
    }
    if (count == 0) return 1.0f;
    const double most = HWY_MAX(max, logit), rescale = std::exp(max - most);
    tile.sum[r] = static_cast<float>(tile.sum[r] * rescale + count * std::exp(logit - most));
    max = most;
    return static_cast<float>(rescale);
  }

  const CpuForwardCall& call_;
  const Problem& p_;
  const ForwardRange range_;
  const RowClass rows_;
  const Sequence& sequence_;
  const int dim_, v_dim_;
  const int64_t v_stride_;
  Products& products_;
  std::optional<QueryTile> tiles_[kMaxTilesPerItem];
  float* o_;       // [tiles][kMaxQueryRows][v_stride]
  float* s_;       // [kStripRows][kMaxKeyRows]
  uint8_t* keep_;  // [kMaxQueryRows][kMaxKeyRows]
  ScoreTile scores_;
};

void ForwardItemImpl(const CpuForwardCall& call, const ForwardRange& range, float* scratch) {
  const Problem& p = *call.problem;
  const int64_t q_len = RowClassOf(call, range.batch_index, range.residue).sequence.q_len;
  ScratchArena arena(scratch);
#if HWY_TARGET == HWY_AVX3
  // Classes always: else rows cut off a call could leave few of a class, and have other bits.
  const bool few = !call.residues && HasFewQueries(p, q_len);
  if (const TileUnit* unit = TilesFor(p); unit != nullptr && !few) {
    const TileSession session(*unit);
    TiledForwardProducts products(*unit, p, range.count, arena);
    return ForwardPass(call, range, products, arena).Run();
  }
#endif
  ForwardProducts products(p, q_len, range.count, arena);
  ForwardPass(call, range, products, arena).Run();
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

std::string TargetNameImpl() {
  std::string name = hwy::TargetName(HWY_TARGET);
#if HWY_TARGET == HWY_AVX3
  if (const TileUnit* unit = MatrixTiles(); unit != nullptr) name += std::string("_") + unit->name;
#endif
  return name;
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {

HWY_EXPORT(ForwardItemImpl);
HWY_EXPORT(TargetNameImpl);
HWY_EXPORT(MeasureFlopsPerSecondImpl);

void ForwardItem(const CpuForwardCall& call, const ForwardRange& range, float* scratch) {
  HWY_DYNAMIC_DISPATCH(ForwardItemImpl)(call, range, scratch);
}

std::string CpuTargetName() { return HWY_DYNAMIC_DISPATCH(TargetNameImpl)(); }

int64_t CompiledCpuTargets() { return HWY_TARGETS; }

double MeasureFlopsPerSecond(float* scratch) {
  return HWY_DYNAMIC_DISPATCH(MeasureFlopsPerSecondImpl)(scratch);
}

}  // namespace attnd
#endif
