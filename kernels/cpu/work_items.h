// The lists of work of a launch's phases, longest first, so that threads finish together. Items of
// one KV head follow each other: they read the same keys. The order decides speed only, never
// results.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/cpu/cpu_call.h"

namespace attnd {

// `head`, `tile` and `count` mean what the phase's function in cpu_kernels.h says.
struct WorkItem {
  int32_t call;
  int32_t batch_index;
  int32_t head;
  int32_t tile;
  int32_t count = 1;
  int32_t residue = 0;
};

// Adds items group by group, then puts the groups with the longest item first, and inside a group
// the longest item.
class WorkList {
 public:
  void BeginGroup() { ++group_; }
  void Add(const WorkItem& item, int64_t cost) { entries_.push_back({item, group_, cost, 0}); }
  void Sort();
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }
  const WorkItem& operator[](int64_t index) const { return entries_[index].item; }

 private:
  struct Entry {
    WorkItem item;
    int64_t group;
    int64_t cost;
    int64_t longest;  // cost in its group
  };
  std::vector<Entry> entries_;
  int64_t group_ = 0;
};

// Items of as many query tiles as leave each thread some items.
WorkList ForwardItems(absl::Span<const CpuForwardCall> calls, int threads);

WorkList RowSumItems(absl::Span<const CpuBackwardCall> calls);
// A slot stands behind the slots before it.
WorkList GradientItems(absl::Span<const CpuBackwardCall> calls);
// `tile` counts BiasTiles of (batch_index, head) of the bias, row tiles outside.
WorkList BiasItems(absl::Span<const CpuBackwardCall> calls);
int64_t BiasColumnTiles(const Problem& problem);

}  // namespace attnd
