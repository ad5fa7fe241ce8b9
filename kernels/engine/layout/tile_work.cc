#include "kernels/engine/layout/tile_work.h"

#include <algorithm>
#include <utility>

#include "attention/score_rule.h"

namespace attnd::cuda {
namespace {

int64_t Tiles(int64_t length, int64_t rows) { return (length + rows - 1) / rows; }

std::vector<TileWork> MostWorkFirst(std::vector<std::pair<int64_t, TileWork>> tiles) {
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<TileWork> ordered;
  ordered.reserve(tiles.size());
  for (const auto& [keys, tile] : tiles) ordered.push_back(tile);
  return ordered;
}

// Calls visit(part index, entry within the part, query head within the part, its sequence).
template <class Visit>
void ForEachQueryHead(absl::Span<const Problem* const> problems, absl::Span<const Part> parts,
                      const Visit& visit) {
  for (size_t n = 0; n < parts.size(); ++n) {
    const Problem& p = *problems[parts[n].call];
    for (int64_t b = 0; b < parts[n].batches; ++b) {
      SequenceDesc sequence = DescribeSequence(p, parts[n].batch_begin + b);
      for (int64_t h = 0; h < parts[n].kv_heads * p.group_size(); ++h) {
        visit(static_cast<int32_t>(n), static_cast<int32_t>(b), static_cast<int32_t>(h), sequence);
      }
    }
  }
}

}  // namespace

std::vector<TileWork> ForwardTiles(absl::Span<const Problem* const> problems,
                                   absl::Span<const Part> parts, int q_rows) {
  std::vector<std::pair<int64_t, TileWork>> tiles;  // keys to visit, tile
  ForEachQueryHead(problems, parts, [&](int32_t n, int32_t b, int32_t h, const SequenceDesc& s) {
    Visibility visibility = {s.q_len, s.kv_len, s.low, s.high};
    for (int32_t tile = 0; tile < Tiles(s.q_len, q_rows); ++tile) {
      int begin = tile * q_rows, end = std::min(begin + q_rows, s.q_len);
      Range keys = VisibleKeys(visibility, begin, end);
      tiles.push_back({std::max(0, keys.end - keys.begin), {n, b, h, tile}});
    }
  });
  return MostWorkFirst(std::move(tiles));
}

std::vector<TileWork> BackwardTiles(absl::Span<const Problem* const> problems,
                                    absl::Span<const Part> parts, int kv_rows) {
  std::vector<std::pair<int64_t, TileWork>> tiles;  // rows to visit, tile
  for (size_t n = 0; n < parts.size(); ++n) {
    const Problem& p = *problems[parts[n].call];
    for (int64_t b = 0; b < parts[n].batches; ++b) {
      SequenceDesc s = DescribeSequence(p, parts[n].batch_begin + b);
      Visibility visibility = {s.q_len, s.kv_len, s.low, s.high};
      for (int64_t h = 0; h < parts[n].kv_heads; ++h) {
        for (int32_t at = 0; at < Tiles(s.kv_len, kv_rows); ++at) {
          int begin = at * kv_rows;
          int end = std::min(begin + kv_rows, s.kv_len);
          Range rows = RowsThatSee(visibility, begin, end);
          tiles.push_back(
              {std::max(0, rows.end - rows.begin) * p.group_size(),
               {static_cast<int32_t>(n), static_cast<int32_t>(b), static_cast<int32_t>(h), at}});
        }
      }
    }
  }
  return MostWorkFirst(std::move(tiles));
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
      const SequenceDesc s = DescribeSequence(*at.problem, parts[n].batch_begin + b);
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

std::vector<TileWork> MaskLineTiles(absl::Span<const Problem* const> problems,
                                    absl::Span<const Part> parts, const MaskTiling& tiling) {
  std::vector<TileWork> tiles;
  for (size_t n = 0; n < parts.size(); ++n) {
    const Part& part = parts[n];
    const Problem& p = *problems[part.call];
    if (!p.bool_mask) continue;
    const BroadcastShape& mask = p.bool_mask->shape;
    // What is shared belongs to the first part.
    const bool is_first_entry = part.batch_begin == 0, is_first_head = part.kv_head_begin == 0;
    if ((mask.batch == 1 && !is_first_entry) || (mask.heads == 1 && !is_first_head)) continue;
    const int64_t batches = mask.batch == 1 ? 1 : part.batches;
    const int64_t heads = mask.heads == 1 ? 1 : part.kv_heads * p.group_size();
    const int64_t lines = MaskLines(mask, tiling);
    for (int64_t b = 0; b < batches; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t line = 0; line < lines; ++line) {
          tiles.push_back({static_cast<int32_t>(n), static_cast<int32_t>(b),
                           static_cast<int32_t>(h), static_cast<int32_t>(line)});
        }
      }
    }
  }
  return tiles;
}

int64_t MaskLineCount(const Problem& p, const MaskTiling& tiling) {
  if (!p.bool_mask) return 0;
  const BroadcastShape& mask = p.bool_mask->shape;
  return mask.batch * mask.heads * MaskLines(mask, tiling);
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
