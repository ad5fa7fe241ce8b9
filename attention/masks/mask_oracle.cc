#include "attention/masks/mask_oracle.h"

#include <algorithm>
#include <utility>

#include "base/floor.h"

namespace attnd {
namespace {

bool Lies(int64_t at, const Global& global) {
  for (size_t n = 0; n < global.start.size(); ++n) {
    if (global.start[n] <= at && at < global.end[n]) return true;
  }
  return false;
}

// One for all, or one for each batch entry.
template <class T>
T AtBatch(const std::vector<T>& values, int64_t batch) {
  return values.size() == 1 ? values[0] : values[static_cast<size_t>(batch)];
}

bool BitAt(const std::vector<uint8_t>& bytes, int64_t bit) {
  return bytes[static_cast<size_t>(bit / 8)] >> (bit % 8) & 1;
}

// Word `n` of the stream of words of Philox4x32-10, (counter 0 = n / 4).
uint32_t RandomWord(uint32_t n, uint32_t row_block, uint32_t head, uint64_t seed) {
  uint64_t x[4] = {n / 4, row_block, head, 0x6D61736B};
  uint64_t k0 = seed & 0xffffffff, k1 = seed >> 32;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = x[0] * 0xD2511F53, p1 = x[2] * 0xCD9E8D57;
    const uint64_t y0 = (p1 >> 32) ^ x[1] ^ k0, y2 = (p0 >> 32) ^ x[3] ^ k1;
    x[0] = y0, x[1] = p1 & 0xffffffff, x[2] = y2, x[3] = p0 & 0xffffffff;
    k0 = (k0 + 0x9E3779B9) & 0xffffffff;
    k1 = (k1 + 0xBB67AE85) & 0xffffffff;
  }
  return static_cast<uint32_t>(x[n % 4]);
}

bool SeesRectangle(const MaskRectangle& r, int64_t row, int64_t key) {
  if (row < r.row_begin || row >= r.row_end || key < r.key_begin || key >= r.key_end) return false;
  const bool causal = int64_t{r.key_end} - key - 1 >= int64_t{r.row_end} - row - 1;
  const bool inverse = key - r.key_begin >= row - r.row_begin;
  switch (r.shape) {
    case RectangleShape::kFull:
      return true;
    case RectangleShape::kCausal:
      return causal;
    case RectangleShape::kInverseCausal:
      return inverse;
    case RectangleShape::kBand:
      return causal && inverse;
  }
  return false;
}

bool SeesRun(const RowRuns& runs, int64_t row, int64_t key) {
  for (int64_t n = row * runs.r; n < (row + 1) * runs.r; ++n) {
    for (int64_t k = 0; k < runs.count[static_cast<size_t>(n)]; ++k) {
      if (runs.first[static_cast<size_t>(n)] + runs.stride[static_cast<size_t>(n)] * k == key) {
        return true;
      }
    }
  }
  return false;
}

bool SeesInterval(const RowIntervals& intervals, int64_t row, int64_t key) {
  for (int64_t n = row * intervals.r; n < (row + 1) * intervals.r; ++n) {
    const size_t at = static_cast<size_t>(n);
    if (intervals.begin[at] <= key && key < intervals.end[at]) return true;
  }
  return false;
}

bool HiddenInColumn(const ColRuns& runs, int64_t row, int64_t key) {
  for (int64_t n = key * runs.m; n < (key + 1) * runs.m; ++n) {
    const size_t at = static_cast<size_t>(n);
    if (runs.start[at] <= row && row < runs.end[at]) return true;
  }
  return false;
}

bool SameSegment(const Segment& segment, int64_t query, int64_t key) {
  for (size_t n = 0; n + 1 < segment.cu.size(); ++n) {
    const bool has_query = segment.cu[n] <= query && query < segment.cu[n + 1];
    const bool has_key = segment.cu[n] <= key && key < segment.cu[n + 1];
    if (has_query && has_key) return true;
  }
  return false;
}

}  // namespace

MaskOracle::MaskOracle(const MaskSpec& spec, const MaskCall& call)
    : spec_(spec), call_(call), extents_(spec.extents) {
  if (extents_.batch == 0) extents_.batch = call.batch;
  if (extents_.q_heads == 0) extents_.q_heads = call.q_heads;
  if (extents_.rows == 0) extents_.rows = call.rows;
  if (extents_.keys == 0) extents_.keys = call.keys;
}

bool MaskOracle::IsVisible(int64_t b, int64_t h, int64_t i, int64_t j) const {
  const MaskOrigin& o = spec_.origin;
  const Place at = {
      b + o.batch_begin, h + o.head_begin, i + call_.OffsetAt(b) + o.key_begin,
      i + o.row_begin,   j + o.key_begin,  call_.OffsetAt(b) + o.key_begin - o.row_begin};
  const std::vector<uint32_t>& of = spec_.pattern_of;
  int64_t entry = 0;
  if (of.size() > 1) entry = at.head;
  if (static_cast<int64_t>(of.size()) > extents_.q_heads) {
    entry = at.batch * extents_.q_heads + at.head;
  }
  return Sees(spec_.pattern[of[static_cast<size_t>(entry)]], at);
}

bool MaskOracle::Sees(const MaskPattern& pattern, const Place& at) const {
  if (auto* expr = std::get_if<MaskExpr>(&pattern)) return Holds(*expr, at);
  if (auto* blocks = std::get_if<BlockList>(&pattern)) return SeesBlock(*blocks, at);
  if (auto* runs = std::get_if<ColRuns>(&pattern)) {
    return (!runs->base || Holds(*runs->base, at)) && !HiddenInColumn(*runs, at.row, at.key);
  }
  if (auto* runs = std::get_if<RowRuns>(&pattern)) return SeesRun(*runs, at.row, at.key);
  if (auto* some = std::get_if<RowIntervals>(&pattern)) return SeesInterval(*some, at.row, at.key);
  if (auto* rectangles = std::get_if<Rectangles>(&pattern)) {
    return std::any_of(rectangles->of.begin(), rectangles->of.end(),
                       [&](const MaskRectangle& r) { return SeesRectangle(r, at.row, at.key); });
  }
  if (auto* bits = std::get_if<MaskBitmap>(&pattern)) {
    return BitAt(bits->data, at.row * bits->row_pitch_bits + at.key);
  }
  return false;
}

bool MaskOracle::SeesBlock(const BlockList& list, const Place& at) const {
  const int64_t block_row = at.row / list.bq, block_key = at.key / list.bk;
  const int64_t r = at.row % list.bq, c = at.key % list.bk;
  for (uint32_t n = list.indptr[static_cast<size_t>(block_row)];
       n < list.indptr[static_cast<size_t>(block_row + 1)]; ++n) {
    if (list.indices[n] != block_key) continue;
    if (list.kind.empty() || list.kind[n] == 0) return true;
    if (list.partial_expr) return Holds(*list.partial_expr, at);
    const int64_t partial = std::count(list.kind.begin(), list.kind.begin() + n, 1);
    const int64_t bitmap =
        list.bitmap_of.empty() ? partial : list.bitmap_of[static_cast<size_t>(partial)];
    const int64_t bytes = (int64_t{list.bq} * list.bk + 7) / 8;
    int64_t bit = r * list.bk + c;
    if (list.order == BitOrder::kTile8ColumnMajor) {
      bit = (c / 8 * (list.bq / 8) + r / 8) * 64 + r % 8 * 8 + c % 8;
    }
    return BitAt(list.bitmaps, bitmap * bytes * 8 + bit);
  }
  return false;
}

bool MaskOracle::Holds(const MaskExpr& expr, const Place& at) const {
  const int64_t ahead = at.key - at.query;  // J − Q
  const auto holds = [&](const MaskExpr& e) { return Holds(e, at); };
  if (std::get_if<AllKeys>(&expr.op)) return true;
  if (auto* e = std::get_if<RelativeWindow>(&expr.op)) {
    return (e->left == -1 || ahead >= -int64_t{e->left}) &&
           (e->right == -1 || ahead <= int64_t{e->right});
  }
  if (auto* e = std::get_if<Dilated>(&expr.op)) {
    return FloorModulo(-ahead, e->step) == 0 &&
           (e->left == -1 || ahead >= -int64_t{e->left} * e->step) &&
           (e->right == -1 || ahead <= int64_t{e->right} * e->step);
  }
  if (auto* e = std::get_if<StrideRel>(&expr.op)) return FloorModulo(-ahead, e->p) == e->phase;
  if (auto* e = std::get_if<StrideCol>(&expr.op)) {
    return e->lo <= at.key % e->p && at.key % e->p < e->hi;
  }
  if (auto* e = std::get_if<BlockWindow>(&expr.op)) {
    const int64_t shift = e->shift.empty() ? 0 : AtBatch(e->shift, at.batch);
    const int64_t blocks = FloorDivide(at.key + shift, e->p) - FloorDivide(at.query + shift, e->p);
    return e->lo <= blocks && blocks <= e->hi;
  }
  if (auto* e = std::get_if<Global>(&expr.op)) {
    return (e->direction != GlobalDirection::kColumns && Lies(at.query, *e)) ||
           (e->direction != GlobalDirection::kRows && Lies(at.key, *e));
  }
  if (auto* e = std::get_if<Prefix>(&expr.op)) return at.key < AtBatch(e->len, at.batch);
  if (auto* e = std::get_if<Segment>(&expr.op)) return SameSegment(*e, at.query, at.key);
  if (auto* e = std::get_if<Groups>(&expr.op)) {
    const int64_t entry = e->per_batch ? at.batch : 0;
    const uint32_t row = e->row[static_cast<size_t>(entry * extents_.rows + at.row)];
    return row != 0 && row == e->key[static_cast<size_t>(entry * extents_.keys + at.key)];
  }
  if (auto* e = std::get_if<RandomBlocks>(&expr.op)) return SeesRandom(expr, *e, at);
  if (std::get_if<AllOf>(&expr.op)) return std::all_of(expr.of.begin(), expr.of.end(), holds);
  if (std::get_if<AnyOf>(&expr.op)) return std::any_of(expr.of.begin(), expr.of.end(), holds);
  if (std::get_if<Negate>(&expr.op)) return !Holds(expr.of[0], at);
  if (auto* e = std::get_if<PatternRef>(&expr.op)) return Sees(spec_.pattern[e->pattern], at);
  return false;
}

bool MaskOracle::SeesRandom(const MaskExpr& expr, const RandomBlocks& random,
                            const Place& at) const {
  const int64_t row_block = FloorDivide(at.query, random.block);
  const auto [found, is_new] =
      drawn_.try_emplace(std::make_tuple(&expr, at.batch, at.head, row_block));
  if (is_new) found->second = Draw(expr, random, at);
  const std::vector<int64_t>& blocks = found->second;
  return std::find(blocks.begin(), blocks.end(), at.key / random.block) != blocks.end();
}

std::vector<int64_t> MaskOracle::Draw(const MaskExpr& expr, const RandomBlocks& random,
                                      const Place& at) const {
  const int64_t row_block = FloorDivide(at.query, random.block);
  const int64_t key_blocks = (extents_.keys + random.block - 1) / random.block;
  std::vector<int64_t> candidates;
  for (int64_t c = 0; c < key_blocks; ++c) {
    if (expr.of.empty() || !ExcludesAll(expr.of[0], random.block, c, at)) candidates.push_back(c);
  }
  const int64_t m = static_cast<int64_t>(candidates.size());
  const int64_t count = std::min<int64_t>(random.per_row, m);
  for (int64_t n = 0; n < count; ++n) {
    const uint64_t word =
        RandomWord(static_cast<uint32_t>(n), static_cast<uint32_t>(row_block),
                   random.per_head ? static_cast<uint32_t>(at.head) : 0, random.seed);
    const int64_t x = n + static_cast<int64_t>(word * static_cast<uint64_t>(m - n) >> 32);
    std::swap(candidates[static_cast<size_t>(n)], candidates[static_cast<size_t>(x)]);
  }
  candidates.resize(static_cast<size_t>(count));
  return candidates;
}

bool MaskOracle::ExcludesAll(const MaskExpr& excluded, int64_t block, int64_t key_block,
                             const Place& at) const {
  const int64_t row_block = FloorDivide(at.query, block);
  Place one = at;
  const int64_t first = std::max(row_block * block, at.row_to_query);
  const int64_t end = std::min((row_block + 1) * block, extents_.rows + at.row_to_query);
  for (int64_t q = first; q < end; ++q) {
    one.query = q;
    one.row = q - at.row_to_query;
    for (int64_t j = key_block * block; j < std::min((key_block + 1) * block, extents_.keys); ++j) {
      one.key = j;
      if (!Holds(excluded, one)) return false;
    }
  }
  return true;
}

}  // namespace attnd
