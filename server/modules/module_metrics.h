// ModuleMetrics: the series of the service Modules (docs/METRICS.md). No names of modules in
// labels. Any thread.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>
#include <cstdint>

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

class ModuleMetrics {
 public:
  explicit ModuleMetrics(prometheus::Registry& registry);

  void CallFinished(ModuleMethod method, const absl::Status& status);
  // Forward and Backward, of `rows` rows.
  void Computed(bool is_forward, int64_t rows, absl::Duration queued, absl::Duration took);
  void Stepped(StepOutcome outcome);
  void BackwardReplayed() { replays_->Increment(); }

 private:
  static constexpr int kCodes = 17;
  std::array<std::array<prometheus::Counter*, kCodes>, kModuleMethods> calls_;
  std::array<std::array<prometheus::Histogram*, kModuleStages>, 2> durations_;  // [direction]
  std::array<prometheus::Counter*, 2> rows_;                                    // [direction]
  std::array<prometheus::Counter*, kStepOutcomes> steps_;
  prometheus::Counter* replays_;
};

}  // namespace attnd
