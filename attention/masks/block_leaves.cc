// Blocks, listed or drawn: rows of blocks with the blocks of keys that each keeps.
#include <algorithm>
#include <utility>

#include "attention/masks/mask_leaf.h"
#include "base/floor.h"

namespace attnd {
namespace {

bool BitAt(const uint8_t* bytes, int64_t bit) { return bytes[bit / 8] >> (bit % 8) & 1; }

constexpr uint32_t kFullBlock = 0xffffffff;

// Blocks by rows of blocks, of mask rows or of query positions.
struct BlockRows {
  bool counts_queries = false;
  int64_t bq = 0, bk = 0;
  int64_t first = 0;  // row of blocks that indptr[0] is of
  std::vector<uint32_t> indptr, indices;
  std::vector<uint32_t> bitmap;      // of each block, or kFullBlock; empty: all full
  const uint8_t* bitmaps = nullptr;  // row-major, of whole bytes each
};

class BlocksLeaf : public MaskLeaf {
 public:
  explicit BlocksLeaf(BlockRows rows)
      : rows_(std::move(rows)), bitmap_bytes_((rows_.bq * rows_.bk + 7) / 8) {
    if (rows_.bitmap.empty()) return;
    partial_before_.push_back(0);
    for (uint32_t bitmap : rows_.bitmap) {
      partial_before_.push_back(partial_before_.back() + (bitmap == kFullBlock ? 0 : 1));
    }
  }

  Seen Classify(const MaskRect& rect, int64_t& steps) const override {
    const int64_t last = BlockRow(rect, rect.rows - 1);
    Finding finding;
    for (int64_t row = BlockRow(rect, 0); row <= last; ++row) {
      ++steps;
      if (finding.Add(OfRow(row, rect))) break;
    }
    return finding.result();
  }

  int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const override {
    const int64_t row = BlockRow(rect, 0);
    const auto [begin, end] = Listed(row, rect);
    const int64_t row_in_block = Line(rect) - row * rows_.bq;
    for (uint32_t n = begin; n < end; ++n) {
      const int64_t key = rows_.indices[n] * rows_.bk;
      if (IsFull(n)) {
        AppendClipped({key, key + rows_.bk}, rect.key_begin, rect.key_end, runs);
      } else {
        AppendBits(n, row_in_block, rect, runs);
      }
    }
    return CountPartial(begin, end) > 0 ? 1 : rows_.bq - row_in_block;
  }

  // Where the first block begins, and which blocks are listed.
  bool AppendShape(const MaskRect& rect, std::vector<int64_t>& shape) const override {
    constexpr size_t kMostNumbers = 64;
    const int64_t first = BlockRow(rect, 0), last = BlockRow(rect, rect.rows - 1);
    const size_t before = shape.size();
    shape.push_back(Line(rect) - first * rows_.bq);
    shape.push_back(rect.key_begin % rows_.bk);
    for (int64_t row = first; row <= last; ++row) {
      const auto [begin, end] = Listed(row, rect);
      if (shape.size() + size_t{2} * (end - begin) > before + kMostNumbers) return false;
      for (uint32_t n = begin; n < end; ++n) {
        shape.push_back((row - first) << 32 | (rows_.indices[n] - rect.key_begin / rows_.bk));
        shape.push_back(IsFull(n) ? kFullBlock : rows_.bitmap[n]);
      }
    }
    return true;
  }

 private:
  struct Range {
    uint32_t begin, end;
  };

  int64_t Line(const MaskRect& rect) const { return rows_.counts_queries ? rect.query : rect.row; }
  int64_t BlockRow(const MaskRect& rect, int64_t row) const {
    return FloorDivide(Line(rect) + row, rows_.bq);
  }
  bool IsFull(uint32_t n) const { return rows_.bitmap.empty() || rows_.bitmap[n] == kFullBlock; }
  uint32_t CountPartial(uint32_t begin, uint32_t end) const {
    return rows_.bitmap.empty() ? 0 : partial_before_[end] - partial_before_[begin];
  }

  // The blocks of one row that the rectangle's keys touch.
  Range Listed(int64_t row, const MaskRect& rect) const {
    const auto begin = rows_.indices.begin() + rows_.indptr[static_cast<size_t>(row - rows_.first)];
    const auto end =
        rows_.indices.begin() + rows_.indptr[static_cast<size_t>(row - rows_.first + 1)];
    const auto from = std::lower_bound(begin, end, rect.key_begin / rows_.bk);
    const auto to = std::upper_bound(from, end, rect.last_key() / rows_.bk);
    return {static_cast<uint32_t>(from - rows_.indices.begin()),
            static_cast<uint32_t>(to - rows_.indices.begin())};
  }
  Seen OfRow(int64_t row, const MaskRect& rect) const {
    const auto [begin, end] = Listed(row, rect);
    if (begin == end) return Seen::kNone;
    const int64_t columns = rect.last_key() / rows_.bk - rect.key_begin / rows_.bk + 1;
    if (end - begin < columns || CountPartial(begin, end) > 0) return Seen::kMixed;
    return Seen::kAll;
  }
  void AppendBits(uint32_t n, int64_t row_in_block, const MaskRect& rect,
                  std::vector<KeyRun>& runs) const {
    const uint8_t* bits = rows_.bitmaps + rows_.bitmap[n] * bitmap_bytes_;
    const int64_t key = rows_.indices[n] * rows_.bk, first_bit = row_in_block * rows_.bk - key;
    const int64_t end = std::min(key + rows_.bk, rect.key_end);
    for (int64_t j = std::max(key, rect.key_begin); j < end; ++j) {
      if (!BitAt(bits, first_bit + j)) continue;
      const int64_t begin = j;
      while (j < end && BitAt(bits, first_bit + j)) ++j;
      runs.push_back({begin, j});
    }
  }

  const BlockRows rows_;
  const int64_t bitmap_bytes_;
  std::vector<uint32_t> partial_before_;
};

// Full blocks alone, a bit each: at N = 131072 a search in the rows of a list of 210,000 blocks
// takes three times as long.
class BlockBitsLeaf : public MaskLeaf {
 public:
  static constexpr int64_t kMostBits = int64_t{1} << 24;
  static int64_t BitsOf(const BlockRows& rows) {
    const int64_t columns =
        rows.indices.empty() ? 1 : 1 + *std::max_element(rows.indices.begin(), rows.indices.end());
    return static_cast<int64_t>(rows.indptr.size() - 1) * ((columns + 63) / 64 * 64);
  }

  explicit BlockBitsLeaf(const BlockRows& rows)
      : counts_queries_(rows.counts_queries), bq_(rows.bq), bk_(rows.bk), first_(rows.first) {
    const size_t lines = rows.indptr.size() - 1;
    bits_.resize(static_cast<size_t>(BitsOf(rows) / 64));
    words_ = static_cast<int64_t>(bits_.size() / lines);
    for (size_t row = 0; row < lines; ++row) {
      for (uint32_t n = rows.indptr[row]; n < rows.indptr[row + 1]; ++n) {
        bits_[row * static_cast<size_t>(words_) + rows.indices[n] / 64] |= uint64_t{1}
                                                                           << rows.indices[n] % 64;
      }
    }
  }

  Seen Classify(const MaskRect& rect, int64_t& steps) const override {
    const int64_t last = BlockRow(rect, rect.rows - 1);
    const int64_t begin = rect.key_begin / bk_, end = rect.last_key() / bk_ + 1;
    Finding finding;
    for (int64_t row = BlockRow(rect, 0); row <= last; ++row) {
      for (int64_t column = begin; column < end; column += 64) {
        ++steps;
        const int64_t count = std::min<int64_t>(64, end - column);
        const uint64_t bits = Bits(row, column, count), ones = ~uint64_t{0} >> (64 - count);
        const Seen seen = bits == 0 ? Seen::kNone : bits == ones ? Seen::kAll : Seen::kMixed;
        if (finding.Add(seen)) return Seen::kMixed;
      }
    }
    return finding.result();
  }

  int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const override {
    const int64_t row = BlockRow(rect, 0);
    for (int64_t column = rect.key_begin / bk_; column <= rect.last_key() / bk_; ++column) {
      if (Bits(row, column, 1) == 0) continue;
      AppendClipped({column * bk_, (column + 1) * bk_}, rect.key_begin, rect.key_end, runs);
    }
    return (row + 1) * bq_ - Line(rect);
  }

  // Where the first block begins, and which blocks are there.
  bool AppendShape(const MaskRect& rect, std::vector<int64_t>& shape) const override {
    constexpr int64_t kMostRows = 32;
    const int64_t first = BlockRow(rect, 0), last = BlockRow(rect, rect.rows - 1);
    const int64_t column = rect.key_begin / bk_, count = rect.last_key() / bk_ - column + 1;
    if (last - first >= kMostRows || count > 64) return false;
    shape.push_back(Line(rect) - first * bq_);
    shape.push_back(rect.key_begin % bk_);
    for (int64_t row = first; row <= last; ++row) {
      shape.push_back(static_cast<int64_t>(Bits(row, column, count)));
    }
    return true;
  }

 private:
  int64_t Line(const MaskRect& rect) const { return counts_queries_ ? rect.query : rect.row; }
  int64_t BlockRow(const MaskRect& rect, int64_t row) const {
    return FloorDivide(Line(rect) + row, bq_);
  }
  // `count` ≤ 64 bits from `column` on; 0 beyond the last one.
  uint64_t Bits(int64_t row, int64_t column, int64_t count) const {
    const uint64_t* line = bits_.data() + (row - first_) * words_;
    const int64_t word = column / 64, shift = column % 64;
    uint64_t bits = word < words_ ? line[word] >> shift : 0;
    if (shift + count > 64 && word + 1 < words_) bits |= line[word + 1] << (64 - shift);
    return bits & ~uint64_t{0} >> (64 - count);
  }

  const bool counts_queries_;
  const int64_t bq_, bk_, first_;
  int64_t words_;  // of a row of blocks
  std::vector<uint64_t> bits_;
};

std::unique_ptr<MaskLeaf> MakeLeaf(BlockRows rows) {
  if (rows.bitmap.empty() && BlockBitsLeaf::BitsOf(rows) <= BlockBitsLeaf::kMostBits) {
    return std::make_unique<BlockBitsLeaf>(rows);
  }
  return std::make_unique<BlocksLeaf>(std::move(rows));
}

}  // namespace

std::unique_ptr<MaskLeaf> MakeBlocksLeaf(const BlockList& list, BlocksWanted wanted) {
  BlockRows rows = {.bq = list.bq, .bk = list.bk, .indptr = {0}, .bitmaps = list.bitmaps.data()};
  const bool has_bitmaps = wanted == BlocksWanted::kBoth && !list.kind.empty();
  size_t partial = 0;
  for (size_t row = 0; row + 1 < list.indptr.size(); ++row) {
    for (size_t n = list.indptr[row]; n < list.indptr[row + 1]; ++n) {
      const bool is_full = list.kind.empty() || list.kind[n] == 0;
      if (has_bitmaps) rows.bitmap.push_back(is_full ? kFullBlock : list.bitmap_of[partial++]);
      if (wanted == BlocksWanted::kBoth || is_full == (wanted == BlocksWanted::kFull)) {
        rows.indices.push_back(list.indices[n]);
      }
    }
    rows.indptr.push_back(static_cast<uint32_t>(rows.indices.size()));
  }
  return MakeLeaf(std::move(rows));
}

std::unique_ptr<MaskLeaf> MakeDrawnLeaf(DrawnBlocks blocks) {
  return MakeLeaf({.counts_queries = true,
                   .bq = blocks.block,
                   .bk = blocks.block,
                   .first = blocks.first,
                   .indptr = std::move(blocks.indptr),
                   .indices = std::move(blocks.indices)});
}

}  // namespace attnd
