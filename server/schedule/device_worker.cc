#include "server/schedule/device_worker.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "server/call/status_details.h"
#include "server/schedule/answer.h"

namespace attnd {
namespace {

// Longer than the process keeps running: another replica is the better choice.
constexpr absl::Duration kLostRetryDelay = absl::Seconds(1);
// How many times its estimate a launch may take. Estimates miss where a card is shared or
// throttled.
constexpr double kMostOverEstimate = 10;

absl::Status LostStatus() {
  return WithRetryAfter(
      Failure(absl::StatusCode::kUnavailable, reason::kDeviceLost,
              "the device failed for good; the server restarts, another replica can take the call"),
      kLostRetryDelay);
}

}  // namespace

DeviceWorker::DeviceWorker(const DeviceWorkerDeps& deps, const DeviceWorkerOptions& options)
    : deps_(deps),
      inline_seconds_(absl::ToDoubleSeconds(options.inline_time)),
      slot_count_(options.slots > 0 ? options.slots : deps.backend.info().launches),
      batcher_(options.batcher),
      timer_([this](uint64_t id) { Cancel(id, StopCause::kExpired); }) {
  for (int n = 0; n < slot_count_; ++n) slots_.emplace_back([this] { SlotMain(); });
}

DeviceWorker::~DeviceWorker() {
  std::vector<AdmittedCall> waiting;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    work_.SignalAll();
    waiting = TakeWaiting();
    for (auto& [id, state] : running_) {
      state.cause = StopCause::kCancelled;
      state.source.request_stop();
    }
  }
  FailWaiting(std::move(waiting),
              Failure(absl::StatusCode::kCancelled, reason::kDraining,
                      "the server stopped before this call ran; another replica can take it"));
  for (std::thread& slot : slots_) slot.join();
  absl::MutexLock lock(&mutex_);  // a launch may still be inside Submit
  auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return in_work_ == 0; };
  mutex_.Await(absl::Condition(&idle));
}

std::vector<AdmittedCall> DeviceWorker::TakeWaiting() {
  std::vector<AdmittedCall> waiting;
  while (std::optional<Batch> batch = batcher_.Take(absl::InfinitePast())) {
    for (AdmittedCall& call : batch->calls()) waiting.push_back(std::move(call));
  }
  return waiting;
}

void DeviceWorker::FailWaiting(std::vector<AdmittedCall> waiting, const absl::Status& status) {
  for (AdmittedCall& call : waiting) {
    deps_.metrics.QueueChanged(deps_.device, call.call().direction(), call.call().priority(), -1,
                               -call.bytes());
    Fail(std::move(call), status);
  }
}

void DeviceWorker::LoseDevice(const absl::Status& status) {
  std::vector<AdmittedCall> waiting;
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(lost_, true)) return;
    waiting = TakeWaiting();
  }
  if (deps_.on_lost) deps_.on_lost(status);  // first: no new calls
  FailWaiting(std::move(waiting), LostStatus());
}

size_t DeviceWorker::queued() const {
  absl::MutexLock lock(&mutex_);
  return batcher_.size();
}

void DeviceWorker::Submit(AdmittedCall call) {
  CHECK(call.staged().landed_at <= deps_.clock.Now());
  timer_.Add(call.context().id, call.context().deadline);
  deps_.metrics.QueueChanged(deps_.device, call.call().direction(), call.call().priority(), +1,
                             call.bytes());
  absl::ReleasableMutexLock lock(&mutex_);
  if (lost_) {
    lock.Release();
    std::vector<AdmittedCall> one;
    one.push_back(std::move(call));
    return FailWaiting(std::move(one), LostStatus());
  }
  if (!RunsInline(call)) {
    batcher_.Add(std::move(call));
    work_.Signal();
    return;
  }
  Launch launch;
  Begin(std::move(call), deps_.clock.Now(), launch);
  ++in_work_;
  lock.Release();
  EndLaunch(Run(std::move(launch)));
}

// Only while nothing is queued or runs: the call overtakes none, and no slot could begin sooner.
bool DeviceWorker::RunsInline(const AdmittedCall& call) const {
  return call.seconds() <= inline_seconds_ && in_work_ == 0 && batcher_.empty() && !stopping_;
}

void DeviceWorker::Cancel(uint64_t id, StopCause cause) {
  std::optional<AdmittedCall> waiting;
  {
    absl::MutexLock lock(&mutex_);
    auto running = running_.find(id);
    if (running != running_.end()) {
      if (running->second.cause == StopCause::kNone) running->second.cause = cause;
      running->second.source.request_stop();
      return;
    }
    waiting = batcher_.Remove(id);
  }
  if (!waiting.has_value()) return;
  deps_.metrics.QueueChanged(deps_.device, waiting->call().direction(), waiting->call().priority(),
                             -1, -waiting->bytes());
  deps_.metrics.CallStopped(WorkStage::kQueue, cause == StopCause::kExpired);
  Fail(*std::move(waiting),
       cause == StopCause::kExpired
           ? Failure(absl::StatusCode::kDeadlineExceeded, reason::kDeadlineExceededQueue,
                     "the deadline passed in the queue", {{"stage", "queue"}})
           : Failure(absl::StatusCode::kCancelled, reason::kCancelled,
                     "the caller cancelled in the queue", {{"stage", "queue"}}));
}

void DeviceWorker::SlotMain() {
  for (Launch launch = NextLaunch(); !launch.empty(); launch = NextLaunch()) {
    EndLaunch(Run(std::move(launch)));
  }
}

Launch DeviceWorker::NextLaunch() {
  absl::MutexLock lock(&mutex_);
  while (!stopping_ && (batcher_.empty() || in_work_ == slot_count_)) work_.Wait(&mutex_);
  return TakeLaunch();
}

Launch DeviceWorker::TakeLaunch() {
  const absl::Time now = deps_.clock.Now();
  std::optional<Batch> batch = batcher_.Take(now, std::max(1, slot_count_ - in_work_));
  Launch launch;
  if (!batch.has_value()) return launch;
  ++in_work_;
  launch.reserve(batch->calls().size());
  for (AdmittedCall& call : batch->calls()) Begin(std::move(call), now, launch);
  return launch;
}

void DeviceWorker::Begin(AdmittedCall call, absl::Time now, Launch& launch) {
  StopState& state = running_[call.context().id];
  if (stopping_) state.source.request_stop();
  call.ticket().StartWork();
  LaunchedCall& launched = launch.emplace_back(std::move(call), state.source.get_token());
  launched.times.received = launched.call.context().received_at;
  launched.times.admitted = launched.call.admitted_at();
  launched.times.landed = launched.call.staged().landed_at;
  launched.times.taken = now;
}

// When calls waited at the end of the previous launch, all slots have been busy since. Then the
// time between the two ends is what the device took for this launch.
void DeviceWorker::EndLaunch(double seconds) {
  absl::MutexLock lock(&mutex_);
  --in_work_;
  const absl::Time now = deps_.clock.Now();
  if (more_waited_) deps_.cost.Served(seconds, absl::ToDoubleSeconds(now - last_end_));
  last_end_ = now;
  more_waited_ = !batcher_.empty();
  if (more_waited_) work_.Signal();
}

double DeviceWorker::Run(Launch launch) {
  for (LaunchedCall& launched : launch) {
    deps_.metrics.QueueChanged(deps_.device, launched.call.call().direction(),
                               launched.call.call().priority(), -1, -launched.call.bytes());
  }
  DropLate(launch, WorkStage::kQueue);
  if (launch.empty()) return 0;
  double seconds = 0;
  for (const LaunchedCall& launched : launch) seconds += launched.call.seconds();
  const absl::Time end = deps_.clock.Now() + absl::Seconds(kMostOverEstimate * seconds);
  const WorkWatch::Work work = watch_.Begin(end);
  absl::StatusOr<LaunchReport> report = Compute(deps_, launch);
  if (IsDeviceLost(report.status())) {
    LoseDevice(report.status());
    report = LostStatus();
  }
  AnswerAll(std::move(launch), report);
  return report.ok() ? seconds : 0;
}

absl::Status DeviceWorker::LateStatus(const LaunchedCall& launched, WorkStage stage) {
  bool stopped = launched.stop.stop_requested();
  bool expired = deps_.clock.Now() >= launched.call.context().deadline;
  if (!stopped && !expired) return absl::OkStatus();
  if (stopped) {
    absl::MutexLock lock(&mutex_);
    auto state = running_.find(launched.call.context().id);
    expired = state != running_.end() && state->second.cause == StopCause::kExpired;
  }
  deps_.metrics.CallStopped(stage, expired);
  absl::string_view where = WorkStageName(stage);
  if (!expired) {
    return Failure(absl::StatusCode::kCancelled, reason::kCancelled,
                   absl::StrCat("the caller cancelled at stage ", where), {{"stage", where}});
  }
  return Failure(
      absl::StatusCode::kDeadlineExceeded,
      stage == WorkStage::kQueue ? reason::kDeadlineExceededQueue : reason::kDeadlineExceededKernel,
      absl::StrCat("the deadline passed at stage ", where), {{"stage", where}});
}

void DeviceWorker::DropLate(Launch& launch, WorkStage stage) {
  auto kept = launch.begin();
  for (LaunchedCall& launched : launch) {
    absl::Status late = LateStatus(launched, stage);
    if (!late.ok()) {
      Fail(std::move(launched.call), std::move(late));
      continue;
    }
    if (&*kept != &launched) *kept = std::move(launched);
    ++kept;
  }
  launch.erase(kept, launch.end());
}

void DeviceWorker::AnswerAll(Launch launch, const absl::StatusOr<LaunchReport>& report) {
  int count = static_cast<int>(launch.size());
  DropLate(launch, WorkStage::kKernel);
  for (LaunchedCall& launched : launch) {
    if (report.ok()) {
      AnswerOne(launched, *report, count);
    } else {
      Fail(std::move(launched.call), Classified(report.status()));
    }
  }
}

void DeviceWorker::AnswerOne(LaunchedCall& launched, const LaunchReport& report, int batched_with) {
  const CallContext& context = launched.call.context();
  Forget(context.id);
  timer_.Remove(context.id, context.deadline);
  context.sink->OnResult(Answer::Of(deps_, launched, report, batched_with));
}

void DeviceWorker::Fail(AdmittedCall call, absl::Status status) {
  ReplySink* sink = call.context().sink;
  Forget(call.context().id);
  timer_.Remove(call.context().id, call.context().deadline);
  { AdmittedCall gone = std::move(call); }  // memory and budget are back before the answer is out
  sink->OnResult(std::move(status));
}

void DeviceWorker::Forget(uint64_t id) {
  absl::MutexLock lock(&mutex_);
  running_.erase(id);
}

}  // namespace attnd
