// PlanSearch: how the layers of modules run on one GPU, measured when a module is made: which ops
// are one kernel, exactly (modules/segments/search.h), then what products take
// (product_tuning.h), candidate by candidate. What was found for a block, rows and GPU is kept
// (PlanCache) and not measured again. What is chosen by bounds and predictions stays unless
// another takes kMargin less, both measured in turns. No bit depends on it.
//
// A sample is the median of kRuns runs of some segments, each of some ms at most, by the GPU's own
// events, on the module's own memory. Its launches take turns with all others. Parts that do not
// fit the budget stay as they are chosen without measuring.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/layers/cuda/plan_cache.h"
#include "kernels/layers/cuda/product_tuning.h"
#include "modules/graph.h"
#include "modules/module_engine.h"
#include "modules/plan.h"
#include "modules/segments/scheme.h"

namespace attnd {

// Some segments of one block in one direction, in the order of forward.
struct SegmentPart {
  int64_t block = 0;
  Direction direction = Direction::kForward;
  std::vector<OpSegment> segments;
};

// Seconds that all kernels of an instance have taken, from what the GPU's events say: for tests
// that lie. Null: as they say.
using SampleClock = std::function<double(double seconds)>;

// SegmentBench: the instance that a search measures on.
class SegmentBench {
 public:
  virtual ~SegmentBench() = default;
  // Runs the part so many times, one after the other, attention left out.
  // The device's seconds for all of them.
  virtual absl::StatusOr<double> Seconds(const SegmentPart& part, const ProductTuning& tuning,
                                         int times) = 0;
  // Tells the choices that the products of the part have.
  virtual absl::StatusOr<ProductLog> ProductsOf(const SegmentPart& part) = 0;
  virtual bool trains() const = 0;
  virtual absl::Status Finish() = 0;  // last: leaves all as it was
};

// Takes samples of a bench, within a budget.
class PartSampler {
 public:
  static constexpr int kRuns = 5;
  static constexpr double kRunSeconds = 4e-4, kMostTimes = 16;

  struct Budget {
    int samples = 90;
    double seconds = 3;
  };
  // Seconds of a clock that is never set.
  using Now = std::function<double()>;
  static double MonotonicNow();

  // The bench outlives it.
  PartSampler(SegmentBench& bench, Budget budget, Now now)
      : bench_(bench), budget_(budget), now_(std::move(now)), begin_(now_()) {}

  // Microseconds of each of these: medians, measured in turns. Empty: the budget is spent.
  struct Candidate {
    const SegmentPart& part;
    const ProductTuning& tuning;
  };
  absl::StatusOr<std::vector<double>> Measure(absl::Span<const Candidate> candidates);
  bool HasBudgetFor(size_t samples) const;

  SegmentBench& bench() const { return bench_; }
  int samples() const { return samples_; }
  double seconds() const { return now_() - begin_; }

 private:
  SegmentBench& bench_;
  const Budget budget_;
  const Now now_;
  const double begin_;
  int samples_ = 0;
};

// One block's search. `rows`: what a call of the bench has.
absl::StatusOr<BlockChoice> SearchBlock(PartSampler& sampler, const ModuleGraph& graph,
                                        int64_t block, const RowCounts& rows, const GpuRates& gpu);

class PlanSearch {
 public:
  struct Choice {
    std::vector<BlockEnds> blocks;
    ProductTuning tuning;
  };
  // Makes a bench when something has to be measured.
  using MakeBench = std::function<absl::StatusOr<std::unique_ptr<SegmentBench>>()>;

  // `gpu`: all that times depend on; `cache` may be null. `budget`: of each module.
  PlanSearch(std::string gpu, const GpuRates& rates, std::shared_ptr<PlanCache> cache,
             PartSampler::Budget budget = {}, PartSampler::Now now = &PartSampler::MonotonicNow)
      : gpu_(std::move(gpu)),
        rates_(rates),
        cache_(std::move(cache)),
        budget_(budget),
        now_(std::move(now)) {}

  // One module at a time is measured. Errors: the bench's.
  absl::StatusOr<Choice> Choose(const ModuleGraph& graph, const ModuleLimits& limits,
                                const MakeBench& make_bench);
  SearchTotals totals() const;
  // Names the plan of one block in the cache.
  std::string KeyOf(const ModuleGraph& graph, int64_t block, const ModuleLimits& limits) const;

 private:
  std::optional<BlockChoice> Kept(const ModuleGraph& graph, int64_t block,
                                  const std::string& key) const;

  const std::string gpu_;
  const GpuRates rates_;
  const std::shared_ptr<PlanCache> cache_;  // of all GPUs
  const PartSampler::Budget budget_;
  const PartSampler::Now now_;
  absl::Mutex measuring_;  // held by the module that is measured
  mutable absl::Mutex mutex_;
  SearchTotals totals_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
