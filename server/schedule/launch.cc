#include "server/schedule/launch.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"
#include "server/schedule/engine_call.h"

namespace attnd {
namespace {

constexpr absl::Duration kMemoryRetryDelay = absl::Milliseconds(50);

absl::Status NoDeviceMemory(const absl::Status& status) {
  return WithRetryAfter(Failure(absl::StatusCode::kUnavailable, reason::kHbmPressure,
                                absl::StrCat("full now: ", status.message())),
                        kMemoryRetryDelay);
}

absl::StatusOr<LaunchReport> Forward(const DeviceWorkerDeps& deps, Launch& launch) {
  std::vector<ForwardCall> calls;
  calls.reserve(launch.size());
  for (LaunchedCall& launched : launch) {
    calls.push_back(EngineForward(launched.call, launched.stop));
    if (launched.call.keeps_on_device()) calls.back().kept = &launched.kept;
  }
  return deps.backend.Forward(calls);
}

absl::StatusOr<LaunchReport> Backward(const DeviceWorkerDeps& deps, const Launch& launch) {
  std::vector<BackwardCall> calls;
  calls.reserve(launch.size());
  for (const LaunchedCall& launched : launch) {
    calls.push_back(EngineBackward(launched.call, launched.stop));
    const ResidualTensors* residual = launched.call.memory().residual.get();
    if (residual != nullptr) calls.back().residual = residual->on_device();
  }
  return deps.backend.Backward(calls);
}

absl::StatusOr<LaunchReport> ComputeOnce(const DeviceWorkerDeps& deps, Launch& launch) {
  const Direction direction = launch.front().call.call().direction();
  return direction == Direction::kForward ? Forward(deps, launch) : Backward(deps, launch);
}

// The attention map of a call whose forward has run, compared with the one before and kept, as the
// call asks.
absl::Status Capture(const DeviceWorkerDeps& deps, LaunchedCall& launched) {
  const ForwardCall forward = EngineForward(launched.call, launched.stop);
  const CaptureWish& wish = *launched.call.call().capture();
  const KeptMap* previous = launched.call.memory().previous_map.get();
  ASSIGN_OR_RETURN(CapturedMap map, deps.backend.Capture(forward, {.block = wish.block,
                                                                   .keep_map = wish.needs_map()}));
  CaptureResult& result = launched.captured.emplace();
  if (previous != nullptr) result.distance = FrobeniusDistance(previous->map, map.map);
  KeptMap kept = {forward.problem->q_len, forward.problem->kv_len, std::move(map.map)};
  map.map.clear();
  result.map = std::move(map);
  if (wish.keep && deps.maps != nullptr && !launched.stop.stop_requested()) {
    result.token = deps.maps->Keep(std::move(kept), launched.call.context().caller);
  }
  return absl::OkStatus();
}

// Captures the maps of those calls of a launch that ask for it; the time it takes is the launch's.
absl::Status CaptureAll(const DeviceWorkerDeps& deps, Launch& launch, LaunchReport& report) {
  for (LaunchedCall& launched : launch) {
    if (launched.call.call().capture() == nullptr) continue;
    const absl::Time begin = deps.clock.Now();
    RETURN_IF_ERROR(Capture(deps, launched));
    report.seconds += absl::ToDoubleSeconds(deps.clock.Now() - begin);
  }
  return absl::OkStatus();
}

// The engine's waits for its turn count as queue: what is left of [begin, end) when the kernel and
// the transfers are taken off.
void NoteTimes(Launch& launch, const LaunchReport& report, absl::Time begin, absl::Time end) {
  absl::Time kernel_end = std::max(begin, end - absl::Seconds(report.download_seconds));
  absl::Time kernel_begin = std::max(begin, kernel_end - absl::Seconds(report.seconds));
  absl::Duration upload = std::min(absl::Seconds(report.upload_seconds), kernel_begin - begin);
  double flops = 0;
  for (const LaunchedCall& launched : launch) flops += launched.call.flops();
  for (LaunchedCall& launched : launch) {
    launched.times.compute = (kernel_end - kernel_begin) * (launched.call.flops() / flops);
    launched.times.upload = upload;
    launched.times.kernel_begin = kernel_begin;
    launched.times.kernel_end = kernel_end;
    launched.times.downloaded = end;
  }
}

void Learn(const DeviceWorkerDeps& deps, const Launch& launch, const LaunchReport& report) {
  double flops = 0;
  int64_t bytes = 0, tokens = 0;
  bool whole = true;  // a kernel that was stopped says nothing of the rate
  for (const LaunchedCall& launched : launch) {
    const AttentionCall& call = launched.call.call();
    flops += launched.call.flops();
    bytes += call.input_bytes() + call.output_bytes();
    tokens += Metrics::TokensOf(call);
    whole = whole && !launched.stop.stop_requested();
  }
  const AttentionCall& first = launch.front().call.call();
  if (whole) deps.cost.Learn(first.problem(), first.direction(), flops, bytes, report.seconds);
  deps.metrics.BatchRun(first.direction(), static_cast<int>(launch.size()), tokens);
}

}  // namespace

absl::StatusOr<LaunchReport> Compute(const DeviceWorkerDeps& deps, Launch& launch) {
  const absl::Time begin = deps.clock.Now();
  absl::StatusOr<LaunchReport> report = ComputeOnce(deps, launch);
  while (absl::IsResourceExhausted(report.status()) && deps.leases != nullptr &&
         deps.leases->EvictOne(deps.device)) {
    report = ComputeOnce(deps, launch);
  }
  if (absl::IsResourceExhausted(report.status())) return NoDeviceMemory(report.status());
  if (!report.ok()) return report;
  Learn(deps, launch, *report);
  RETURN_IF_ERROR(CaptureAll(deps, launch, *report));
  NoteTimes(launch, *report, begin, deps.clock.Now());
  return report;
}

}  // namespace attnd
