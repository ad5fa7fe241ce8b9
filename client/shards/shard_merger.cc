#include "client/shards/shard_merger.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/check.h"

namespace attnd {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Where a row of a [heads, rows, dim] tensor begins, in the order in which a shard stores it.
struct Place {
  bool rows_first;
  int64_t heads, rows, dim;
  int64_t At(int64_t head, int64_t row) const {
    return (rows_first ? row * heads + head : head * rows + row) * dim;
  }
};

Place PlaceOf(const Problem& p, int64_t heads, int64_t rows, int64_t dim) {
  bool rows_first = p.layout == Layout::kBlhd || p.layout == Layout::kPackedThd;
  return {rows_first, heads, rows, dim};
}

void ScatterTo(const StridedRuns& runs, const void* from, void* tensor) {
  if (tensor == nullptr) return;
  RunCursor(runs, static_cast<std::byte*>(tensor))
      .Scatter(static_cast<const std::byte*>(from), runs.total_bytes());
}

// A part's share of one row: its weight is exp(lse) relative to the others'.
struct Share {
  float lse;
  const void* o;
  int64_t at;  // first number of the row in o
};

// Writes the merged row to `o` at `at`; returns its lse. `sink`: a further logit without value.
float MergeRow(ElementType element, int64_t dim, const std::vector<Share>& shares, float sink,
               void* o, int64_t at) {
  float most = -kInfinity;
  for (const Share& share : shares) most = std::max(most, share.lse);
  std::vector<float> sum(dim, 0.0f);
  double total = 0;
  bool visible = false;
  for (const Share& share : shares) {
    if (share.lse == -kInfinity) continue;  // sees nothing
    visible = true;
    most = std::max(most, sink);
    double weight = std::exp(double{share.lse} - most);
    total += weight;
    for (int64_t n = 0; n < dim; ++n) {
      sum[n] += static_cast<float>(weight) * LoadElement(element, share.o, share.at + n);
    }
  }
  if (!visible) total = 1;
  if (visible && sink != -kInfinity) total += std::exp(double{sink} - most);
  for (int64_t n = 0; n < dim; ++n) {
    StoreElement(element, o, at + n, visible ? sum[n] / static_cast<float>(total) : 0.0f);
  }
  return visible ? static_cast<float>(most + std::log(total)) : -kInfinity;
}

}  // namespace

ShardMerger::ShardMerger(const Problem& problem, const std::vector<ShardRange>& shards,
                         Direction direction, const Outputs& outputs)
    : problem_(problem),
      shards_(shards),
      direction_(direction),
      outputs_(outputs),
      parts_(shards.size()),
      group_of_(shards.size(), -1) {
  absl::MutexLock lock(&mutex_);
  for (size_t n = 0; n < shards.size(); ++n) {
    if (!IsPartial(shards[n], direction)) continue;
    bool joins = n > 0 && group_of_[n - 1] >= 0 &&
                 shards[n - 1].batch_begin == shards[n].batch_begin &&
                 shards[n - 1].kv_head_begin == shards[n].kv_head_begin;
    if (!joins) groups_.push_back({static_cast<int64_t>(n), 0, 0});
    ++groups_.back().count;
    ++groups_.back().missing;
    group_of_[n] = static_cast<int64_t>(groups_.size()) - 1;
  }
}

bool ShardMerger::IsNeeded(const std::vector<ShardRange>& shards, Direction direction) {
  return std::any_of(shards.begin(), shards.end(),
                     [&](const ShardRange& range) { return IsPartial(range, direction); });
}

void ShardMerger::Add(int64_t shard, ShardPart part) {
  CHECK(group_of_[shard] >= 0) << "shard " << shard << " is whole";
  Group group;
  {
    absl::MutexLock lock(&mutex_);
    parts_[shard] = std::move(part);
    Group& own = groups_[group_of_[shard]];
    if (--own.missing > 0) return;
    group = own;
  }
  Merge(group);
}

void ShardMerger::Merge(const Group& group) {
  ShardRange whole = shards_[group.first];
  whole.cut = Cut::kNone;
  whole.row_begin = whole.row_count = whole.key_begin = whole.key_count = 0;
  direction_ == Direction::kForward ? MergeForward(group, whole) : MergeBackward(group, whole);
  for (int64_t n = group.first; n < group.first + group.count; ++n) parts_[n] = {};
}

void ShardMerger::MergeForward(const Group& group, const ShardRange& whole) {
  const Problem sub = SubProblem(problem_, whole);
  const int64_t dim = sub.v_head_dim;
  const Place place = PlaceOf(sub, sub.q_heads, sub.q_len, dim);
  std::vector<std::byte> o(sub.OutputElements() * ElementBytes(sub.element));
  std::vector<float> lse(sub.LseElements());
  std::vector<Share> shares;
  for (int64_t head = 0; head < sub.q_heads; ++head) {
    const float sink = sub.sink_logits.empty() ? -kInfinity : sub.sink_logits[head];
    for (int64_t row = 0; row < sub.q_len; ++row) {
      shares.clear();
      for (int64_t n = group.first; n < group.first + group.count; ++n) {
        const ShardRange& r = shards_[n];
        const int64_t at = row - r.row_begin;
        if (parts_[n].lse.empty() || at < 0 || at >= r.row_count) continue;
        shares.push_back({parts_[n].lse[head * r.row_count + at], parts_[n].o.data(),
                          PlaceOf(sub, sub.q_heads, r.row_count, dim).At(head, at)});
      }
      lse[head * sub.q_len + row] =
          MergeRow(sub.element, dim, shares, sink, o.data(), place.At(head, row));
    }
  }
  const ShardRuns runs = ShardRunsOf(problem_, whole);
  ScatterTo(runs.o, o.data(), outputs_.o);
  ScatterTo(runs.lse, lse.data(), outputs_.lse);
}

void ShardMerger::MergeBackward(const Group& group, const ShardRange& whole) {
  const Problem sub = SubProblem(problem_, whole);
  const ShardRuns runs = ShardRunsOf(problem_, whole);
  ScatterTo(runs.k, SumOfParts(group, &ShardPart::d_k, sub, sub.qk_head_dim).data(), outputs_.d_k);
  ScatterTo(runs.v, SumOfParts(group, &ShardPart::d_v, sub, sub.v_head_dim).data(), outputs_.d_v);
  if (sub.denominator != DenominatorKind::kSink) return;
  std::vector<float> d_sink(sub.q_heads, 0.0f);
  for (int64_t n = group.first; n < group.first + group.count; ++n) {
    for (size_t h = 0; h < parts_[n].d_sink.size(); ++h) d_sink[h] += parts_[n].d_sink[h];
  }
  ScatterTo(runs.d_sink, d_sink.data(), outputs_.d_sink);
}

std::vector<std::byte> ShardMerger::SumOfParts(const Group& group,
                                               std::vector<std::byte> ShardPart::*tensor,
                                               const Problem& sub, int64_t dim) const {
  const Place place = PlaceOf(sub, sub.kv_heads, sub.kv_len, dim);
  std::vector<float> sum(sub.kv_heads * sub.kv_len * dim, 0.0f);
  for (int64_t n = group.first; n < group.first + group.count; ++n) {
    const ShardRange& r = shards_[n];
    const std::vector<std::byte>& part = parts_[n].*tensor;
    if (part.empty()) continue;
    const Place from = PlaceOf(sub, sub.kv_heads, r.key_count, dim);
    for (int64_t head = 0; head < sub.kv_heads; ++head) {
      for (int64_t key = 0; key < r.key_count; ++key) {
        float* into = sum.data() + place.At(head, r.key_begin + key);
        const int64_t at = from.At(head, key);
        for (int64_t d = 0; d < dim; ++d) into[d] += LoadElement(sub.element, part.data(), at + d);
      }
    }
  }
  std::vector<std::byte> rounded(sum.size() * ElementBytes(sub.element));
  for (size_t n = 0; n < sum.size(); ++n) {
    StoreElement(sub.element, rounded.data(), static_cast<int64_t>(n), sum[n]);
  }
  return rounded;
}

}  // namespace attnd
