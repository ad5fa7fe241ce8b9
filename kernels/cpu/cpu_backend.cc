#include "kernels/cpu/cpu_backend.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "attention/cost.h"
#include "attention/mask_plans.h"
#include "base/check.h"
#include "base/cpu_quota.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"
#include "kernels/cpu/cpu_call.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/mask_choice.h"
#include "kernels/cpu/tiles.h"
#include "kernels/cpu/work_items.h"
#include "kernels/cpu/workspace.h"

namespace attnd {
namespace {

// A launch that one thread computes in this time stays there: waking the others costs as much.
constexpr double kAloneSeconds = 200e-6;
// Launches at once: while one computes, the next is prepared, and short ones run beside it.
constexpr int kLaunches = 2;

using SteadyClock = std::chrono::steady_clock;

std::string ProcessorName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!absl::StartsWith(line, "model name")) continue;
    absl::string_view name = absl::string_view(line).substr(line.find(':') + 1);
    return std::string(absl::StripAsciiWhitespace(name));
  }
  return "unknown processor";
}

int64_t PhysicalMemory() { return int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE); }

// Scratch: the aligned floats of one thread.
class Scratch {
 public:
  Scratch() : floats_(static_cast<float*>(std::aligned_alloc(64, kScratchFloats * 4))) {
    CHECK(floats_ != nullptr);
  }
  ~Scratch() { std::free(floats_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  float* floats() const { return floats_; }

 private:
  float* floats_;
};

// A launch's turn on all threads. Launches that wait have it in the order in which they came, and
// one that goes on after kSlice comes behind them: a long one holds up the others no longer.
class PoolTurns {
 public:
  class Turn {
   public:
    explicit Turn(PoolTurns& turns) : turns_(turns) { Take(); }
    ~Turn() { Give(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    // Another launch waits, and this one has had its share. Any of the pool's threads.
    bool IsOver() const {
      return turns_.last_.load(std::memory_order_relaxed) != number_ &&
             SteadyClock::now() - began_ >= kSlice;
    }
    void Pass() {
      const SteadyClock::time_point passed = SteadyClock::now();
      Give();
      Take();
      waited_ += SteadyClock::now() - passed;
    }
    SteadyClock::duration waited() const { return waited_; }  // since it was first there

   private:
    void Take() {
      absl::MutexLock lock(&turns_.mutex_);
      number_ = ++turns_.last_;
      auto ready = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return turns_.now_ == number_; };
      turns_.mutex_.Await(absl::Condition(&ready));
      began_ = SteadyClock::now();
    }
    void Give() {
      absl::MutexLock lock(&turns_.mutex_);
      ++turns_.now_;
    }

    PoolTurns& turns_;
    uint64_t number_ = 0;
    SteadyClock::time_point began_;
    SteadyClock::duration waited_{};
  };

 private:
  // Many times what it costs to pass on.
  static constexpr std::chrono::milliseconds kSlice{5};

  absl::Mutex mutex_;
  std::atomic<uint64_t> last_{0};  // that was given out
  uint64_t now_ ABSL_GUARDED_BY(mutex_) = 1;
};

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(const CpuBackendOptions& options)
      : plans_(options.mask_plans != nullptr ? options.mask_plans : std::make_shared<MaskPlans>()),
        mask_kernel_(options.mask_kernel),
        pool_(options.threads > 0 ? options.threads : AvailableCpus(), options.priority),
        scratch_(pool_.threads()) {
    info_.backend = "cpu";
    info_.device = ProcessorName();
    info_.architecture = CpuTargetName();
    info_.memory_bytes = options.memory_bytes > 0 ? options.memory_bytes : PhysicalMemory();
    info_.threads = pool_.threads();
    info_.launches = kLaunches;
    info_.flops_per_second = MeasureFlopsPerSecond(scratch_[0].floats()) * pool_.threads();
  }

  const BackendInfo& info() const override { return info_; }
  absl::Status Supports(const Problem& problem, Direction) const override {
    return problem.mask == nullptr ? absl::OkStatus() : Choose(problem).status();
  }

  absl::StatusOr<MaskKernel> KernelForMask(const Problem& problem,
                                           Direction direction) const override {
    ASSIGN_OR_RETURN(const MaskChoice choice, Choose(problem));
    return MaskKernel{.kernel = KernelName(direction, problem.element, choice.kernel),
                      .reason = ReasonOf(problem, choice),
                      .plan = HostMaskOptions()};
  }

  int64_t WorkspaceBytes(const Problem& problem, Direction direction) const override {
    return direction == Direction::kForward ? 0 : BackwardWorkspace::Bytes(problem);
  }

  absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) override {
    ASSIGN_OR_RETURN(const Prepared<ForwardCall> prepared, Prepare(calls));
    const absl::Span<const CpuForwardCall> ours = prepared.calls;
    const Lane lane = TakeLane(ours, Direction::kForward);
    const SteadyClock::time_point start = SteadyClock::now();
    Run(lane, ours, ForwardItems(ours, lane.scratch != nullptr ? 1 : pool_.threads()),
        [](const CpuForwardCall& call, const WorkItem& item, float* scratch) {
          ForwardItem(call, {item.batch_index, item.head, item.residue, item.tile, item.count},
                      scratch);
        });
    return Report(prepared, Direction::kForward, lane, start);
  }

  absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) override {
    ASSIGN_OR_RETURN(const Prepared<BackwardCall> prepared, Prepare(calls));
    const absl::Span<const CpuBackwardCall> ours = prepared.calls;
    const Lane lane = TakeLane(ours, Direction::kBackward);
    const SteadyClock::time_point start = SteadyClock::now();
    Run(lane, ours, RowSumItems(ours),
        [](const CpuBackwardCall& call, const WorkItem& item, float*) {
          RowSums(call, item.batch_index, item.head);
        });
    Run(lane, ours, GradientItems(ours),
        [](const CpuBackwardCall& call, const WorkItem& item, float* scratch) {
          GradientItem(call, {item.batch_index, item.head, item.residue, item.tile}, scratch);
        });
    Run(lane, ours, BiasItems(ours),
        [](const CpuBackwardCall& call, const WorkItem& item, float* scratch) {
          const int64_t columns = BiasColumnTiles(*call.problem);
          BiasGradientItem(call,
                           {item.batch_index, item.head, item.tile / columns, item.tile % columns},
                           scratch);
        });
    return Report(prepared, Direction::kBackward, lane, start);
  }

  absl::Status SupportsCapture() const override { return absl::OkStatus(); }

  // All masks by their lists: a map has all rows and keys.
  absl::StatusOr<CapturedMap> Capture(const ForwardCall& forward,
                                      const CaptureRequest& request) override {
    CpuForwardCall call = {forward, {}};
    std::shared_ptr<const CompiledMask> plan;
    if (forward.problem->mask != nullptr) {
      ASSIGN_OR_RETURN(plan, plans_->Get(*forward.problem, HostMaskOptions()));
      call.compiled_mask = plan.get();
    }
    const MapShape shape = {call.problem->q_len, call.problem->kv_len, request.block};
    MapSums sums(shape, kMaxQueryRows, kMaxKeyRows);
    std::vector<float> map(static_cast<size_t>(request.keep_map ? shape.rows * shape.keys : 0));
    const Lane lane = TakeLane(absl::MakeConstSpan(&call, 1), Direction::kForward);
    const auto run = [&](int64_t index, float* scratch) {
      const int64_t row_tile = index / sums.key_tiles(), key_tile = index % sums.key_tiles();
      const MapTile tile = {row_tile * kMaxQueryRows, key_tile * kMaxKeyRows};
      const float* averages = CaptureItem(call, tile, scratch);
      sums.Add(row_tile, key_tile, averages, kMaxKeyRows);
      if (!request.keep_map) return;
      const int64_t rows = std::min<int64_t>(kMaxQueryRows, shape.rows - tile.row);
      const int64_t keys = std::min<int64_t>(kMaxKeyRows, shape.keys - tile.key);
      for (int64_t row = 0; row < rows; ++row) {
        std::copy_n(averages + row * kMaxKeyRows, keys,
                    &map[(tile.row + row) * shape.keys + tile.key]);
      }
    };
    RunAll(lane, sums.row_tiles() * sums.key_tiles(), run);
    CapturedMap captured = sums.Finish();
    captured.map = std::move(map);
    return captured;
  }

 private:
  absl::StatusOr<MaskChoice> Choose(const Problem& problem) const {
    return ChooseMaskKernel(problem, mask_kernel_, *plans_);
  }

  // The calls of a launch, those with a mask by description on their way through it.
  template <class Call>
  struct Prepared {
    std::vector<CpuCall<Call>> calls;
    std::vector<std::shared_ptr<const CompiledMask>> plans;
    std::deque<Problem> problems;  // of one residue class
    std::optional<CpuMaskKernel> first;
  };
  template <class Call>
  absl::StatusOr<Prepared<Call>> Prepare(absl::Span<const Call> calls) {
    Prepared<Call> prepared;
    for (const Call& call : calls) {
      CpuCall<Call>& ours = prepared.calls.emplace_back(CpuCall<Call>{call, {}});
      if (call.problem->mask == nullptr) continue;
      ASSIGN_OR_RETURN(MaskChoice choice, Choose(*call.problem));
      if (prepared.calls.size() == 1) prepared.first = choice.kernel;
      ours.compiled_mask = choice.plan.get();
      prepared.plans.push_back(std::move(choice.plan));
      if (!choice.residues) continue;
      ours.residues = choice.residues;
      Problem& of_class = prepared.problems.emplace_back(*call.problem);
      of_class.mask = nullptr;
      of_class.causal = false;
      of_class.window_left = choice.residues->window_left;
      of_class.window_right = choice.residues->window_right;
      ours.problem = &of_class;
    }
    return prepared;
  }

  // Where a launch runs: on all threads, by turns; or, when it is too short to wake anybody, on the
  // caller's thread alone, beside other short ones. Results do not depend on it.
  struct Lane {
    std::unique_ptr<PoolTurns::Turn> turn;  // on all threads; else null
    std::shared_ptr<Scratch> scratch;       // given back by its deleter; null: on all threads
  };
  template <class Call>
  Lane TakeLane(absl::Span<const CpuCall<Call>> calls, Direction direction) {
    double flops = 0;
    for (const CpuCall<Call>& call : calls) {
      const double all = Flops(*call.problem, direction);
      flops += call.residues ? all / static_cast<double>(call.residues->p) : all;
    }
    Lane lane;
    if (flops * pool_.threads() > kAloneSeconds * info_.flops_per_second) {
      lane.turn = std::make_unique<PoolTurns::Turn>(turns_);
      return lane;
    }
    std::lock_guard<std::mutex> lock(spare_mutex_);
    if (spare_.empty()) spare_.push_back(std::make_unique<Scratch>());
    Scratch* taken = spare_.back().release();
    spare_.pop_back();
    lane.scratch = std::shared_ptr<Scratch>(taken, [this](Scratch* scratch) {
      std::lock_guard<std::mutex> lock(spare_mutex_);
      spare_.emplace_back(scratch);
    });
    return lane;
  }

  // body(call, item, scratch) for each item whose call is still wanted.
  template <class Call, class Body>
  void Run(const Lane& lane, absl::Span<const Call> calls, const WorkList& list, const Body& body) {
    auto run = [&](int64_t index, float* scratch) {
      const Call& call = calls[list[index].call];
      if (!call.stop.stop_requested()) body(call, list[index], scratch);
    };
    RunAll(lane, list.size(), run);
  }

  // run(index, scratch) for each index below `count`.
  template <class Body>
  void RunAll(const Lane& lane, int64_t count, const Body& run) {
    if (lane.turn == nullptr) {
      for (int64_t index = 0; index < count; ++index) run(index, lane.scratch->floats());
      return;
    }
    std::atomic<int64_t> next{0};
    while (next < count) {
      pool_.ParallelFor(std::min<int64_t>(count, pool_.threads()), [&](int64_t, int thread) {
        for (int64_t index; !lane.turn->IsOver() && (index = next++) < count;) {
          run(index, scratch_[thread].floats());
        }
      });
      if (next < count) lane.turn->Pass();
    }
  }

  static std::string KernelName(Direction direction, ElementType element,
                                std::optional<CpuMaskKernel> mask) {
    std::string name = absl::StrCat(
        direction == Direction::kForward ? "cpu_forward_" : "cpu_backward_", ElementName(element));
    if (mask && *mask != CpuMaskKernel::kDense) absl::StrAppend(&name, "_", NameOf(*mask));
    return name;
  }

  // Named after the first call.
  template <class Call>
  static LaunchReport Report(const Prepared<Call>& prepared, Direction direction, const Lane& lane,
                             SteadyClock::time_point start) {
    std::chrono::duration<double> spent = SteadyClock::now() - start;
    if (lane.turn != nullptr) spent -= lane.turn->waited();
    LaunchReport report;
    if (!prepared.calls.empty()) {
      report.kernel = KernelName(direction, prepared.calls[0].problem->element, prepared.first);
    }
    report.seconds = spent.count();
    return report;
  }

  BackendInfo info_;
  const std::shared_ptr<MaskPlans> plans_;
  const std::optional<CpuMaskKernel> mask_kernel_;
  ThreadPool pool_;
  std::vector<Scratch> scratch_;                 // one per thread
  PoolTurns turns_;                              // one launch on all threads at a time
  std::mutex spare_mutex_;                       // guards spare_
  std::vector<std::unique_ptr<Scratch>> spare_;  // of launches on their callers' threads
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend(const CpuBackendOptions& options) {
  return std::make_unique<CpuBackend>(options);
}

}  // namespace attnd
