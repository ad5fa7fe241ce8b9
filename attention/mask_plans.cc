#include "attention/mask_plans.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "attention/problem.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

template <class Number>
void Append(Number number, std::string& key) {
  key.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

std::string KeyOf(const MaskId& id, const MaskOrigin& origin, const MaskCall& call,
                  const MaskCompileOptions& options) {
  std::string key(id.begin(), id.end());
  for (int64_t number : {origin.row_begin, origin.key_begin, origin.batch_begin, origin.head_begin,
                         call.batch, call.q_heads, call.rows, call.keys}) {
    Append(number, key);
  }
  for (int64_t offset : call.offsets) Append(offset, key);
  Append(options.tile, key);
  key.push_back(static_cast<char>(options.by_rows + 2 * options.by_keys + 4 * options.row_keys));
  return key;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const CompiledMask>> MaskPlans::Get(
    const Problem& problem, const MaskCompileOptions& options) {
  const MaskCall call = MaskCallOf(problem);
  const std::string key = KeyOf(problem.mask->id(), problem.mask_origin, call, options);
  const std::shared_ptr<Plan> plan = Find(key);
  absl::MutexLock lock(&plan->mutex);
  if (plan->compiled != nullptr) return plan->compiled;
  const absl::Time start = absl::Now();
  absl::StatusOr<CompiledMask> compiled =
      CompiledMask::Make(*problem.mask, problem.mask_origin, call, options);
  if (!compiled.ok()) {
    Account(key, plan, 0, absl::ZeroDuration());
    return compiled.status();
  }
  plan->compiled = std::make_shared<const CompiledMask>(*std::move(compiled));
  Account(key, plan, plan->compiled->bytes() + static_cast<int64_t>(key.size()),
          absl::Now() - start);
  return plan->compiled;
}

std::shared_ptr<MaskPlans::Plan> MaskPlans::Find(const std::string& key) {
  absl::MutexLock lock(&mutex_);
  auto found = plans_.find(key);
  if (found != plans_.end()) {
    ++stats_.hits;
    order_.splice(order_.begin(), order_, found->second->at);
    return found->second;
  }
  ++stats_.misses;
  auto plan = std::make_shared<Plan>();
  plan->at = order_.insert(order_.begin(), key);
  plans_.emplace(key, plan);
  return plan;
}

void MaskPlans::Account(const std::string& key, const std::shared_ptr<Plan>& plan, int64_t bytes,
                        absl::Duration took) {
  absl::MutexLock lock(&mutex_);
  auto found = plans_.find(key);
  if (found == plans_.end() || found->second != plan) return;  // pushed out meanwhile
  if (bytes == 0) {
    order_.erase(plan->at);
    plans_.erase(found);
    return;
  }
  plan->bytes = bytes;
  stats_.bytes += bytes;
  stats_.compile_seconds += absl::ToDoubleSeconds(took);
  while (stats_.bytes > max_bytes_) {
    auto oldest = plans_.find(order_.back());
    stats_.bytes -= oldest->second->bytes;
    plans_.erase(oldest);
    order_.pop_back();
  }
}

MaskPlansStats MaskPlans::stats() const {
  absl::MutexLock lock(&mutex_);
  MaskPlansStats stats = stats_;
  stats.plans = static_cast<int64_t>(plans_.size());
  return stats;
}

double VisitedShare(const CompiledMask& compiled, const Problem& p) {
  double visited = 0, all = 0;
  for (int64_t b = 0; b < (compiled.varies_by_batch() ? p.batch : 1); ++b) {
    for (int64_t h = 0; h < (compiled.varies_by_head() ? p.q_heads : 1); ++h) {
      const MaskPlan& plan = compiled.PlanAt(b, h);
      const double scores = static_cast<double>(plan.rows) * static_cast<double>(plan.keys);
      const double tile = static_cast<double>(plan.tile.rows) * plan.tile.keys;
      visited += std::min(scores, static_cast<double>(plan.full_tiles + plan.partial_tiles) * tile);
      all += scores;
    }
  }
  return all == 0 ? 1 : visited / all;
}

absl::Status CheckEmptyRows(const CompiledMask& compiled, const Problem& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence sequence = p.SequenceAt(b);
    for (int64_t h = 0; h < (compiled.varies_by_head() ? p.q_heads : 1); ++h) {
      const MaskPlan& plan = compiled.PlanAt(b, h);
      for (int64_t row = 0; row < sequence.q_len; ++row) {
        const KeyRange range = p.VisibleRange(sequence, row);
        if (range.begin < range.end && plan.CountVisible(row, range.begin, range.end) > 0) continue;
        return absl::InvalidArgumentError(
            absl::StrCat("problem.mask.empty_row: expected a visible key for every row, got none "
                         "for row ",
                         row, " of head ", h, " of batch entry ", b));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace attnd
