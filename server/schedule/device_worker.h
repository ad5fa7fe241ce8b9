// DeviceWorker: drives one engine.
//
//   Submit → Batcher → a slot: Launch (launch.h) → Answer (answer.h) → ReplySink
//
// Each slot is a thread; the engine decides which parts of several launches overlap. A small call
// that finds the engine idle runs on the submitting thread: waking a slot would take longer.
// Late and cancelled calls are dropped before the launch and before the answer; stop tokens end a
// kernel whose calls have all stopped. Memory is free as soon as a call is answered.
// After the loss of a device every call is answered UNAVAILABLE (DEVICE_LOST).
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
#include "base/work_watch.h"
#include "server/admission/admission.h"
#include "server/schedule/batcher.h"
#include "server/schedule/deadline_timer.h"
#include "server/schedule/launch.h"

namespace attnd {

struct DeviceWorkerOptions {
  BatcherLimits batcher;
  int slots = 0;  // batches in work at once; 0: as many as the engine overlaps
  // A call estimated to take no longer runs inside Submit when the worker is idle.
  absl::Duration inline_time = absl::ZeroDuration();
};

enum class StopCause : uint8_t { kNone, kCancelled, kExpired };

class DeviceWorker {
 public:
  DeviceWorker(const DeviceWorkerDeps& deps, const DeviceWorkerOptions& options);
  // Answers waiting calls with CANCELLED and stops running ones.
  ~DeviceWorker();

  // Its inputs have landed. It may be answered before this returns.
  void Submit(AdmittedCall call);
  // The caller has cancelled, or the deadline has passed. No effect on an answered call.
  void Cancel(uint64_t id, StopCause cause);
  // The device has failed for good, as its driver reports.
  void Lose(const absl::Status& status) { LoseDevice(DeviceLost(status)); }
  size_t queued() const;
  // When a launch that runs now counts as stuck.
  absl::Time stuck_at() const { return watch_.stuck_at(); }

 private:
  struct StopState {
    std::stop_source source;
    StopCause cause = StopCause::kNone;
  };

  void SlotMain();
  // Empty when the worker stops.
  Launch NextLaunch() ABSL_LOCKS_EXCLUDED(mutex_);
  bool RunsInline(const AdmittedCall& call) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The next batch, which counts as in work until EndLaunch; empty when no call waits.
  Launch TakeLaunch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes the call stoppable.
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
  WorkWatch watch_;  // launches
  mutable absl::Mutex mutex_;
  // Signalled when a slot may have work. A Condition would be evaluated for every slot at each
  // Unlock.
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
  // Answers the calls that are left. No Submit or Cancel follows.
  void Stop() { workers_.clear(); }

  void Submit(AdmittedCall call) {
    DeviceWorker& worker = *workers_[call.device()];
    worker.Submit(std::move(call));
  }
  void Lose(int device, const absl::Status& status) { workers_[device]->Lose(status); }
  absl::Time stuck_at(int device) const { return workers_[device]->stuck_at(); }
  // On whichever device the call is. No effect on an answered call.
  void Cancel(uint64_t id, StopCause cause) {
    for (const auto& worker : workers_) worker->Cancel(id, cause);
  }

 private:
  std::vector<std::unique_ptr<DeviceWorker>> workers_;
};

}  // namespace attnd
