// Launch: the calls of one batch as a slot works on them, and their computation by one engine.
// Threads: each launch belongs to one slot.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "kernels/backend.h"
#include "server/admission/admission.h"
#include "server/admission/cost_model.h"
#include "server/keep/lease_table.h"
#include "server/keep/map_table.h"
#include "server/metrics/metrics.h"
#include "server/schedule/result.h"

namespace attnd {

// The objects that a worker uses and does not own; all outlive it.
struct DeviceWorkerDeps {
  Backend& backend;
  CostModel& cost;
  Metrics& metrics;
  const Clock& clock;
  int device = 0;                // its number for Admission and leases
  LeaseTable* leases = nullptr;  // null: nothing is kept
  // Called once, from a slot, when the engine says that its device is lost (IsDeviceLost).
  std::function<void(const absl::Status&)> on_lost = nullptr;
  MapTable* maps = nullptr;  // null: no attention map is kept
};

struct LaunchedCall {
  LaunchedCall(AdmittedCall admitted, std::stop_token token)
      : call(std::move(admitted)), stop(std::move(token)) {}
  AdmittedCall call;
  std::stop_token stop;
  CallTimes times;
  std::unique_ptr<DeviceResidual> kept;  // what a kept forward left on the device
  std::optional<CaptureResult> captured;
};
using Launch = std::vector<LaunchedCall>;

// Runs a launch, notes its times and teaches the cost model. When the device's free memory lies in
// pieces between leases, leases are evicted. Errors: the engine's; UNAVAILABLE HBM_PRESSURE.
absl::StatusOr<LaunchReport> Compute(const DeviceWorkerDeps& deps, Launch& launch);

}  // namespace attnd
