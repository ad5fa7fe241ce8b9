// The score rules on one tile of S, row by row: scale, softcap, bias, ALiBi, visibility. A row
// leaves with kHidden where a key is not visible.
//
//     S → softcap·tanh(scale·S / softcap) + bias − slope·|i + offset − j|
//
// Plain problems (no softcap, bias or ALiBi, scale above 0) leave S raw: the scale joins the
// exponential. Included once per Highway target; kernels/cpu only.
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
#include "kernels/cpu/cpu_call.h"
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

// All tiles of one (batch entry, query head, residue) share these.
struct HeadRules {
  const Problem& problem;
  int64_t batch_index, q_head;
  RowClass rows;
  const Sequence& sequence;
  const uint8_t* mask_bits;
  const void* bias;
  float scale, slope;
  bool plain;
  const MaskPlan* plan;  // null: none
  DropoutStream dropout;

  template <class Call>
  HeadRules(const CpuCall<Call>& call, int64_t b, int64_t h, int64_t residue)
      : problem(*call.problem),
        batch_index(b),
        q_head(h),
        rows(RowClassOf(call, b, residue)),
        sequence(rows.sequence),
        mask_bits(call.mask_bits),
        bias(call.bias),
        scale(problem.ResolvedScale()),
        slope(problem.AlibiSlope(b, h)),
        plain(scale > 0 && problem.softcap == 0 && !problem.bias && slope == 0),
        plan(call.compiled_mask == nullptr ? nullptr : &call.compiled_mask->PlanAt(b, h)),
        dropout(MakeDropoutStream(problem.dropout.seed, problem.dropout.offset,
                                  problem.DropoutHeadIndex(b, h))) {}
  HeadRules(const HeadRules&) = delete;  // `sequence` is part of `rows`
  HeadRules& operator=(const HeadRules&) = delete;

  // A score must still be multiplied by this after PrepareRow.
  float factor() const { return plain ? scale : 1.0f; }
};

// A mask's bits come in words of this many keys; it is skipped by halves of them, panels.
constexpr int kWordKeys = kHostMaskTile.keys;
constexpr int kWords = kMaxKeyRows / kWordKeys;
constexpr int kPanels = kMaxKeyRows / kSkipKeys;
static_assert(kWordKeys == 64 && kSkipKeys == 32 && kPanels <= 8);

// Spans in order, with gaps between them: at most one of every other panel.
struct Stretches {
  Span at[kPanels / 2];
  int count = 0;
  const Span* begin() const { return at; }
  const Span* end() const { return at + count; }
};

// The parts of `all` that lie in `panels`: bit n stands for the keys from n·kSkipKeys.
inline Stretches Within(uint32_t panels, const Span& all) {
  Stretches parts;
  while (panels != 0) {
    const int first = std::countr_zero(panels), end = first + std::countr_one(panels >> first);
    parts.at[parts.count++] = {HWY_MAX(all.begin, first * kSkipKeys),
                               HWY_MIN(all.end, end * kSkipKeys)};
    panels &= ~uint32_t{0} << end;
  }
  return parts;
}

// One tile: `rows` queries from `first_row`, `columns` keys from `first_column`.
struct ScoreTile {
  int64_t first_row, first_column;
  int rows, columns;
  bool full;                  // every row sees every column
  Span spans[kMaxQueryRows];  // unless full: what the diagonal leaves of each row
  // Whether a mask hides keys inside rows' spans; then of each row which it sees, in which panels
  // it sees any, and whether it sees all of its span.
  bool masked;
  uint64_t bits[kMaxQueryRows][kWords];
  uint8_t panels[kMaxQueryRows];
  bool gaps[kMaxQueryRows];
  uint8_t panels_of_rows[kMaxQueryRows / kTileRows + 1];  // of any of kTileRows rows
  // Unless full: per kTileRows rows, the columns of any of them; per kTileRows columns, the rows,
  // with a mask at least those that see anything of the panel (FindRowsOfColumns).
  Span columns_of_rows[kMaxQueryRows / kTileRows + 1];
  Span rows_of_columns[kMaxKeyRows / kTileRows + 1];

  Span row(int r) const { return full ? Span{0, columns} : spans[r]; }
  bool has_gaps(int r) const { return masked && gaps[r]; }

  uint32_t all_panels;  // with a mask: of any row

  Stretches WholeRow() const { return {{{0, columns}}, 1}; }
  // Products read these of row `r` of P where its kTileRows rows say which columns they want; and
  // these where columns say which rows, of which kTileRows stand on both sides of a panel's end.
  Stretches WantedByRows(int r) const;
  Stretches WantedByColumns() const;

  // The columns that any of up to `count` rows from `first` sees, and the panels.
  Span columns_of(int first, int count) const;
  uint32_t panels_of(int first, int count) const;
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

inline Stretches ScoreTile::WantedByRows(int r) const {
  const Span& seen = columns_of_rows[r / kTileRows];
  return masked ? Within(panels_of_rows[r / kTileRows], seen) : Stretches{{seen}, 1};
}

inline Stretches ScoreTile::WantedByColumns() const {
  if (!masked) return WholeRow();
  static_assert(kTileRows <= kSkipKeys);
  const uint32_t with_neighbours = all_panels | all_panels << 1 | all_panels >> 1;
  return Within(with_neighbours & ((1u << ((columns + kSkipKeys - 1) / kSkipKeys)) - 1),
                {0, columns});
}

inline uint32_t ScoreTile::panels_of(int first, int count) const {
  if (!masked) return (1u << kPanels) - 1;
  uint32_t all = 0;
  for (int r = first; r < HWY_MIN(first + count, rows); ++r) all |= panels[r];
  return all;
}

// The bits of a word from column `first` that lie in a span.
inline uint64_t WordOf(const Span& span, int first) {
  const int begin = HWY_MAX(span.begin - first, 0), end = HWY_MIN(span.end - first, kWordKeys);
  if (begin >= end) return 0;
  return (~uint64_t{0} >> (kWordKeys - (end - begin))) << begin;
}

inline void SummariseSpans(ScoreTile& tile) {
  for (int r = 0; r < tile.rows; ++r) {
    Span& group = tile.columns_of_rows[r / kTileRows];
    group = r % kTileRows == 0 ? tile.spans[r] : Union(group, tile.spans[r]);
  }
  if (!tile.masked) return;
  tile.all_panels = 0;
  for (int r = 0; r < tile.rows; r += kTileRows) {
    const uint32_t panels = tile.panels_of(r, kTileRows);
    tile.panels_of_rows[r / kTileRows] = static_cast<uint8_t>(panels);
    tile.all_panels |= panels;
  }
}

// Fills tile.rows_of_columns, which backward alone reads. A row with gaps counts by panels: column
// by column it would take as long as a sparse tile's products.
inline void FindRowsOfColumns(ScoreTile& tile) {
  const int column_groups = (tile.columns + kTileRows - 1) / kTileRows;
  Span of_panels[kPanels];
  for (int g = 0; g < column_groups; ++g) tile.rows_of_columns[g] = Span{};
  for (int r = 0; r < tile.rows; ++r) {
    const Span& span = tile.spans[r];
    if (tile.has_gaps(r)) {
      for (uint32_t left = tile.panels[r]; left != 0; left &= left - 1) {
        Span& rows = of_panels[std::countr_zero(left)];
        rows = Union(rows, {r, r + 1});
      }
    } else if (!span.empty()) {
      for (int g = span.begin / kTileRows; g * kTileRows < span.end; ++g) {
        tile.rows_of_columns[g] = Union(tile.rows_of_columns[g], {r, r + 1});
      }
    }
  }
  if (!tile.masked) return;
  for (int g = 0; g < column_groups; ++g) {
    for (int n = g * kTileRows / kSkipKeys; n * kSkipKeys < (g + 1) * kTileRows && n < kPanels;
         ++n) {
      tile.rows_of_columns[g] = Union(tile.rows_of_columns[g], of_panels[n]);
    }
  }
}

enum class MaskTileKind { kNothing, kEverything, kSome };

// Fills tile.bits with what the mask shows, unless that is nothing or everything.
inline MaskTileKind LoadMask(const MaskPlan& plan, ScoreTile& tile) {
  const int words_of_row = (tile.columns + kWordKeys - 1) / kWordKeys;
  const uint32_t first = static_cast<uint32_t>(tile.first_column / kWordKeys);
  bool any = false, all = true;
  for (int row = 0; row < tile.rows; row += kHostMaskTile.rows) {
    const auto line = plan.by_rows.Line((tile.first_row + row) / kHostMaskTile.rows);
    auto at = std::lower_bound(line.begin(), line.end(), first,
                               [](const MaskTile& m, uint32_t key) { return m.tile < key; });
    const int rows = HWY_MIN(tile.rows - row, kHostMaskTile.rows);
    for (int n = 0; n < words_of_row; ++n) {
      const bool listed = at != line.end() && at->tile == first + n;
      any = any || listed;
      all = all && listed && at->is_full();
      const uint32_t* words = listed && !at->is_full() ? plan.Bitmap(at->bitmap).data() : nullptr;
      for (int r = 0; r < rows; ++r) {
        tile.bits[row + r][n] = words != nullptr ? words[2 * r] | uint64_t{words[2 * r + 1]} << 32
                                                 : (listed ? ~uint64_t{0} : 0);
      }
      if (listed) ++at;
    }
  }
  return !any ? MaskTileKind::kNothing : all ? MaskTileKind::kEverything : MaskTileKind::kSome;
}

// The same of a bool mask.
inline MaskTileKind LoadBoolMask(const HeadRules& rules, ScoreTile& tile) {
  const BoolMask& mask = *rules.problem.bool_mask;
  const BroadcastShape& s = mask.shape;
  const int64_t head =
      (s.batch == 1 ? 0 : rules.batch_index) * s.heads + (s.heads == 1 ? 0 : rules.q_head);
  bool any = false, all = true;
  for (int r = 0; r < tile.rows; ++r) {
    const int64_t line = head * s.rows + (s.rows == 1 ? 0 : tile.first_row + r);
    const uint8_t* bits = rules.mask_bits + line * mask.row_bytes();
    for (int column = 0; column < tile.columns; column += kWordKeys) {
      const int count = HWY_MIN(kWordKeys, tile.columns - column);
      const uint64_t everything = WordOf({0, count}, 0);
      uint64_t word = 0;
      if (s.columns == 1) {
        word = (bits[0] & 1) != 0 ? everything : 0;
      } else {
        std::memcpy(&word, bits + (tile.first_column + column) / 8, (count + 7) / 8);
        word &= everything;
      }
      tile.bits[r][column / kWordKeys] = word;
      any = any || word != 0;
      all = all && word == everything;
    }
  }
  return !any ? MaskTileKind::kNothing : all ? MaskTileKind::kEverything : MaskTileKind::kSome;
}

// Narrows the span of row `r` to what its bits show, and cuts the bits to the span.
inline void NarrowToMask(ScoreTile& tile, int r) {
  Span& span = tile.spans[r];
  int count = 0, begin = -1, end = 0;
  tile.panels[r] = 0;
  for (int n = 0; n * kWordKeys < tile.columns; ++n) {
    uint64_t& word = tile.bits[r][n];
    word &= WordOf(span, n * kWordKeys);
    if (word == 0) continue;
    if (begin < 0) begin = n * kWordKeys + std::countr_zero(word);
    end = (n + 1) * kWordKeys - std::countl_zero(word);
    count += std::popcount(word);
    const bool low = static_cast<uint32_t>(word) != 0, high = (word >> kSkipKeys) != 0;
    tile.panels[r] |= static_cast<uint8_t>((low + 2 * high) << (2 * n));
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
  tile.full = unbounded && !p.bias && tile.columns % kLanes == 0;
  const MaskTileKind mask = rules.plan != nullptr ? LoadMask(*rules.plan, tile)
                            : p.bool_mask         ? LoadBoolMask(rules, tile)
                                                  : MaskTileKind::kEverything;
  if (mask == MaskTileKind::kNothing) return false;
  tile.masked = mask == MaskTileKind::kSome;
  tile.full = tile.full && !tile.masked;
  if (tile.full) return true;
  bool any = false;
  for (int r = 0; r < tile.rows; ++r) {
    tile.spans[r] = unbounded ? Span{0, tile.columns} : span(r);
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

// The whole vectors of row `r` that hold visible keys.
inline Stretches StretchesOf(const ScoreTile& tile, int r) {
  const Span whole = WholeVectors(tile.row(r));
  if (tile.has_gaps(r)) return Within(tile.panels[r], whole);
  return {{whole}, 1};
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

// Returns which of kLanes keys from `column`, a multiple of kLanes, the mask shows.
inline hn::Mask<FloatTag> ShownByMask(const ScoreTile& tile, int r, int column) {
  const uint64_t word = tile.bits[r][column / kWordKeys] >> (column % kWordKeys);
  uint8_t copy[8];
  std::memcpy(copy, &word, sizeof(copy));
  return hn::LoadMaskBits(FloatTag(), copy);
}

// kHidden where the mask shows nothing. Returns how many keys are visible.
inline int HideGaps(const ScoreTile& tile, int r, float* s) {
  const FloatTag d;
  int visible = 0;
  for (const Span& part : StretchesOf(tile, r)) {
    for (int c = part.begin; c < part.end; c += kLanes) {
      const auto shown = ShownByMask(tile, r, c);
      visible += static_cast<int>(hn::CountTrue(d, shown));
      hn::StoreU(hn::IfThenElse(shown, hn::LoadU(d, s + c), hn::Set(d, kHidden)), d, s + c);
    }
  }
  return visible;
}

// All rules on `part`, whole vectors, of one row's scores. Returns how many keys are visible.
// `slope_factor`, if not null, gets 1 − tanh², what softcap multiplies dS by (1 where not visible).
inline int ApplyRules(const HeadRules& rules, const ScoreTile& tile, int r, const Span& part,
                      float* s, float* slope_factor) {
  const FloatTag d;
  const Problem& p = rules.problem;
  const int64_t row = tile.first_row + r;
  const Span span = tile.row(r);
  const FloatVector scale = hn::Set(d, rules.scale), cap = hn::Set(d, p.softcap);
  // Finite for the smallest numbers too: a score of 0 has tanh 0.
  const FloatVector inverse_cap =
      hn::Set(d, p.softcap > 0 ? HWY_MIN(1.0f / p.softcap, -kHidden) : 0.0f);
  int visible = 0;
  for (int c = part.begin; c < part.end; c += kLanes) {
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
  if (!rules.plain) {
    int visible = 0;
    for (const Span& part : StretchesOf(tile, r)) {
      visible += ApplyRules(rules, tile, r, part, s, slope_factor);
    }
    return visible;
  }
  if (tile.has_gaps(r)) return HideGaps(tile, r, s);
  HideEdges(span, s);
  return span.end - span.begin;
}

// The dropout bytes of a tile, [rows][stride], where any row of 16 sees the columns.
inline void FillDropout(const HeadRules& rules, const ScoreTile& tile, uint8_t* bytes,
                        int64_t stride) {
  for (int row = 0; row < tile.rows; row += 16) {
    const Span wanted = tile.columns_of(row, 16);
    const uint32_t panels = tile.panels_of(row, 16);
    for (int column = wanted.begin / 32 * 32; column < wanted.end; column += 32) {
      if ((panels >> (column / kSkipKeys) & 1) == 0) continue;
      DropoutBlock(rules.dropout, static_cast<uint32_t>((tile.first_row + row) >> 4),
                   static_cast<uint32_t>((tile.first_column + column) >> 5),
                   bytes + row * stride + column, stride);
    }
  }
}

inline void FillHidden(int begin, int end, float* row) {
  const FloatTag d;
  for (int c = begin; c < end; c += kLanes) hn::StoreU(hn::Set(d, kHiddenZero), d, row + c);
}

// kHiddenZero wherever row `r` of P or dS has not been computed and `read` says that it is read: in
// whole vectors, as it is computed.
inline void FillUnseen(const ScoreTile& tile, int r, const Stretches& read, float* row) {
  const Stretches computed = StretchesOf(tile, r);
  const Span* part = computed.begin();
  for (const Span& some : read) {
    const Span whole = WholeVectors(some);
    int at = whole.begin;
    for (; part != computed.end() && part->begin < whole.end; ++part) {
      FillHidden(at, part->begin, row);
      at = HWY_MAX(at, part->end);
    }
    FillHidden(at, whole.end, row);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();
#endif
