// DeviceWorker: drives one engine. Each of its slots is a thread that takes a batch of landed
// calls, launches, and answers; the engine decides what of several launches overlaps. A small call
// that finds the engine idle runs on the thread that submits it: to wake a slot would take longer.
// Late and cancelled calls are dropped at each boundary (queue, kernel, answer), and a running
// launch is told by its calls' stop tokens; memory is back as soon as the call is answered.
//
// A kept forward leaves its tensors on the device, where the engine can, else in staging memory.
// A lost device: every call here and to come is answered UNAVAILABLE (DEVICE_LOST).
// Submit, Cancel: any thread. Each submitted call is answered exactly once, on any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "base/clock.h"
#include "kernels/backend.h"
#include "server/admission.h"
#include "server/batcher.h"
#include "server/cost_model.h"
#include "server/deadline_timer.h"
#include "server/lease_table.h"
#include "server/metrics.h"
#include "server/result.h"

namespace attnd {

struct DeviceWorkerOptions {
  BatcherLimits batcher;
  int slots = 0;  // batches in work at once; 0: as many as the engine overlaps
  // A call that is estimated to take no longer, and finds nothing in work, runs inside Submit.
  absl::Duration inline_time = absl::ZeroDuration();
};

// What a worker needs and does not own; all outlive it.
struct DeviceWorkerDeps {
  Backend& backend;
  CostModel& cost;
  Metrics& metrics;
  const Clock& clock;
  int device = 0;                // its number for Admission and leases
  LeaseTable* leases = nullptr;  // null: nothing is kept
  // Called once, from a slot, when the engine says that its device is lost (IsDeviceLost).
  std::function<void(const absl::Status&)> on_lost = nullptr;
};

enum class StopCause : uint8_t { kNone, kCancelled, kExpired };

class DeviceWorker {
 public:
  DeviceWorker(const DeviceWorkerDeps& deps, const DeviceWorkerOptions& options);
  // Answers what still waits with CANCELLED and stops what runs.
  ~DeviceWorker();

  // Its inputs have landed. It may be answered before this returns.
  void Submit(AdmittedCall call);
  // The caller is gone, or its time is up. No effect on a call that has been answered.
  void Cancel(uint64_t id, StopCause cause);
  // The device has failed for good, as somebody else knows.
  void Lose(const absl::Status& status) { LoseDevice(DeviceLost(status)); }
  size_t queued() const;

 private:
  // A call that a slot works on.
  struct Running {
    Running(AdmittedCall admitted, std::stop_token token)
        : call(std::move(admitted)), stop(std::move(token)) {}
    AdmittedCall call;
    std::stop_token stop;
    CallTimes times;
    std::unique_ptr<DeviceResidual> kept;  // what a kept forward left on the device
  };
  using Launch = std::vector<Running>;
  struct StopState {
    std::stop_source source;
    StopCause cause = StopCause::kNone;
  };

  void SlotMain();
  // Empty when the worker stops.
  Launch NextLaunch() ABSL_LOCKS_EXCLUDED(mutex_);
  bool RunsInline(const AdmittedCall& call) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The next batch, which is in work until EndLaunch; empty when nothing waits.
  Launch TakeLaunch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // From now on it can be stopped.
  void Begin(AdmittedCall call, absl::Time now, Launch& launch)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `seconds`: estimated, of what was computed.
  void EndLaunch(double seconds) ABSL_LOCKS_EXCLUDED(mutex_);
  double Run(Launch launch);
  void DropLate(Launch& launch, WorkStage stage);
  absl::Status LateStatus(const Running& running, WorkStage stage);
  void NoteTimes(Launch& launch, const LaunchReport& report, absl::Time begin, absl::Time end);
  absl::StatusOr<LaunchReport> Compute(Launch& launch);
  absl::StatusOr<LaunchReport> ComputeOnce(Launch& launch);
  absl::StatusOr<LaunchReport> ComputeForward(Launch& launch);
  absl::StatusOr<LaunchReport> ComputeBackward(const Launch& launch);
  bool KeepsOnDevice(const AttentionCall& call) const;
  void AnswerAll(Launch launch, const absl::StatusOr<LaunchReport>& report);
  void Answer(Running& running, const LaunchReport& report, int batched_with);
  void KeepOutputs(Running& running, Result& result);
  void LeaseHostMemory(Running& running, Result& result);
  void LeaseDeviceMemory(Running& running, Result& result);
  void Fail(AdmittedCall call, absl::Status status);
  std::vector<AdmittedCall> TakeWaiting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailWaiting(std::vector<AdmittedCall> waiting, const absl::Status& status);
  void LoseDevice(const absl::Status& status);
  void Forget(uint64_t id);

  const DeviceWorkerDeps deps_;
  const double inline_seconds_;
  const int slot_count_;
  mutable absl::Mutex mutex_;
  // That slots may have work to take. No Condition: each Unlock would evaluate it for every slot.
  absl::CondVar work_;
  Batcher batcher_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, StopState> running_ ABSL_GUARDED_BY(mutex_);
  int in_work_ ABSL_GUARDED_BY(mutex_) = 0;           // launches, at most slot_count_
  absl::Time last_end_ ABSL_GUARDED_BY(mutex_);       // of a launch
  bool more_waited_ ABSL_GUARDED_BY(mutex_) = false;  // then
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool lost_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> slots_;
  DeadlineTimer timer_;  // last: its thread calls Cancel until it is destroyed
};

}  // namespace attnd
