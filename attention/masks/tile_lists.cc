#include "attention/masks/tile_lists.h"

#include <algorithm>
#include <deque>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

namespace attnd {
namespace {

// Tiles [row_begin, row_end) × [key_begin, key_end) of a grid.
struct TileRect {
  int64_t row_begin, row_end, key_begin, key_end;
  int64_t row_tiles() const { return row_end - row_begin; }
  int64_t key_tiles() const { return key_end - key_begin; }
  int64_t tiles() const { return row_tiles() * key_tiles(); }
};

MaskRect ScoresOf(const TileGrid& grid, const TileRect& tiles) {
  const int64_t row = tiles.row_begin * grid.tile.rows, key = tiles.key_begin * grid.tile.keys;
  const int64_t rows = std::min(tiles.row_end * grid.tile.rows, grid.rows) - row;
  const int64_t key_end = std::min(tiles.key_end * grid.tile.keys, grid.keys);
  return {grid.query + row, grid.row + row, rows, grid.key_begin + key, grid.key_begin + key_end};
}

TileBits BitsOf(const MaskTileSize& tile) {
  TileBits bits = {.rows = tile.rows, .words_per_row = (tile.keys + 31) / 32};
  bits.words.resize(static_cast<size_t>(bits.rows * bits.words_per_row));
  return bits;
}

// Two or four parts, so that they become squares of scores. Row by row, ascending in both.
struct Parts {
  TileRect part[4];
  int count = 0;
};
Parts Split(const TileGrid& grid, const TileRect& tiles) {
  const int64_t height = tiles.row_tiles() * grid.tile.rows;
  const int64_t width = tiles.key_tiles() * grid.tile.keys;
  const bool by_rows = tiles.row_tiles() > 1 && (height * 2 > width || tiles.key_tiles() == 1);
  const bool by_keys = tiles.key_tiles() > 1 && (width * 2 > height || tiles.row_tiles() == 1);
  const int64_t row = by_rows ? (tiles.row_begin + tiles.row_end) / 2 : tiles.row_end;
  const int64_t key = by_keys ? (tiles.key_begin + tiles.key_end) / 2 : tiles.key_end;
  Parts parts;
  const auto add = [&](int64_t row_begin, int64_t row_end) {
    if (row_begin == row_end) return;
    parts.part[parts.count++] = {row_begin, row_end, tiles.key_begin, key};
    if (by_keys) parts.part[parts.count++] = {row_begin, row_end, key, tiles.key_end};
  };
  add(tiles.row_begin, row);
  add(row, tiles.row_end);
  return parts;
}

// The distinct bitmaps, in the order of their first use.
class Dictionary {
 public:
  uint32_t NumberOf(const TileBits& bits) {
    const size_t bytes = bits.words.size() * sizeof(uint32_t);
    const auto found = number_.find({reinterpret_cast<const char*>(bits.words.data()), bytes});
    if (found != number_.end()) return found->second;
    const uint32_t number = static_cast<uint32_t>(number_.size());
    const std::vector<uint32_t>& kept = kept_.emplace_back(bits.words);
    number_[{reinterpret_cast<const char*>(kept.data()), bytes}] = number;
    return number;
  }
  int64_t size() const { return static_cast<int64_t>(kept_.size()); }
  std::vector<uint32_t> Take() {
    std::vector<uint32_t> all;
    if (!kept_.empty()) all.reserve(kept_.size() * kept_[0].size());
    for (const std::vector<uint32_t>& words : kept_) {
      all.insert(all.end(), words.begin(), words.end());
    }
    return all;
  }

 private:
  std::deque<std::vector<uint32_t>> kept_;
  absl::flat_hash_map<absl::string_view, uint32_t> number_;
};

struct ListedTile {
  uint32_t row_tile, key_tile, bitmap;
};

// `listed` is ascending by `other` for each `line`: a stable counting sort keeps that.
MaskLists ListsOf(const std::vector<ListedTile>& listed, int64_t lines, uint32_t ListedTile::*line,
                  uint32_t ListedTile::*other) {
  MaskLists lists;
  lists.offsets.resize(static_cast<size_t>(lines + 1));
  for (const ListedTile& tile : listed) ++lists.offsets[tile.*line + 1];
  for (size_t n = 1; n < lists.offsets.size(); ++n) lists.offsets[n] += lists.offsets[n - 1];
  lists.tiles.resize(listed.size());
  std::vector<uint32_t> next(lists.offsets.begin(), lists.offsets.end() - 1);
  for (const ListedTile& tile : listed) {
    lists.tiles[next[tile.*line]++] = {tile.*other, tile.bitmap};
  }
  return lists;
}

class TileCompiler {
 public:
  TileCompiler(const MaskTree& tree, const TileGrid& grid, CompileBudget& budget)
      : grid_(grid), walk_(tree, budget), budget_(budget), bits_(BitsOf(grid.tile)) {}

  MaskPlan Compile() {
    Visit(0, {0, grid_.row_tiles(), 0, grid_.key_tiles()});
    MaskPlan plan = {.tile = grid_.tile, .rows = grid_.rows, .keys = grid_.keys};
    plan.words_per_row = static_cast<int32_t>(bits_.words_per_row);
    plan.visible = visible_;
    plan.full_tiles = full_tiles_;
    plan.partial_tiles = static_cast<int64_t>(listed_.size()) - full_tiles_;
    if (budget_.IsSpent()) return plan;
    plan.by_rows =
        ListsOf(listed_, grid_.row_tiles(), &ListedTile::row_tile, &ListedTile::key_tile);
    plan.by_keys =
        ListsOf(listed_, grid_.key_tiles(), &ListedTile::key_tile, &ListedTile::row_tile);
    plan.bitmaps = dictionary_.Take();
    return plan;
  }

 private:
  // In this order each line's tiles come ascending, and each column's.
  void Visit(size_t depth, const TileRect& tiles) {
    if (budget_.IsSpent()) return;
    const MaskRect scores = ScoresOf(grid_, tiles);
    const Seen seen = walk_.Classify(depth, scores);
    if (seen == Seen::kAll) ListFull(tiles, scores);
    if (seen != Seen::kMixed) return;
    if (tiles.tiles() == 1) return LookAt(depth, tiles, scores);
    const Parts parts = Split(grid_, tiles);
    for (int n = 0; n < parts.count; ++n) Visit(depth + 1, parts.part[n]);
  }

  // Memory of the lists in both directions and of the list that they are sorted from.
  bool Spend(int64_t tiles) {
    budget_.bytes += tiles * static_cast<int64_t>(2 * sizeof(MaskTile) + sizeof(ListedTile));
    return !budget_.IsSpent();
  }

  void ListFull(const TileRect& tiles, const MaskRect& scores) {
    budget_.steps += tiles.tiles() / 4;
    if (!Spend(tiles.tiles())) return;
    for (int64_t row = tiles.row_begin; row < tiles.row_end; ++row) {
      for (int64_t key = tiles.key_begin; key < tiles.key_end; ++key) List(row, key, kFullMaskTile);
    }
    visible_ += scores.rows * scores.keys();
    full_tiles_ += tiles.tiles();
  }

  void LookAt(size_t depth, const TileRect& tiles, const MaskRect& scores) {
    const bool has_shape = walk_.Shape(depth, scores, shape_);
    const auto known = has_shape ? by_shape_.find(shape_) : by_shape_.end();
    const Look look = known != by_shape_.end() ? known->second : LookAtBits(depth, scores);
    if (has_shape && known == by_shape_.end()) {
      by_shape_.emplace(shape_, look);
      budget_.bytes += static_cast<int64_t>(shape_.size() * sizeof(int64_t) + sizeof(Look));
    }
    if (look.visible == 0) return;
    if (look.bitmap == kFullMaskTile) return ListFull(tiles, scores);
    if (!Spend(1)) return;
    List(tiles.row_begin, tiles.key_begin, look.bitmap);
    visible_ += look.visible;
  }

  // Counts what a tile's bits show.
  struct Look {
    int64_t visible;
    uint32_t bitmap;
  };
  Look LookAtBits(size_t depth, const MaskRect& scores) {
    walk_.Fill(depth, scores, bits_);
    int64_t visible = 0;
    for (uint32_t word : bits_.words) visible += __builtin_popcount(word);
    if (visible == 0 || visible == scores.rows * scores.keys()) return {visible, kFullMaskTile};
    const int64_t distinct = dictionary_.size();
    const uint32_t number = dictionary_.NumberOf(bits_);
    if (dictionary_.size() > distinct) {
      budget_.bytes += static_cast<int64_t>(2 * bits_.words.size() * sizeof(uint32_t));
    }
    return {visible, number};
  }

  void List(int64_t row, int64_t key, uint32_t bitmap) {
    listed_.push_back({static_cast<uint32_t>(row), static_cast<uint32_t>(key), bitmap});
  }

  const TileGrid& grid_;
  MaskTreeWalk walk_;
  CompileBudget& budget_;
  TileBits bits_;
  Dictionary dictionary_;
  std::vector<int64_t> shape_;
  absl::flat_hash_map<std::vector<int64_t>, Look> by_shape_;
  std::vector<ListedTile> listed_;
  int64_t visible_ = 0, full_tiles_ = 0;
};

// One descent from the whole grid to a tile.
class Descent {
 public:
  Descent(const MaskTree& tree, const TileGrid& grid, CompileBudget& budget)
      : grid_(grid), walk_(tree, budget), budget_(budget), bits_(BitsOf(grid.tile)) {}

  CompileEstimate Run(uint64_t seed, int64_t most_steps) {
    estimate_ = {};
    random_ = seed;
    const int64_t stop = budget_.steps + most_steps;
    TileRect tiles = {0, grid_.row_tiles(), 0, grid_.key_tiles()};
    double weight = 1;
    Seen seen = Look(0, tiles, weight);
    size_t depth = 0;
    for (; seen == Seen::kMixed && tiles.tiles() > 1; ++depth) {
      if (budget_.steps > stop) {
        AddTiles(depth,
                 weight * static_cast<double>(std::max(tiles.row_tiles(), tiles.key_tiles())));
        return estimate_;
      }
      std::vector<TileRect> mixed;
      const Parts parts = Split(grid_, tiles);
      for (int n = 0; n < parts.count; ++n) {
        if (Look(depth + 1, parts.part[n], weight) == Seen::kMixed) mixed.push_back(parts.part[n]);
      }
      if (mixed.empty()) return estimate_;
      weight *= static_cast<double>(mixed.size());
      tiles = mixed[Next() % mixed.size()];
      // For the walk, whose last look at this depth was another's.
      seen = walk_.Classify(depth + 1, ScoresOf(grid_, tiles));
    }
    if (seen == Seen::kMixed) AddLeafTiles(depth, tiles, weight, stop);
    return estimate_;
  }

 private:
  Seen Look(size_t depth, const TileRect& tiles, double weight) {
    const int64_t before = budget_.steps;
    const Seen seen = walk_.Classify(depth, ScoresOf(grid_, tiles));
    estimate_.steps += weight * static_cast<double>(budget_.steps - before);
    if (seen == Seen::kAll) {
      estimate_.bytes += weight * static_cast<double>(tiles.tiles()) * 2 * sizeof(MaskTile);
    }
    return seen;
  }
  // So many tiles to look at bit by bit.
  void AddTiles(size_t depth, double tiles) {
    estimate_.steps += tiles * static_cast<double>(grid_.tile.rows * walk_.MixedLeaves(depth));
    estimate_.bytes += tiles * 2 * sizeof(MaskTile);
  }
  // Looks at one if that is cheap.
  void AddLeafTiles(size_t depth, const TileRect& tile, double weight, int64_t stop) {
    const int64_t before = budget_.steps;
    if (grid_.tile.rows * walk_.MixedLeaves(depth) > stop - before) return AddTiles(depth, weight);
    walk_.Fill(depth, ScoresOf(grid_, tile), bits_);
    estimate_.steps += weight * static_cast<double>(budget_.steps - before);
    estimate_.bytes += weight * 2 * sizeof(MaskTile);
  }
  uint64_t Next() {  // SplitMix64
    uint64_t z = random_ += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
  }

  const TileGrid& grid_;
  MaskTreeWalk walk_;
  CompileBudget& budget_;
  TileBits bits_;
  CompileEstimate estimate_;
  uint64_t random_ = 0;
};

// Rows that no listed tile shows a key.
void CountEmptyRows(MaskPlan& plan) {
  std::vector<uint8_t> sees(static_cast<size_t>(plan.tile.rows));
  const int64_t words = plan.words_per_row;
  for (int64_t line = 0; line < plan.by_rows.lines(); ++line) {
    std::fill(sees.begin(), sees.end(), 0);
    for (const MaskTile& tile : plan.by_rows.Line(line)) {
      if (tile.is_full()) {
        std::fill(sees.begin(), sees.end(), 1);
        break;
      }
      const uint32_t* bits = plan.Bitmap(tile.bitmap).data();
      for (size_t r = 0; r < sees.size(); ++r) {
        for (int64_t w = 0; w < words; ++w) sees[r] |= *bits++ != 0;
      }
    }
    const int64_t first = line * plan.tile.rows;
    const int64_t rows = std::min<int64_t>(plan.tile.rows, plan.rows - first);
    for (int64_t r = 0; r < rows; ++r) {
      if (sees[static_cast<size_t>(r)]) continue;
      if (plan.empty_rows++ == 0) plan.first_empty_row = first + r;
    }
  }
}

}  // namespace

CompileEstimate EstimateTiles(const MaskTree& tree, const TileGrid& grid, int64_t probe_steps) {
  constexpr int kMostDescents = 64;
  CompileBudget budget = {.max_steps = INT64_MAX, .max_bytes = INT64_MAX};
  Descent descent(tree, grid, budget);
  CompileEstimate sum;
  int count = 0;
  while (count < kMostDescents && budget.steps < probe_steps) {
    const CompileEstimate one =
        descent.Run(static_cast<uint64_t>(count), probe_steps - budget.steps);
    sum.steps += one.steps;
    sum.bytes += one.bytes;
    ++count;
  }
  return {sum.steps / count, sum.bytes / count};
}

MaskPlan CompileTiles(const MaskTree& tree, const TileGrid& grid, CompileBudget& budget) {
  MaskPlan plan = TileCompiler(tree, grid, budget).Compile();
  if (!budget.IsSpent()) CountEmptyRows(plan);
  return plan;
}

}  // namespace attnd
