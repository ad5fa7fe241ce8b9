// The score rules on one tile of S, row by row: scale, softcap, bias, ALiBi, visibility. A row
// leaves with kHidden where a key is not visible.
//
//     S → softcap·tanh(scale·S / softcap) + bias − slope·|i + offset − j|
//
// Plain problems (no softcap, bias, ALiBi or bool mask, scale above 0) leave S raw: the scale joins
// the exponential. Included once per Highway target; kernels/cpu only.
#if defined(ATTND_KERNELS_CPU_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_CPU_SCORES_INL_H_
#undef ATTND_KERNELS_CPU_SCORES_INL_H_
#else
#define ATTND_KERNELS_CPU_SCORES_INL_H_
#endif

#include <hwy/highway.h>
//
#include <hwy/contrib/math/math-inl.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "attention/dropout.h"
#include "attention/mask_plans.h"
#include "attention/tensor_view.h"
#include "kernels/cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr float kLog2E = 1.44269504088896340736f;
// Stands for "not visible" among scores. Not −infinity: a visible key may have that score, and its
// NaN and infinities must still surface.
constexpr float kHidden = -std::numeric_limits<float>::max();
// A bias of the type's lowest number, as masks are often written, becomes the next one: not
// kHidden.
constexpr float kLowestBias = -0x1.fffffcp127f;

// What all tiles of one (batch entry, query head) share.
struct HeadRules {
  const Problem& problem;
  int64_t batch_index, q_head;
  Sequence sequence;
  const uint8_t* mask_bits;
  const void* bias;
  float scale, slope;
  bool plain;
  const MaskPlan* plan;  // null: none
  DropoutStream dropout;

  template <class Call>
  HeadRules(const Call& call, int64_t b, int64_t h)
      : problem(*call.problem),
        batch_index(b),
        q_head(h),
        sequence(problem.SequenceAt(b)),
        mask_bits(call.mask_bits),
        bias(call.bias),
        scale(problem.ResolvedScale()),
        slope(problem.AlibiSlope(b, h)),
        plain(scale > 0 && problem.softcap == 0 && !problem.bias && !problem.bool_mask &&
              slope == 0),
        plan(call.compiled_mask == nullptr ? nullptr : &call.compiled_mask->PlanAt(b, h)),
        dropout(MakeDropoutStream(problem.dropout.seed, problem.dropout.offset,
                                  problem.DropoutHeadIndex(b, h))) {}

  // What a score must still be multiplied by after PrepareRow.
  float factor() const { return plain ? scale : 1.0f; }
};

// One tile: `rows` queries from `first_row`, `columns` keys from `first_column`.
struct ScoreTile {
  int64_t first_row, first_column;
  int rows, columns;
  bool full;                  // every row sees every column
  Span spans[kMaxQueryRows];  // unless full: what the diagonal leaves of each row
  // Whether a mask by description hides keys inside rows' spans; then their bits, 64 keys a word.
  bool masked;
  bool gaps[kMaxQueryRows];
  uint64_t bits[kMaxQueryRows][kMaxKeyRows / kHostMaskTile.keys];
  // Unless full: per kTileRows rows, the columns of any of them; per kTileRows columns, the rows.
  Span columns_of_rows[kMaxQueryRows / kTileRows + 1];
  Span rows_of_columns[kMaxKeyRows / kTileRows + 1];

  Span row(int r) const { return full ? Span{0, columns} : spans[r]; }
  bool has_gaps(int r) const { return masked && gaps[r]; }

  // The columns that any of up to `count` rows from `first` sees.
  Span columns_of(int first, int count) const;
};

inline Span Cut(const KeyRange& range, int64_t first, int count) {
  int64_t begin = HWY_MAX(range.begin - first, int64_t{0});
  int64_t end = HWY_MIN(range.end - first, int64_t{count});
  return begin < end ? Span{static_cast<int>(begin), static_cast<int>(end)} : Span{};
}

inline Span Union(const Span& a, const Span& b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {HWY_MIN(a.begin, b.begin), HWY_MAX(a.end, b.end)};
}

inline Span ScoreTile::columns_of(int first, int count) const {
  if (full) return {0, columns};
  Span all;
  for (int r = first; r < HWY_MIN(first + count, rows); ++r) all = Union(all, spans[r]);
  return all;
}

inline void SummariseSpans(ScoreTile& tile) {
  int column_groups = (tile.columns + kTileRows - 1) / kTileRows;
  for (int g = 0; g < column_groups; ++g) tile.rows_of_columns[g] = Span{};
  for (int r = 0; r < tile.rows; ++r) {
    Span& group = tile.columns_of_rows[r / kTileRows];
    group = r % kTileRows == 0 ? tile.spans[r] : Union(group, tile.spans[r]);
    if (tile.spans[r].empty()) continue;
    for (int g = tile.spans[r].begin / kTileRows; g * kTileRows < tile.spans[r].end; ++g) {
      tile.rows_of_columns[g] = Union(tile.rows_of_columns[g], {r, r + 1});
    }
  }
}

// The bits of 64 keys from `first` that a span leaves.
inline uint64_t WordOf(const Span& span, int first) {
  const int begin = HWY_MAX(span.begin - first, 0), end = HWY_MIN(span.end - first, 64);
  if (begin >= end) return 0;
  return (~uint64_t{0} >> (64 - (end - begin))) << begin;
}

enum class MaskTileKind { kNothing, kEverything, kSome };

// Fills tile.bits with what the mask shows, unless that is nothing or everything.
inline MaskTileKind LoadMask(const MaskPlan& plan, ScoreTile& tile) {
  constexpr int kSide = kHostMaskTile.keys;
  const int panels = (tile.columns + kSide - 1) / kSide;
  const uint32_t first = static_cast<uint32_t>(tile.first_column / kSide);
  bool any = false, all = true;
  for (int row = 0; row < tile.rows; row += kHostMaskTile.rows) {
    const auto line = plan.by_rows.Line((tile.first_row + row) / kHostMaskTile.rows);
    auto at = std::lower_bound(line.begin(), line.end(), first,
                               [](const MaskTile& m, uint32_t key) { return m.tile < key; });
    const int rows = HWY_MIN(tile.rows - row, kHostMaskTile.rows);
    for (int panel = 0; panel < panels; ++panel) {
      const bool listed = at != line.end() && at->tile == first + panel;
      any = any || listed;
      all = all && listed && at->is_full();
      const uint32_t* words = listed && !at->is_full() ? plan.Bitmap(at->bitmap).data() : nullptr;
      for (int r = 0; r < rows; ++r) {
        tile.bits[row + r][panel] = words != nullptr
                                        ? words[2 * r] | uint64_t{words[2 * r + 1]} << 32
                                        : (listed ? ~uint64_t{0} : 0);
      }
      if (listed) ++at;
    }
  }
  return !any ? MaskTileKind::kNothing : all ? MaskTileKind::kEverything : MaskTileKind::kSome;
}

// Narrows the span of row `r` to what its bits show, and cuts the bits to the span.
inline void NarrowToMask(ScoreTile& tile, int r) {
  constexpr int kWords = kMaxKeyRows / kHostMaskTile.keys;
  Span& span = tile.spans[r];
  int count = 0, begin = -1, end = 0;
  for (int n = 0; n < kWords && n * 64 < tile.columns; ++n) {
    uint64_t& word = tile.bits[r][n];
    word &= WordOf(span, n * 64);
    if (word == 0) continue;
    if (begin < 0) begin = n * 64 + std::countr_zero(word);
    end = n * 64 + 64 - std::countl_zero(word);
    count += std::popcount(word);
  }
  span = count == 0 ? Span{} : Span{begin, end};
  tile.gaps[r] = count != end - HWY_MAX(begin, 0);
}

// Fills `tile`, whose place and size are set. False if no row sees any of it.
inline bool FindSpans(const HeadRules& rules, ScoreTile& tile) {
  const Problem& p = rules.problem;
  auto span = [&](int r) {
    return Cut(p.VisibleRange(rules.sequence, tile.first_row + r), tile.first_column, tile.columns);
  };
  // Bounds only move right from row to row: the first row's end and the last row's begin decide.
  bool unbounded = span(0).end == tile.columns && span(0).begin == 0 &&
                   span(tile.rows - 1).begin == 0 && span(tile.rows - 1).end == tile.columns;
  // A ragged last vector has keys to hide too.
  tile.full = unbounded && !p.bias && !p.bool_mask && tile.columns % kLanes == 0;
  const MaskTileKind mask =
      rules.plan == nullptr ? MaskTileKind::kEverything : LoadMask(*rules.plan, tile);
  if (mask == MaskTileKind::kNothing) return false;
  tile.masked = mask == MaskTileKind::kSome;
  tile.full = tile.full && !tile.masked;
  if (tile.full) return true;
  bool any = false;
  for (int r = 0; r < tile.rows; ++r) {
    tile.spans[r] = span(r);
    if (tile.masked) NarrowToMask(tile, r);
    any |= !tile.spans[r].empty();
  }
  if (any) SummariseSpans(tile);
  return any;
}

// Whole vectors around a span.
inline Span WholeVectors(const Span& span) {
  if (span.empty()) return Span{};
  return {span.begin / kLanes * kLanes, static_cast<int>(RoundUp(span.end, kLanes))};
}

inline hn::Mask<FloatTag> Inside(const Span& span, int column) {
  const hn::RebindToSigned<FloatTag> di;
  auto at = hn::Iota(di, column);
  auto inside = hn::And(hn::Gt(at, hn::Set(di, span.begin - 1)), hn::Lt(at, hn::Set(di, span.end)));
  return hn::RebindMask(FloatTag(), inside);
}

// kHidden in the lanes of the first and last vector that lie outside the span.
inline void HideEdges(const Span& span, float* s) {
  const FloatTag d;
  Span whole = WholeVectors(span);
  for (int c : {whole.begin, whole.end - kLanes}) {
    if (c >= span.begin && c + kLanes <= span.end) continue;
    hn::StoreU(hn::IfThenElse(Inside(span, c), hn::LoadU(d, s + c), hn::Set(d, kHidden)), d, s + c);
  }
}

// Bias of kLanes keys from `column`, of which `count` exist. Columns of 1 stand for all keys.
inline FloatVector LoadBias(const HeadRules& rules, int64_t row, int64_t column, int64_t count) {
  const Bias& bias = *rules.problem.bias;
  int64_t index = BroadcastIndex(bias.shape, rules.batch_index, rules.q_head, row, column);
  if (bias.shape.columns == 1) {
    return hn::Set(FloatTag(), LoadElement(bias.element, rules.bias, index));
  }
  switch (bias.element) {
    case ElementType::kFloat16:
      return LoadFirst<ElementType::kFloat16>(rules.bias, index, count);
    case ElementType::kBFloat16:
      return LoadFirst<ElementType::kBFloat16>(rules.bias, index, count);
    default:
      return LoadFirst<ElementType::kFloat32>(rules.bias, index, count);
  }
}

// The bool mask's bits of kLanes keys from `column`, a multiple of kLanes, of which `count` exist.
inline hn::Mask<FloatTag> LoadMaskBits(const HeadRules& rules, int64_t row, int64_t column,
                                       int64_t count) {
  const FloatTag d;
  const BoolMask& mask = *rules.problem.bool_mask;
  const BroadcastShape& s = mask.shape;
  int64_t line =
      ((s.batch == 1 ? 0 : rules.batch_index) * s.heads + (s.heads == 1 ? 0 : rules.q_head)) *
          s.rows +
      (s.rows == 1 ? 0 : row);
  const uint8_t* bits = rules.mask_bits + line * mask.row_bytes();
  uint64_t word = 0;
  if (s.columns == 1) {
    word = (bits[0] & 1) ? ~uint64_t{0} : 0;
  } else {
    int64_t bytes = ((column & 7) + HWY_MIN(count, int64_t{kLanes}) + 7) / 8;
    for (int64_t n = 0; n < bytes; ++n) word |= uint64_t{bits[(column >> 3) + n]} << (8 * n);
    word >>= column & 7;
  }
  uint8_t copy[8];
  std::memcpy(copy, &word, sizeof(copy));
  return hn::LoadMaskBits(d, copy);
}

// What the mask shows of kLanes keys from `column`, a multiple of kLanes.
inline hn::Mask<FloatTag> ShownByMask(const ScoreTile& tile, int r, int column) {
  const uint64_t word = tile.bits[r][column / 64] >> (column % 64);
  uint8_t copy[8];
  std::memcpy(copy, &word, sizeof(copy));
  return hn::LoadMaskBits(FloatTag(), copy);
}

// kHidden where the mask shows nothing. Returns how many keys are visible.
inline int HideGaps(const ScoreTile& tile, int r, float* s) {
  const FloatTag d;
  const Span whole = WholeVectors(tile.spans[r]);
  int visible = 0;
  for (int c = whole.begin; c < whole.end; c += kLanes) {
    const auto shown = ShownByMask(tile, r, c);
    visible += static_cast<int>(hn::CountTrue(d, shown));
    hn::StoreU(hn::IfThenElse(shown, hn::LoadU(d, s + c), hn::Set(d, kHidden)), d, s + c);
  }
  return visible;
}

// All rules on one row's scores. Returns how many keys are visible. `slope_factor`, if not null,
// gets 1 − tanh², what softcap multiplies dS by (1 where not visible).
inline int ApplyRules(const HeadRules& rules, const ScoreTile& tile, int r, float* s,
                      float* slope_factor) {
  const FloatTag d;
  const Problem& p = rules.problem;
  const int64_t row = tile.first_row + r;
  const Span span = tile.row(r), whole = WholeVectors(span);
  const FloatVector scale = hn::Set(d, rules.scale), cap = hn::Set(d, p.softcap);
  // Finite for the smallest numbers too: a score of 0 has tanh 0.
  const FloatVector inverse_cap =
      hn::Set(d, p.softcap > 0 ? HWY_MIN(1.0f / p.softcap, -kHidden) : 0.0f);
  int visible = 0;
  for (int c = whole.begin; c < whole.end; c += kLanes) {
    FloatVector x = hn::Mul(scale, hn::LoadU(d, s + c)), tanh = hn::Zero(d);
    auto shown = Inside(span, c);
    const int64_t column = tile.first_column + c, count = span.end - c;
    if (p.softcap > 0) {
      tanh = hn::Tanh(d, hn::Mul(x, inverse_cap));
      x = hn::Mul(cap, tanh);
    }
    if (p.bias) {
      const FloatVector bias = LoadBias(rules, row, column, count);
      const FloatVector lowest = hn::Set(d, kLowestBias);
      x = hn::Add(x, hn::IfThenElse(hn::Lt(bias, lowest), lowest, bias));
      auto masks = hn::Eq(bias, hn::Set(d, -std::numeric_limits<float>::infinity()));
      shown = hn::AndNot(masks, shown);
    }
    if (rules.slope != 0) {
      // |row + offset − column| is at most 2^21, so float holds it exactly.
      FloatVector distance = hn::Sub(
          hn::Set(d, static_cast<float>(row + rules.sequence.offset - column)), hn::Iota(d, 0.0f));
      x = hn::NegMulAdd(hn::Set(d, rules.slope), hn::Abs(distance), x);
    }
    if (tile.has_gaps(r)) shown = hn::And(shown, ShownByMask(tile, r, c));
    if (p.bool_mask) shown = hn::And(shown, LoadMaskBits(rules, row, column, count));
    visible += static_cast<int>(hn::CountTrue(d, shown));
    x = hn::IfThenElse(shown, x, hn::Set(d, kHidden));
    hn::StoreU(x, d, s + c);
    if (slope_factor != nullptr) {
      tanh = hn::IfThenElseZero(shown, tanh);
      hn::StoreU(hn::NegMulAdd(tanh, tanh, hn::Set(d, 1.0f)), d, slope_factor + c);
    }
  }
  return visible;
}

// Brings row `r` of S into the form above: afterwards its whole vectors hold scores, to be
// multiplied by rules.factor(), or kHidden. Returns how many keys are visible.
inline int PrepareRow(const HeadRules& rules, const ScoreTile& tile, int r, float* s,
                      float* slope_factor = nullptr) {
  Span span = tile.row(r);
  if (span.empty()) return 0;
  if (!rules.plain) return ApplyRules(rules, tile, r, s, slope_factor);
  if (tile.has_gaps(r)) return HideGaps(tile, r, s);
  HideEdges(span, s);
  return span.end - span.begin;
}

// The dropout bytes of a tile, [rows][stride], where any row of 16 sees the columns.
inline void FillDropout(const HeadRules& rules, const ScoreTile& tile, uint8_t* bytes,
                        int64_t stride) {
  for (int row = 0; row < tile.rows; row += 16) {
    Span wanted;
    for (int r = row; r < HWY_MIN(row + 16, tile.rows); ++r) wanted = Union(wanted, tile.row(r));
    for (int column = wanted.begin / 32 * 32; column < wanted.end; column += 32) {
      DropoutBlock(rules.dropout, static_cast<uint32_t>((tile.first_row + row) >> 4),
                   static_cast<uint32_t>((tile.first_column + column) >> 5),
                   bytes + row * stride + column, stride);
    }
  }
}

inline void FillHidden(float* row, int begin, int end) {
  for (int c = begin; c < end; ++c) row[c] = kHiddenZero;
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();
#endif
