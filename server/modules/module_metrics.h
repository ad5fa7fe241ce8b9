// ModuleMetrics: the series of the service Modules (docs/METRICS.md). No names of modules in
// labels. Any thread.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace attnd {

enum class ModuleMethod : uint8_t {
  kRegister,
  kGetModule,
  kListModules,
  kRenew,
  kRelease,
  kForward,
  kBackward,
  kGradientStats,
  kStep,
  kPutTensors,
  kGetTensors
};
inline constexpr int kModuleMethods = 11;
absl::string_view ModuleMethodName(ModuleMethod method);

enum class StepOutcome : uint8_t { kApplied, kSkipped, kReplayed, kRefused };
inline constexpr int kStepOutcomes = 4;

// Parts of a Forward's or Backward's time: until its turn, and the engine's.
enum class ModuleStage : uint8_t { kQueue, kCompute };
inline constexpr int kModuleStages = 2;

// What a registration found where states outlive the process.
enum class StateFound : uint8_t { kLoaded, kDamaged };

class ModuleMetrics {
 public:
  // `device`: what computes them.
  ModuleMetrics(prometheus::Registry& registry, const std::string& device);

  void CallFinished(ModuleMethod method, const absl::Status& status);
  // Forward and Backward, of `rows` rows.
  void Computed(bool is_forward, int64_t rows, absl::Duration queued, absl::Duration took);
  // Of linear ops, as plans count them.
  void Worked(bool is_forward, double flops) { flops_[is_forward ? 0 : 1]->Increment(flops); }
  void Stepped(StepOutcome outcome);
  // Layers whose activations a Backward computed again.
  void Recomputed(int64_t layers) { recomputed_layers_->Increment(static_cast<double>(layers)); }
  void BackwardReplayed() { replays_->Increment(); }
  void Saved(bool ok, int64_t bytes);
  void Recovered(StateFound found) { recoveries_[static_cast<size_t>(found)]->Increment(); }

 private:
  prometheus::Family<prometheus::Counter>& calls_;
  std::array<prometheus::Counter*, kModuleMethods> good_calls_;
  std::array<std::array<prometheus::Histogram*, kModuleStages>, 2> durations_;  // [direction]
  std::array<prometheus::Counter*, 2> rows_;                                    // [direction]
  std::array<prometheus::Counter*, kStepOutcomes> steps_;
  prometheus::Counter* replays_;
  prometheus::Counter* recomputed_layers_;
  std::array<prometheus::Counter*, 2> flops_;       // [direction]
  std::array<prometheus::Counter*, 2> saves_;       // ok, failed
  std::array<prometheus::Counter*, 2> recoveries_;  // [StateFound]
  prometheus::Counter* saved_bytes_;
};

}  // namespace attnd
