#include "kernels/cpu/work_items.h"

#include <algorithm>

#include "kernels/cpu/tiles.h"
#include "kernels/cpu/workspace.h"

namespace attnd {
namespace {

int64_t Tiles(int64_t length, int64_t step) { return (length + step - 1) / step; }

WorkItem MakeItem(size_t call, int64_t batch_index, int64_t head, int64_t tile) {
  return {static_cast<int32_t>(call), static_cast<int32_t>(batch_index), static_cast<int32_t>(head),
          static_cast<int32_t>(tile)};
}

// About how many pairs rows [begin, end) of a sequence see, from its first, middle and last row.
int64_t PairsOfRows(const Problem& p, const Sequence& s, int64_t begin, int64_t end) {
  auto seen = [&](int64_t row) {
    KeyRange range = p.VisibleRange(s, row);
    return range.end - range.begin;
  };
  return (end - begin) * (seen(begin) + 2 * seen((begin + end) / 2) + seen(end - 1)) / 4;
}

int64_t PairsOfTile(const Problem& p, const Sequence& s, int64_t tile) {
  const int64_t row = tile * kMaxQueryRows;
  return PairsOfRows(p, s, row, std::min(row + kMaxQueryRows, s.q_len));
}

// The most that leaves each thread kItemsPerThread items, so that they finish together.
int64_t TilesPerItem(absl::Span<const CpuForwardCall> calls, int threads) {
  constexpr int64_t kItemsPerThread = 4;
  int64_t tiles = 0;
  for (const CpuForwardCall& call : calls) {
    const Problem& p = *call.problem;
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t classes = RowClasses(call, p.SequenceAt(b));
      tiles += p.q_heads * classes * QueryTiles(RowClassOf(call, b, 0).sequence.q_len);
    }
  }
  return std::clamp<int64_t>(tiles / (kItemsPerThread * threads), 1, kMaxTilesPerItem);
}

// Calls body(call index, problem, batch index, its sequence, KV head), each in a group of its own
// of `list`.
template <class Call, class Body>
void ForEachKvHead(absl::Span<const Call> calls, WorkList& list, const Body& body) {
  for (size_t n = 0; n < calls.size(); ++n) {
    const Problem& p = *calls[n].problem;
    for (int64_t b = 0; b < p.batch; ++b) {
      const Sequence s = p.SequenceAt(b);
      for (int64_t kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
        list.BeginGroup();
        body(n, p, b, s, kv_head);
      }
    }
  }
}

// The same for each of their row classes: body(call, an item of the class, the class's sequence).
template <class Call, class Body>
void ForEachRowClass(absl::Span<const Call> calls, WorkList& list, const Body& body) {
  for (size_t n = 0; n < calls.size(); ++n) {
    const Problem& p = *calls[n].problem;
    for (int64_t b = 0; b < p.batch; ++b) {
      const int64_t classes = RowClasses(calls[n], p.SequenceAt(b));
      for (int64_t kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
        for (int64_t residue = 0; residue < classes; ++residue) {
          WorkItem item = MakeItem(n, b, kv_head, 0);
          item.residue = static_cast<int32_t>(residue);
          list.BeginGroup();
          body(calls[n], item, RowClassOf(calls[n], b, residue).sequence);
        }
      }
    }
  }
}

}  // namespace

void WorkList::Sort() {
  for (size_t begin = 0, end; begin < entries_.size(); begin = end) {
    int64_t longest = 0;
    for (end = begin; end < entries_.size() && entries_[end].group == entries_[begin].group;) {
      longest = std::max(longest, entries_[end++].cost);
    }
    for (size_t n = begin; n < end; ++n) entries_[n].longest = longest;
  }
  std::stable_sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
    if (a.longest != b.longest) return a.longest > b.longest;
    return a.group != b.group ? a.group < b.group : a.cost > b.cost;
  });
}

WorkList ForwardItems(absl::Span<const CpuForwardCall> calls, int threads) {
  const int64_t wanted = TilesPerItem(calls, threads);
  WorkList list;
  ForEachRowClass(calls, list, [&](const CpuForwardCall& call, WorkItem item, const Sequence& s) {
    const Problem& p = *call.problem;
    const int64_t step = std::min<int64_t>(wanted, MaxTilesPerItem(p));
    const int64_t tiles = QueryTiles(s.q_len), units = p.group_size() * tiles;
    for (int64_t first = 0; first < units; first += step) {
      item.tile = static_cast<int32_t>(first);
      item.count = static_cast<int32_t>(std::min(step, units - first));
      int64_t pairs = 0;
      for (int64_t unit = first; unit < first + item.count; ++unit) {
        pairs += PairsOfTile(p, s, unit % tiles);
      }
      list.Add(item, (p.qk_head_dim + p.v_head_dim) * pairs);
    }
  });
  list.Sort();
  return list;
}

WorkList RowSumItems(absl::Span<const CpuBackwardCall> calls) {
  WorkList list;
  ForEachKvHead(
      calls, list, [&](size_t n, const Problem& p, int64_t b, const Sequence& s, int64_t kv_head) {
        for (int64_t g = 0; g < p.group_size(); ++g) {
          list.Add(MakeItem(n, b, kv_head * p.group_size() + g, 0), s.q_len * p.v_head_dim);
        }
      });
  list.Sort();
  return list;
}

// The first slots of all heads before the second ones: a thread rarely waits for another.
WorkList GradientItems(absl::Span<const CpuBackwardCall> calls) {
  WorkList list;
  for (int64_t slot = 0; slot < kMaxSlots; ++slot) {
    ForEachRowClass(
        calls, list, [&](const CpuBackwardCall& call, WorkItem item, const Sequence& s) {
          const Problem& p = *call.problem;
          const int64_t slots = call.residues ? 1 : GradientSlots(p, s.q_len);
          if (slot >= slots) return;
          const int64_t pairs = s.q_len > 0 ? PairsOfRows(p, s, 0, s.q_len) : 0;
          item.tile = static_cast<int32_t>(slot);
          list.Add(item, (p.qk_head_dim + p.v_head_dim) * p.group_size() * pairs / slots);
        });
  }
  list.Sort();
  return list;
}

int64_t BiasColumnTiles(const Problem& p) {
  return Tiles(p.bias->shape.columns, BackwardTileSize(p).kv_rows);
}

WorkList BiasItems(absl::Span<const CpuBackwardCall> calls) {
  WorkList list;
  for (size_t n = 0; n < calls.size(); ++n) {
    if (calls[n].d_bias == nullptr) continue;
    const Problem& p = *calls[n].problem;
    const BroadcastShape& shape = p.bias->shape;
    const int64_t tiles = Tiles(shape.rows, BackwardTileSize(p).q_rows) * BiasColumnTiles(p);
    const int64_t pairs = p.batch * p.q_heads * p.MaxQueryLength() * p.MaxKeyLength();
    list.BeginGroup();
    for (int64_t place = 0; place < shape.batch * shape.heads; ++place) {
      for (int64_t tile = 0; tile < tiles; ++tile) {
        list.Add(MakeItem(n, place / shape.heads, place % shape.heads, tile),
                 pairs / (shape.batch * shape.heads * tiles));
      }
    }
  }
  list.Sort();
  return list;
}

}  // namespace attnd
