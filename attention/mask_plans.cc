#include "attention/mask_plans.h"

#include <algorithm>
#include <iterator>
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
  std::string key;
  key.reserve(256);
  key.assign(id.begin(), id.end());
  for (int64_t number : {origin.row_begin, origin.key_begin, origin.batch_begin, origin.head_begin,
                         call.batch, call.q_heads, call.rows, call.keys}) {
    Append(number, key);
  }
  for (int64_t offset : call.offsets) Append(offset, key);
  Append(options.tile, key);
  key.push_back(static_cast<char>(options.by_rows + 2 * options.by_keys + 4 * options.row_keys));
  return key;
}

// Each row walks through the tiles of its line.
absl::Status CheckRowSteps(const CompiledMask& compiled, const Problem& p, int64_t heads) {
  int64_t steps = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const MaskPlan& plan = compiled.PlanAt(b, h);
      steps += plan.rows + (plan.full_tiles + plan.partial_tiles) * plan.tile.rows;
    }
  }
  if (steps <= kMaxRowSteps) return absl::OkStatus();
  return absl::OutOfRangeError(
      absl::StrCat("problem.mask.empty_row: expected at most ", kMaxRowSteps,
                   " tiles of rows to look for empty ones in, got ", steps,
                   "; send EMPTY_ROW_ZERO, or fewer batch entries and heads"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const CompiledMask>> MaskPlans::Get(
    const Problem& problem, const MaskCompileOptions& options) {
  const MaskCall call = MaskCallOf(problem);
  const std::string key = KeyOf(problem.mask->id(), problem.mask_origin, call, options);
  const std::shared_ptr<Plan> plan = FindOrAdd(key);
  absl::MutexLock lock(&plan->mutex);
  {
    absl::MutexLock all(&mutex_);
    if (plan->compiled != nullptr) return plan->compiled;
    if (auto compiled = FindCompiled(key); compiled != nullptr) return compiled;
  }
  const absl::Time start = absl::Now();
  absl::StatusOr<CompiledMask> made =
      CompiledMask::Make(*problem.mask, problem.mask_origin, call, options);
  if (!made.ok()) {
    Account(key, plan, nullptr, absl::ZeroDuration());
    return made.status();
  }
  auto compiled = std::make_shared<const CompiledMask>(*std::move(made));
  Account(key, plan, compiled, absl::Now() - start);
  return compiled;
}

std::shared_ptr<const CompiledMask> MaskPlans::Find(const Problem& problem,
                                                    const MaskCompileOptions& options) {
  const std::string key =
      KeyOf(problem.mask->id(), problem.mask_origin, MaskCallOf(problem), options);
  absl::MutexLock lock(&mutex_);
  std::shared_ptr<const CompiledMask> compiled = FindCompiled(key);
  if (compiled == nullptr) return nullptr;
  ++stats_.hits;
  auto found = plans_.find(key);
  if (found != plans_.end()) order_.splice(order_.begin(), order_, found->second->at);
  return compiled;
}

std::shared_ptr<const CompiledMask> MaskPlans::FindCompiled(const std::string& key) {
  auto found = plans_.find(key);
  if (found != plans_.end() && found->second->compiled != nullptr) return found->second->compiled;
  auto dropped = dropped_.find(key);
  return dropped == dropped_.end() ? nullptr : dropped->second.lock();
}

std::shared_ptr<MaskPlans::Plan> MaskPlans::FindOrAdd(const std::string& key) {
  absl::MutexLock lock(&mutex_);
  auto found = plans_.find(key);
  if (found != plans_.end()) {
    ++stats_.hits;
    order_.splice(order_.begin(), order_, found->second->at);
    return found->second;
  }
  auto plan = std::make_shared<Plan>();
  if (auto compiled = FindCompiled(key); compiled != nullptr) {
    ++stats_.hits;
    plan->compiled = std::move(compiled);
    return plan;
  }
  ++stats_.misses;
  plan->at = order_.insert(order_.begin(), key);
  plans_.emplace(key, plan);
  return plan;
}

void MaskPlans::Account(const std::string& key, const std::shared_ptr<Plan>& plan,
                        std::shared_ptr<const CompiledMask> compiled, absl::Duration took) {
  absl::MutexLock lock(&mutex_);
  stats_.compile_seconds += absl::ToDoubleSeconds(took);
  auto found = plans_.find(key);
  if (found == plans_.end() || found->second != plan) {  // pushed out meanwhile
    plan->compiled = compiled;                           // for those who wait
    if (compiled != nullptr) dropped_[key] = compiled;
    return;
  }
  if (compiled == nullptr) {
    order_.erase(plan->at);
    plans_.erase(found);
    return;
  }
  plan->bytes = compiled->bytes() + static_cast<int64_t>(key.size());
  plan->compiled = std::move(compiled);
  stats_.bytes += plan->bytes;
  while (stats_.bytes > max_bytes_) DropOldest();
}

// One that is being compiled weighs nothing yet, but may be the oldest.
void MaskPlans::DropOldest() {
  auto oldest = plans_.find(order_.back());
  for (auto at = dropped_.begin(); at != dropped_.end();) {
    at = at->second.expired() ? dropped_.erase(at) : std::next(at);
  }
  if (oldest->second->compiled != nullptr) dropped_[order_.back()] = oldest->second->compiled;
  stats_.bytes -= oldest->second->bytes;
  plans_.erase(oldest);
  order_.pop_back();
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

MaskTotals TotalsOf(const CompiledMask& compiled, const Problem& p) {
  MaskTotals totals;
  const int64_t batch = compiled.varies_by_batch() ? p.batch : 1;
  const int64_t heads = compiled.varies_by_head() ? p.q_heads : 1;
  const int64_t alike = p.batch / batch * (p.q_heads / heads);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const MaskPlan& plan = compiled.PlanAt(b, h);
      const auto tiles = [](int64_t length, int64_t tile) { return (length + tile - 1) / tile; };
      totals.visible += alike * plan.visible;
      totals.empty_rows += alike * plan.empty_rows;
      totals.tiles += alike * tiles(plan.rows, plan.tile.rows) * tiles(plan.keys, plan.tile.keys);
      totals.tiles_full += alike * plan.full_tiles;
      totals.tiles_partial += alike * plan.partial_tiles;
    }
  }
  for (const MaskPlan& plan : compiled.plans()) totals.distinct_bitmaps += plan.bitmap_count();
  return totals;
}

absl::Status CheckEmptyRows(const CompiledMask& compiled, const Problem& p) {
  const int64_t heads = compiled.varies_by_head() ? p.q_heads : 1;
  RETURN_IF_ERROR(CheckRowSteps(compiled, p, heads));
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence sequence = p.SequenceAt(b);
    for (int64_t h = 0; h < heads; ++h) {
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
