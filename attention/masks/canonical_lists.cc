#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "attention/masks/canonical_parts.h"

namespace attnd {
namespace {

// [begin, end), or an affine run of keys begin, begin + stride, … below end.
struct TileRun {
  uint64_t begin, end, stride;
  friend auto operator<=>(const TileRun&, const TileRun&) = default;
};

bool ListBit(const std::vector<uint8_t>& bytes, int64_t bit) {
  return bytes[static_cast<size_t>(bit / 8)] >> (bit % 8) & 1;
}
void SetBit(std::string& bytes, int64_t bit) {
  bytes[static_cast<size_t>(bit / 8)] =
      static_cast<char>(bytes[static_cast<size_t>(bit / 8)] | 1 << (bit % 8));
}

// ---- Blocks.

// A block list built block by block: bitmaps are numbered in the order of their first use.
class BlockListBuilder {
 public:
  BlockListBuilder(const BlockList& source, const MaskExtents& extents)
      : source_(source), extents_(extents) {
    list_.bq = source.bq;
    list_.bk = source.bk;
    list_.indptr.push_back(0);
  }

  BlockList Build() {
    size_t partial = 0;
    for (size_t row = 0; row + 1 < source_.indptr.size(); ++row) {
      for (size_t n = source_.indptr[row]; n < source_.indptr[row + 1]; ++n) {
        if (source_.kind.empty() || source_.kind[n] == 0) {
          Add(n, 0);
        } else if (source_.partial_expr) {
          Add(n, 1);
        } else {
          AddPartial(row, n, partial++);
        }
      }
      list_.indptr.push_back(static_cast<uint32_t>(list_.indices.size()));
    }
    const bool has_partial = std::count(list_.kind.begin(), list_.kind.end(), 1) > 0;
    if (!has_partial) list_.kind.clear();
    if (has_partial) list_.partial_expr = source_.partial_expr;
    return std::move(list_);
  }

 private:
  void Add(size_t n, uint8_t kind) {
    list_.indices.push_back(source_.indices[n]);
    list_.kind.push_back(kind);
  }

  void AddPartial(size_t row, size_t n, size_t partial) {
    const int64_t rows =
        std::min(int64_t{source_.bq}, extents_.rows - static_cast<int64_t>(row) * source_.bq);
    const int64_t keys =
        std::min(int64_t{source_.bk}, extents_.keys - int64_t{source_.indices[n]} * source_.bk);
    const auto [bits, visible] = Bits(partial, rows, keys);
    if (visible == 0) return;
    if (visible == rows * keys) return Add(n, 0);
    Add(n, 1);
    const auto [found, is_new] = number_.try_emplace(bits, static_cast<uint32_t>(number_.size()));
    if (is_new) list_.bitmaps.insert(list_.bitmaps.end(), bits.begin(), bits.end());
    list_.bitmap_of.push_back(found->second);
  }

  // Row-major bits of what exists of the block, and how many are 1.
  std::pair<std::string, int64_t> Bits(size_t partial, int64_t rows, int64_t keys) const {
    const int64_t bq = source_.bq, bk = source_.bk, bytes = (bq * bk + 7) / 8;
    const int64_t number =
        source_.bitmap_of.empty() ? static_cast<int64_t>(partial) : source_.bitmap_of[partial];
    std::string bits(static_cast<size_t>(bytes), '\0');
    int64_t visible = 0;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < keys; ++c) {
        const int64_t bit = source_.order == BitOrder::kRowMajorLsb
                                ? r * bk + c
                                : (c / 8 * (bq / 8) + r / 8) * 64 + r % 8 * 8 + c % 8;
        if (!ListBit(source_.bitmaps, number * bytes * 8 + bit)) continue;
        SetBit(bits, r * bk + c);
        ++visible;
      }
    }
    return {std::move(bits), visible};
  }

  const BlockList& source_;
  const MaskExtents& extents_;
  BlockList list_;
  std::unordered_map<std::string, uint32_t> number_;
};

MaskPattern Canonical(const BlockList& source, const MaskExtents& extents,
                      const CanonicalPatterns& earlier) {
  BlockList same = source;
  if (source.partial_expr) {
    MaskExpr expr = CanonicalExpr(*source.partial_expr, extents, earlier);
    if (IsEverything(expr)) same.kind.clear();
    if (IsEverything(expr) || IsNothing(expr)) {
      same.partial_expr.reset();
      const size_t bytes = (size_t{same.bq} * same.bk + 7) / 8;  // of a bitmap that is all 0
      same.bitmaps.assign(same.kind.empty() ? 0 : bytes, 0);
      same.bitmap_of.assign(static_cast<size_t>(std::count(same.kind.begin(), same.kind.end(), 1)),
                            0);
    } else {
      same.partial_expr = std::move(expr);
    }
  }
  same = BlockListBuilder(BlockList(std::move(same)), extents).Build();
  if (same.indices.empty()) return Nothing();
  const int64_t columns = (extents.keys + same.bk - 1) / same.bk;
  const int64_t blocks = columns * static_cast<int64_t>(same.indptr.size() - 1);
  if (same.kind.empty() && static_cast<int64_t>(same.indices.size()) == blocks) {
    return Everything();
  }
  return same;
}

// ---- Runs.

// Sorts and merges the runs of each line, of which run_at(n) gives the nth: line L has `width` from
// L * width on, and empty ones do not count. Gives push() those of all lines, filled up with empty
// ones to the most that a line has left, which it returns.
template <class RunAt, class Push>
uint32_t MergeRuns(int64_t lines, uint32_t width, const RunAt& run_at, const Push& push) {
  std::vector<std::vector<TileRun>> merged;
  size_t most = 0;
  for (size_t line = 0; line < static_cast<size_t>(lines); ++line) {
    std::vector<TileRun> runs, kept;
    for (size_t n = line * width; n < (line + 1) * width; ++n) {
      const TileRun run = run_at(n);
      if (run.begin < run.end) runs.push_back(run);
    }
    std::sort(runs.begin(), runs.end());
    for (const TileRun& run : runs) {
      const bool is_whole = !kept.empty() && kept.back().stride == 1 && run.stride == 1;
      if (is_whole && run.begin <= kept.back().end) {
        kept.back().end = std::max(kept.back().end, run.end);
      } else if (kept.empty() || kept.back() != run) {
        kept.push_back(run);
      }
    }
    most = std::max(most, kept.size());
    merged.push_back(std::move(kept));
  }
  for (std::vector<TileRun>& runs : merged) {
    runs.resize(most, {0, 0, 1});
    for (const TileRun& run : runs) push(run);
  }
  return static_cast<uint32_t>(most);
}

MaskPattern Canonical(const ColRuns& source, const MaskExtents& extents,
                      const CanonicalPatterns& earlier) {
  const uint64_t rows = static_cast<uint64_t>(extents.rows);
  ColRuns same;
  same.m = MergeRuns(
      extents.keys, source.m,
      [&](size_t n) {
        return TileRun{source.start[n], std::min<uint64_t>(source.end[n], rows), 1};
      },
      [&](const TileRun& run) {
        same.start.push_back(static_cast<uint32_t>(run.begin));
        same.end.push_back(static_cast<uint32_t>(run.end));
      });
  MaskExpr base = source.base ? CanonicalExpr(*source.base, extents, earlier) : Everything();
  if (same.m == 0 || IsNothing(base)) return base;
  if (!IsEverything(base)) same.base = std::move(base);
  return same;
}

MaskPattern Canonical(const RowRuns& source, const MaskExtents& extents) {
  RowRuns same;
  same.r = MergeRuns(
      extents.rows, source.r,
      [&](size_t n) {
        const uint64_t first = source.first[n], count = source.count[n];
        const uint64_t stride = count == 1 ? 1 : source.stride[n];
        return TileRun{first, count == 0 ? first : first + stride * (count - 1) + 1, stride};
      },
      [&](const TileRun& run) {
        same.first.push_back(static_cast<uint32_t>(run.begin));
        same.stride.push_back(static_cast<uint32_t>(run.stride));
        same.count.push_back(
            static_cast<uint32_t>((run.end - run.begin + run.stride - 1) / run.stride));
      });
  if (same.r == 0) return Nothing();
  return same;
}

MaskPattern Canonical(const RowIntervals& source, const MaskExtents& extents) {
  RowIntervals same;
  same.r = MergeRuns(
      extents.rows, source.r,
      [&](size_t n) {
        return TileRun{source.begin[n], source.end[n], 1};
      },
      [&](const TileRun& run) {
        same.begin.push_back(static_cast<uint32_t>(run.begin));
        same.end.push_back(static_cast<uint32_t>(run.end));
      });
  if (same.r == 0) return Nothing();
  return same;
}

// ---- Rectangles and bits.

MaskPattern Canonical(const Rectangles& source) {
  Rectangles same = source;
  std::erase_if(same.of, [](const MaskRectangle& r) {
    return r.row_begin == r.row_end || r.key_begin == r.key_end;
  });
  std::sort(same.of.begin(), same.of.end());
  same.of.erase(std::unique(same.of.begin(), same.of.end()), same.of.end());
  if (same.of.empty()) return Nothing();
  return same;
}

// Rows of whole bytes, with 0 beyond the keys.
MaskPattern Canonical(const MaskBitmap& source, const MaskExtents& extents) {
  const int64_t row_bytes = (extents.keys + 7) / 8;
  MaskBitmap same = {.row_pitch_bits = static_cast<uint32_t>(row_bytes * 8)};
  same.data.resize(static_cast<size_t>(extents.rows * row_bytes));
  const uint8_t last_bits = static_cast<uint8_t>(0xff >> (row_bytes * 8 - extents.keys));
  for (int64_t row = 0; row < extents.rows; ++row) {
    uint8_t* to = &same.data[static_cast<size_t>(row * row_bytes)];
    const int64_t first = row * source.row_pitch_bits;
    for (int64_t n = 0; n < row_bytes; ++n) {
      const size_t from = static_cast<size_t>(first / 8 + n);
      uint32_t two = source.data[from];
      if (from + 1 < source.data.size()) two |= uint32_t{source.data[from + 1]} << 8;
      to[n] = static_cast<uint8_t>(two >> first % 8);
    }
    to[row_bytes - 1] &= last_bits;
  }
  return same;
}

}  // namespace

MaskPattern CanonicalPattern(const MaskPattern& pattern, const MaskExtents& extents,
                             const CanonicalPatterns& earlier) {
  if (auto* expr = std::get_if<MaskExpr>(&pattern)) return CanonicalExpr(*expr, extents, earlier);
  if (auto* list = std::get_if<BlockList>(&pattern)) return Canonical(*list, extents, earlier);
  if (auto* runs = std::get_if<ColRuns>(&pattern)) return Canonical(*runs, extents, earlier);
  if (auto* runs = std::get_if<RowRuns>(&pattern)) return Canonical(*runs, extents);
  if (auto* runs = std::get_if<RowIntervals>(&pattern)) return Canonical(*runs, extents);
  if (auto* rectangles = std::get_if<Rectangles>(&pattern)) return Canonical(*rectangles);
  return Canonical(std::get<MaskBitmap>(pattern), extents);
}

}  // namespace attnd
