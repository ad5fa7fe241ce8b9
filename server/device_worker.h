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
#include <memory>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "server/admission.h"
#include "server/batcher.h"
#include "server/deadline_timer.h"
#include "server/launch.h"

namespace attnd {

struct DeviceWorkerOptions {
  BatcherLimits batcher;
  int slots = 0;  // batches in work at once; 0: as many as the engine overlaps
  // A call that is estimated to take no longer, and finds nothing in work, runs inside Submit.
  absl::Duration inline_time = absl::ZeroDuration();
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
  absl::Status LateStatus(const LaunchedCall& launched, WorkStage stage);
  void AnswerAll(Launch launch, const absl::StatusOr<LaunchReport>& report);
  void AnswerOne(LaunchedCall& launched, const LaunchReport& report, int batched_with);
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

// The workers of all devices. Filled at the start; any thread from then on.
class Workers {
 public:
  // In the order of Admission's devices.
  void Add(std::unique_ptr<DeviceWorker> worker) { workers_.push_back(std::move(worker)); }
  // Answers what is left. Nothing is submitted or cancelled from then on.
  void Stop() { workers_.clear(); }

  void Submit(AdmittedCall call) {
    DeviceWorker& worker = *workers_[call.device()];
    worker.Submit(std::move(call));
  }
  void Lose(int device, const absl::Status& status) { workers_[device]->Lose(status); }
  // Wherever it is; no effect on a call that has been answered.
  void Cancel(uint64_t id, StopCause cause) {
    for (const auto& worker : workers_) worker->Cancel(id, cause);
  }

 private:
  std::vector<std::unique_ptr<DeviceWorker>> workers_;
};

}  // namespace attnd
