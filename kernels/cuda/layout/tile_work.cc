#include "kernels/cuda/layout/tile_work.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/score_rule.h"
#include "kernels/rules/mask_words.h"

namespace attnd::cuda {
namespace {

int64_t Tiles(int64_t length, int64_t rows) { return (length + rows - 1) / rows; }

struct SizedTile {
  int64_t work;
  TileWork tile;
  size_t group = 0;  // HeadGroups
};

// Heads whose tiles run at the same time: what their blocks read and add to fits the L2 together.
class HeadGroups {
 public:
  // The next head's group.
  size_t Next(int64_t head_bytes) {
    if (bytes_ > 0 && bytes_ + head_bytes > kBytes) {
      ++group_;
      bytes_ = 0;
    }
    bytes_ += head_bytes;
    return group_;
  }

 private:
  // A part of the 50 MB of an H100: room for the next group's, and reads of HBM all the time.
  static constexpr int64_t kBytes = 8 << 20;
  size_t group_ = 0;
  int64_t bytes_ = 0;
};

OrderedTiles Ordered(const std::vector<SizedTile>& tiles) {
  OrderedTiles ordered;
  ordered.tiles.reserve(tiles.size());
  ordered.work.reserve(tiles.size());
  for (const SizedTile& sized : tiles) {
    ordered.tiles.push_back(sized.tile);
    ordered.work.push_back(sized.work);
  }
  return ordered;
}

constexpr int64_t kSms = 132;  // of the largest GPU

// Returns the work of the block that ends last, where each takes the next tile when it is free.
int64_t LongestBlock(absl::Span<const SizedTile> tiles, int64_t blocks) {
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> ends;
  for (int64_t block = 0; block < blocks; ++block) ends.push(0);
  int64_t last = 0;
  for (const SizedTile& tile : tiles) {
    const int64_t end = ends.top() + tile.work;
    ends.pop();
    ends.push(end);
    last = std::max(last, end);
  }
  return last;
}

// Most work first in a group, and of groups those with the longest tiles, so that none is left for
// the end.
void PutMostWorkFirstInGroups(std::vector<SizedTile>& tiles) {
  std::vector<int64_t> longest(tiles.empty() ? 0 : tiles.back().group + 1);
  for (const SizedTile& tile : tiles) {
    longest[tile.group] = std::max(longest[tile.group], tile.work);
  }
  std::stable_sort(tiles.begin(), tiles.end(), [&](const SizedTile& a, const SizedTile& b) {
    return std::tie(longest[b.group], a.group, b.work) <
           std::tie(longest[a.group], b.group, a.work);
  });
}

// Where tiles are few, the last group's longest would begin late: all are one group then, if the
// launch ends sooner by more than the L2 spares.
void PutMostWorkFirst(std::vector<SizedTile>& tiles, int64_t blocks) {
  constexpr int64_t kFew = 4;  // times what all blocks do in the longest tile's time
  PutMostWorkFirstInGroups(tiles);
  int64_t all = 0, longest = 0;
  for (const SizedTile& tile : tiles) {
    all += tile.work;
    longest = std::max(longest, tile.work);
  }
  if (all >= kFew * blocks * longest) return;
  std::vector<SizedTile> in_one = tiles;
  std::stable_sort(in_one.begin(), in_one.end(),
                   [](const SizedTile& a, const SizedTile& b) { return a.work > b.work; });
  if (LongestBlock(tiles, blocks) * 10 > LongestBlock(in_one, blocks) * 11) {
    tiles = std::move(in_one);
  }
}

// Under masks a tile may be many times longer than others: one that would still be at work after
// them begins before its group, just in time.
void BeginInTime(std::vector<SizedTile>& tiles, int64_t blocks) {
  int64_t all = 0, before = 0;
  for (const SizedTile& tile : tiles) all += tile.work;
  std::vector<std::pair<int64_t, size_t>> begins(tiles.size());
  for (size_t n = 0; n < tiles.size(); ++n) {
    begins[n] = {std::min(before, all - tiles[n].work * blocks), n};
    before += tiles[n].work;
  }
  std::sort(begins.begin(), begins.end());
  std::vector<SizedTile> ordered;
  ordered.reserve(tiles.size());
  for (const auto& [begin, n] : begins) ordered.push_back(tiles[n]);
  tiles = std::move(ordered);
}

// The places that a block visits, in whole tiles of `size`: of those that hold a place of `range`,
// all, or what is listed.
int64_t Visited(Range range, const std::optional<absl::Span<const MaskTile>>& listed,
                int64_t size) {
  if (range.end <= range.begin) return 0;
  const int64_t begin = range.begin / size, end = Tiles(range.end, size);
  if (!listed) return (end - begin) * size;
  const auto first_from = [&](int64_t tile) {
    return std::partition_point(listed->begin(), listed->end(),
                                [tile](const MaskTile& t) { return t.tile < tile; });
  };
  return (first_from(end) - first_from(begin)) * size;
}

// Returns the tiles that a line lists, for run n > 0 of it as RunOf (kernels/rules/mask_words.h)
// cuts it.
std::optional<absl::Span<const MaskTile>> ListedBy(const MaskLists* lists, int64_t line, int run) {
  if (lists == nullptr) return std::nullopt;
  const absl::Span<const MaskTile> all = lists->Line(line);
  if (run == 0) return all;
  const MaskLine of = RunOf({0, static_cast<uint32_t>(all.size()), 0, 0}, run);
  return all.subspan(of.begin, of.end - of.begin);
}

// Tiles of one kind as they are found.
struct FoundTiles {
  int rows;  // (keys) of a tile
  std::vector<SizedTile> tiles;
  std::vector<TileWork> merged;

  // A tile, whose work in run n (0: all of it) is work_of(n); `first_run`: a problem, where it is
  // cut.
  template <class WorkOf>
  void Add(const TileWork& tile, size_t group, std::optional<int64_t> first_run,
           const WorkOf& work_of) {
    if (!first_run) {
      tiles.push_back({work_of(0), tile, group});
      return;
    }
    for (int run = 0; run < kListRuns; ++run) {
      TileWork of = tile;
      of.problem = static_cast<int32_t>(*first_run + run);
      tiles.push_back({work_of(run + 1), of, group});
    }
    TileWork of = tile;
    of.problem = static_cast<int32_t>(*first_run);
    const int blocks = rows / kMergedRows;
    for (of.tile = tile.tile * blocks; of.tile < (tile.tile + 1) * blocks; ++of.tile) {
      merged.push_back(of);
    }
  }

  OrderedTiles InOrder(bool has_masks, int blocks_per_sm) && {
    const int64_t blocks = kSms * blocks_per_sm;
    PutMostWorkFirst(tiles, blocks);
    if (has_masks) BeginInTime(tiles, blocks);
    OrderedTiles ordered = Ordered(tiles);
    ordered.merged = std::move(merged);
    return ordered;
  }
};

// The problem of a line's first run.
int64_t FirstRun(const ListCuts& cuts, size_t first_of_part, int32_t line) {
  const auto at = std::lower_bound(cuts.lines.begin(), cuts.lines.end(), line);
  return static_cast<int64_t>(first_of_part) + (at - cuts.lines.begin()) * kListRuns;
}

const CompiledMask* MaskOf(absl::Span<const CallMask> masks, const Part& part) {
  return masks.empty() ? nullptr : masks[static_cast<size_t>(part.call)].compiled.get();
}

bool AnyListed(absl::Span<const CallMask> masks) {
  return std::any_of(masks.begin(), masks.end(),
                     [](const CallMask& mask) { return mask.compiled != nullptr; });
}

// Calls visit(part index, entry within the part, query head within the part, its sequence).
template <class Visit>
void ForEachQueryHead(absl::Span<const Problem* const> problems, absl::Span<const Part> parts,
                      const Visit& visit) {
  for (size_t n = 0; n < parts.size(); ++n) {
    const Problem& p = *problems[parts[n].call];
    for (int64_t b = 0; b < parts[n].batches; ++b) {
      SequenceDesc sequence = DescribeSequence(p, parts[n], b);
      for (int64_t h = 0; h < parts[n].kv_heads * p.group_size(); ++h) {
        visit(static_cast<int32_t>(n), static_cast<int32_t>(b), static_cast<int32_t>(h), sequence);
      }
    }
  }
}

}  // namespace

OrderedTiles ForwardTiles(absl::Span<const Problem* const> problems, absl::Span<const Part> parts,
                          const Tile& of, absl::Span<const CallMask> masks,
                          absl::Span<const size_t> first_runs) {
  FoundTiles found = {.rows = of.q_rows, .tiles = {}, .merged = {}};
  HeadGroups groups;
  size_t group = 0;
  ForEachQueryHead(problems, parts, [&](int32_t n, int32_t b, int32_t h, const SequenceDesc& s) {
    const Part& part = parts[static_cast<size_t>(n)];
    if (h % problems[part.call]->group_size() == 0) {
      group = groups.Next(s.kv_len * PaddedColumns(of.head_dim) * 4);  // K and V in 16 bits
    }
    const CompiledMask* mask = MaskOf(masks, part);
    const int64_t head = part.kv_head_begin * problems[part.call]->group_size() + h;
    const MaskLists* lists =
        mask == nullptr ? nullptr : &mask->PlanAt(part.batch_begin + b, head).by_rows;
    const Visibility visibility = {s.q_len, s.kv_len, s.low, s.high};
    for (int32_t tile = 0; tile < Tiles(s.q_len, of.q_rows); ++tile) {
      const int begin = tile * of.q_rows, end = std::min(begin + of.q_rows, s.q_len);
      const Range keys = VisibleKeys(visibility, begin, end);
      std::optional<int64_t> first_run;
      if (lists != nullptr && !first_runs.empty()) {
        const ListCuts& cuts = masks[static_cast<size_t>(part.call)].cuts;
        const auto at = static_cast<size_t>(n);
        if (cuts.Cut(*lists, tile)) first_run = FirstRun(cuts, first_runs[at], tile);
      }
      found.Add({n, b, h, tile}, group, first_run,
                [&](int run) { return Visited(keys, ListedBy(lists, tile, run), of.kv_rows); });
    }
  });
  return std::move(found).InOrder(AnyListed(masks), of.blocks_per_sm);
}

OrderedTiles BackwardTiles(absl::Span<const Problem* const> problems, absl::Span<const Part> parts,
                           const Tile& of, absl::Span<const CallMask> masks,
                           absl::Span<const size_t> first_runs) {
  FoundTiles found = {.rows = of.kv_rows, .tiles = {}, .merged = {}};
  HeadGroups groups;
  for (size_t n = 0; n < parts.size(); ++n) {
    const Part& part = parts[n];
    const Problem& p = *problems[part.call];
    const CompiledMask* mask = MaskOf(masks, part);
    for (int64_t b = 0; b < part.batches; ++b) {
      const SequenceDesc s = DescribeSequence(p, part, b);
      const Visibility visibility = {s.q_len, s.kv_len, s.low, s.high};
      // Q and dO in 16 bits, sums of dQ in 32.
      const int64_t head_bytes = p.group_size() * s.q_len * PaddedColumns(of.head_dim) * 8;
      for (int64_t h = 0; h < part.kv_heads; ++h) {
        const size_t group = groups.Next(head_bytes);
        for (int32_t at = 0; at < Tiles(s.kv_len, of.kv_rows); ++at) {
          const int begin = at * of.kv_rows, end = std::min(begin + of.kv_rows, s.kv_len);
          const Range rows = RowsThatSee(visibility, begin, end);
          const auto lists_of = [&](int64_t g) -> const MaskLists* {
            const int64_t head = (part.kv_head_begin + h) * p.group_size() + g;
            return mask == nullptr ? nullptr : &mask->PlanAt(part.batch_begin + b, head).by_keys;
          };
          std::optional<int64_t> first_run;
          if (mask != nullptr && !first_runs.empty()) {
            const ListCuts& cuts = masks[static_cast<size_t>(part.call)].cuts;
            for (int64_t g = 0; g < p.group_size() && !first_run; ++g) {
              if (cuts.Cut(*lists_of(g), at)) first_run = FirstRun(cuts, first_runs[n], at);
            }
          }
          const int64_t size = mask == nullptr ? kDqBlockRows : mask->plans()[0].tile.rows;
          found.Add({static_cast<int32_t>(n), static_cast<int32_t>(b), static_cast<int32_t>(h), at},
                    group, first_run, [&](int run) {
                      int64_t work = 0;
                      for (int64_t g = 0; g < p.group_size(); ++g) {
                        work += Visited(rows, ListedBy(lists_of(g), at, run), size);
                      }
                      return work;
                    });
        }
      }
    }
  }
  return std::move(found).InOrder(AnyListed(masks), of.blocks_per_sm);
}

std::vector<TileWork> HeadTiles(absl::Span<const Problem* const> problems,
                                absl::Span<const Part> parts) {
  std::vector<TileWork> tiles;
  ForEachQueryHead(problems, parts, [&](int32_t n, int32_t b, int32_t h, const SequenceDesc&) {
    tiles.push_back({n, b, h, 0});
  });
  return tiles;
}

std::vector<TileWork> BiasTiles(absl::Span<const Problem* const> problems,
                                absl::Span<const Part> parts) {
  constexpr int64_t kEdge = 16;
  std::vector<TileWork> tiles;
  for (size_t n = 0; n < parts.size(); ++n) {
    const Problem& p = *problems[parts[n].call];
    if (!p.bias || !p.bias->want_gradient) continue;
    const BroadcastShape& shape = p.bias->shape;
    const int64_t batches = shape.batch == 1 ? 1 : parts[n].batches;
    const int64_t heads = shape.heads == 1 ? 1 : parts[n].kv_heads * p.group_size();
    const int64_t count = Tiles(shape.rows, kEdge) * Tiles(shape.columns, kEdge);
    for (int64_t b = 0; b < batches; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t tile = 0; tile < count; ++tile) {
          tiles.push_back({static_cast<int32_t>(n), static_cast<int32_t>(b),
                           static_cast<int32_t>(h), static_cast<int32_t>(tile)});
        }
      }
    }
  }
  return tiles;
}

std::vector<TileWork> KeepRowsTiles(absl::Span<const CallLayout> layouts,
                                    absl::Span<const Part> parts) {
  std::vector<TileWork> tiles;
  for (size_t n = 0; n < parts.size(); ++n) {
    const CallLayout& at = layouts[parts[n].call];
    if (!at.keeps_rows) continue;
    const int64_t q_heads = parts[n].kv_heads * at.problem->group_size();
    for (int64_t b = 0; b < parts[n].batches; ++b) {
      const SequenceDesc s = DescribeSequence(*at.problem, parts[n], b);
      for (int64_t h = 0; h < q_heads + parts[n].kv_heads; ++h) {
        for (int32_t tile = 0; tile < DqBlocks(h < q_heads ? s.q_len : s.kv_len); ++tile) {
          tiles.push_back(
              {static_cast<int32_t>(n), static_cast<int32_t>(b), static_cast<int32_t>(h), tile});
        }
      }
    }
  }
  return tiles;
}

std::vector<TileWork> MaskLineTiles(absl::Span<const CallLayout> layouts,
                                    absl::Span<const Part> parts) {
  std::vector<TileWork> tiles;
  for (size_t n = 0; n < parts.size(); ++n) {
    const Part& part = parts[n];
    const CallLayout& at = layouts[part.call];
    const Problem& p = *at.problem;
    if (!p.bool_mask) continue;
    const BroadcastShape& mask = p.bool_mask->shape;
    // Shared gradients belong to the first part.
    const bool is_first_entry = part.batch_begin == 0, is_first_head = part.kv_head_begin == 0;
    if ((mask.batch == 1 && !is_first_entry) || (mask.heads == 1 && !is_first_head)) continue;
    const int64_t batches = mask.batch == 1 ? 1 : part.batches;
    const int64_t heads = mask.heads == 1 ? 1 : part.kv_heads * p.group_size();
    for (int64_t b = 0; b < batches; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int32_t line = 0; line < at.mask_lists.lists.plan_lines; ++line) {
          tiles.push_back(
              {static_cast<int32_t>(n), static_cast<int32_t>(b), static_cast<int32_t>(h), line});
        }
      }
    }
  }
  return tiles;
}

int64_t MaskLineCount(const CallLayout& at) {
  if (!at.problem->bool_mask) return 0;
  const BroadcastShape& mask = at.problem->bool_mask->shape;
  return mask.batch * mask.heads * at.mask_lists.lists.plan_lines;
}

std::vector<TileWork> RowBlockTiles(absl::Span<const Problem* const> problems,
                                    absl::Span<const Part> parts) {
  std::vector<TileWork> tiles;
  ForEachQueryHead(problems, parts, [&](int32_t n, int32_t b, int32_t h, const SequenceDesc& s) {
    for (int32_t tile = 0; tile < DqBlocks(s.q_len); ++tile) tiles.push_back({n, b, h, tile});
  });
  return tiles;
}

}  // namespace attnd::cuda
