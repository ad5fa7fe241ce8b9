// ModuleMetrics: the part of Metrics that the service Modules adds to. No names of modules in
// labels. Any thread.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

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
  kSumGradients,
  kStep,
  kPutTensors,
  kGetTensors,
  kCarry
};
inline constexpr int kModuleMethods = 13;
absl::string_view ModuleMethodName(ModuleMethod method);

enum class StepOutcome : uint8_t { kApplied, kSkipped, kReplayed, kRefused };
inline constexpr int kStepOutcomes = 4;

// Parts of a Forward's or Backward's time: until its turn, and the engine's.
enum class ModuleStage : uint8_t { kQueue, kCompute };
inline constexpr int kModuleStages = 2;

// How a registration found a state that outlived the process.
enum class StateFound : uint8_t { kLoaded, kDamaged };

class ModuleMetrics {
 public:
  // See Metrics::AddModules.
  ModuleMetrics(prometheus::Registry& registry, const std::vector<std::string>& devices);

  void CallFinished(ModuleMethod method, const absl::Status& status);
  // Forward and Backward, of `rows` rows. `devices`: one, or "gpu0+gpu1".
  void Computed(const std::string& devices, bool is_forward, int64_t rows, absl::Duration queued,
                absl::Duration took);
  // Counts the work of linear ops, as plans count it.
  void Worked(const std::string& device, bool is_forward, double flops);
  void Stepped(StepOutcome outcome);
  // Layers whose activations a Backward computed again.
  void Recomputed(const std::string& device, int64_t layers);
  void BackwardReplayed() { replays_->Increment(); }
  void Saved(bool ok, int64_t bytes);
  void Recovered(StateFound found) { recoveries_[static_cast<size_t>(found)]->Increment(); }

 private:
  prometheus::Family<prometheus::Counter>& calls_;
  std::array<prometheus::Counter*, kModuleMethods> good_calls_;
  prometheus::Family<prometheus::Histogram>& durations_;
  prometheus::Family<prometheus::Counter>& flops_;
  prometheus::Family<prometheus::Counter>& recomputed_layers_;
  std::array<prometheus::Counter*, 2> rows_;  // [direction]
  std::array<prometheus::Counter*, kStepOutcomes> steps_;
  prometheus::Counter* replays_;
  std::array<prometheus::Counter*, 2> saves_;       // ok, failed
  std::array<prometheus::Counter*, 2> recoveries_;  // [StateFound]
  prometheus::Counter* saved_bytes_;
};

}  // namespace attnd
