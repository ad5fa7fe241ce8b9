#include "server/device_worker.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "server/engine_call.h"
#include "server/status_details.h"

namespace attnd {
namespace {

// Longer than the process lives on: another replica is the better choice.
constexpr absl::Duration kLostRetryDelay = absl::Seconds(1);

absl::Status LostStatus() {
  return WithRetryAfter(
      Failure(absl::StatusCode::kUnavailable, reason::kDeviceLost,
              "the device failed for good; the server restarts, another replica can take the call"),
      kLostRetryDelay);
}

constexpr absl::Duration kMemoryRetryDelay = absl::Milliseconds(50);

absl::Status NoDeviceMemory(const absl::Status& status) {
  return WithRetryAfter(Failure(absl::StatusCode::kUnavailable, reason::kHbmPressure,
                                absl::StrCat("full now: ", status.message())),
                        kMemoryRetryDelay);
}

LeaseWish WishOf(const AttentionCall& call, const std::string& caller) {
  LeaseWish wish{.owner = caller, .request = "", .ttl = call.residual_ttl()};
  const Shard& shard = call.problem().shard;
  if (!call.request_id().empty()) {  // which all shards of a logical call share
    wish.request =
        absl::StrCat(call.request_id(), "/", shard.batch_offset, "/", shard.q_head_offset);
  }
  return wish;
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
  FailWaiting(std::move(waiting), Failure(absl::StatusCode::kCancelled, reason::kDraining,
                                          "the server stopped before this call ran"));
  for (std::thread& slot : slots_) slot.join();
  absl::MutexLock lock(&mutex_);  // a launch may still be inside Submit
  auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return in_work_ == 0; };
  mutex_.Await(absl::Condition(&idle));
}

std::vector<AdmittedCall> DeviceWorker::TakeWaiting() {
  std::vector<AdmittedCall> waiting;
  while (std::optional<Batch> batch = batcher_.Take()) {
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

// Nothing is queued or runs, so nobody is overtaken, and no slot could begin sooner.
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

DeviceWorker::Launch DeviceWorker::NextLaunch() {
  absl::MutexLock lock(&mutex_);
  while (!stopping_ && (batcher_.empty() || in_work_ == slot_count_)) work_.Wait(&mutex_);
  return TakeLaunch();
}

DeviceWorker::Launch DeviceWorker::TakeLaunch() {
  std::optional<Batch> batch = batcher_.Take(std::max(1, slot_count_ - in_work_));
  Launch launch;
  if (!batch.has_value()) return launch;
  ++in_work_;
  absl::Time now = deps_.clock.Now();
  launch.reserve(batch->calls().size());
  for (AdmittedCall& call : batch->calls()) Begin(std::move(call), now, launch);
  return launch;
}

void DeviceWorker::Begin(AdmittedCall call, absl::Time now, Launch& launch) {
  StopState& state = running_[call.context().id];
  if (stopping_) state.source.request_stop();
  Running& running = launch.emplace_back(std::move(call), state.source.get_token());
  running.times.received = running.call.context().received_at;
  running.times.admitted = running.call.admitted_at();
  running.times.landed = running.call.staged().landed_at;
  running.times.taken = now;
}

// From the end of a launch when more waited, all slots have work until the next one ends: their
// distance is what the device takes for the next one's work.
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
  for (Running& running : launch) {
    deps_.metrics.QueueChanged(deps_.device, running.call.call().direction(),
                               running.call.call().priority(), -1, -running.call.bytes());
  }
  DropLate(launch, WorkStage::kQueue);
  if (launch.empty()) return 0;
  double seconds = 0;
  for (const Running& running : launch) seconds += running.call.seconds();
  absl::Time begin = deps_.clock.Now();
  absl::StatusOr<LaunchReport> report = Compute(launch);
  if (report.ok()) {
    NoteTimes(launch, *report, begin, deps_.clock.Now());
  } else if (IsDeviceLost(report.status())) {
    LoseDevice(report.status());
    report = LostStatus();
  }
  AnswerAll(std::move(launch), report);
  return report.ok() ? seconds : 0;
}

// The engine's waits for its turn count as queue: what is left of [begin, end) when the kernel and
// the transfers are taken off.
void DeviceWorker::NoteTimes(Launch& launch, const LaunchReport& report, absl::Time begin,
                             absl::Time end) {
  absl::Time kernel_end = std::max(begin, end - absl::Seconds(report.download_seconds));
  absl::Time kernel_begin = std::max(begin, kernel_end - absl::Seconds(report.seconds));
  absl::Duration upload = std::min(absl::Seconds(report.upload_seconds), kernel_begin - begin);
  for (Running& running : launch) {
    running.times.upload = upload;
    running.times.kernel_begin = kernel_begin;
    running.times.kernel_end = kernel_end;
    running.times.downloaded = end;
  }
}

absl::Status DeviceWorker::LateStatus(const Running& running, WorkStage stage) {
  bool stopped = running.stop.stop_requested();
  bool expired = deps_.clock.Now() >= running.call.context().deadline;
  if (!stopped && !expired) return absl::OkStatus();
  if (stopped) {
    absl::MutexLock lock(&mutex_);
    auto state = running_.find(running.call.context().id);
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
  for (Running& running : launch) {
    absl::Status late = LateStatus(running, stage);
    if (!late.ok()) {
      Fail(std::move(running.call), std::move(late));
      continue;
    }
    if (&*kept != &running) *kept = std::move(running);
    ++kept;
  }
  launch.erase(kept, launch.end());
}

absl::StatusOr<LaunchReport> DeviceWorker::ComputeOnce(Launch& launch) {
  const Direction direction = launch.front().call.call().direction();
  return direction == Direction::kForward ? ComputeForward(launch) : ComputeBackward(launch);
}

absl::StatusOr<LaunchReport> DeviceWorker::Compute(Launch& launch) {
  absl::StatusOr<LaunchReport> report = ComputeOnce(launch);
  // The device's free memory may lie in pieces between leases.
  while (absl::IsResourceExhausted(report.status()) && deps_.leases != nullptr &&
         deps_.leases->EvictOne(deps_.device)) {
    report = ComputeOnce(launch);
  }
  if (absl::IsResourceExhausted(report.status())) return NoDeviceMemory(report.status());
  if (!report.ok()) return report;
  double flops = 0;
  int64_t bytes = 0, tokens = 0;
  bool whole = true;  // a kernel that was stopped says nothing of the rate
  for (const Running& running : launch) {
    flops += running.call.flops();
    bytes += running.call.call().input_bytes() + running.call.call().output_bytes();
    tokens += Metrics::TokensOf(running.call.call());
    whole = whole && !running.stop.stop_requested();
  }
  const AttentionCall& first = launch.front().call.call();
  if (whole) {
    deps_.cost.Learn(first.problem(), first.direction(), flops, bytes, report->seconds);
  }
  deps_.metrics.BatchRun(first.direction(), static_cast<int>(launch.size()), tokens);
  return report;
}

bool DeviceWorker::KeepsOnDevice(const AttentionCall& call) const {
  if (!call.keep_residual() || deps_.leases == nullptr) return false;
  const int64_t bytes = deps_.backend.ResidualBytes(call.problem());
  return bytes > 0 && deps_.leases->MayHold(deps_.device, bytes);
}

absl::StatusOr<LaunchReport> DeviceWorker::ComputeForward(Launch& launch) {
  std::vector<ForwardCall> calls;
  calls.reserve(launch.size());
  for (Running& running : launch) {
    calls.push_back(EngineForward(running.call, running.stop));
    if (KeepsOnDevice(running.call.call())) calls.back().kept = &running.kept;
  }
  return deps_.backend.Forward(calls);
}

absl::StatusOr<LaunchReport> DeviceWorker::ComputeBackward(const Launch& launch) {
  std::vector<BackwardCall> calls;
  calls.reserve(launch.size());
  for (const Running& running : launch) {
    const ResidualTensors* residual = running.call.memory().residual.get();
    BackwardCall& call = calls.emplace_back(EngineBackward(running.call, running.stop));
    if (residual != nullptr) call.residual = residual->on_device();
  }
  return deps_.backend.Backward(calls);
}

void DeviceWorker::AnswerAll(Launch launch, const absl::StatusOr<LaunchReport>& report) {
  int count = static_cast<int>(launch.size());
  DropLate(launch, WorkStage::kKernel);
  for (Running& running : launch) {
    if (report.ok()) {
      Answer(running, *report, count);
    } else {
      Fail(std::move(running.call), Classified(report.status()));
    }
  }
}

void DeviceWorker::Answer(Running& running, const LaunchReport& report, int batched_with) {
  ReplySink* sink = running.call.context().sink;
  Forget(running.call.context().id);
  timer_.Remove(running.call.context().id, running.call.context().deadline);
  StagedTensors& staged = running.call.staged();
  Result result(std::move(running.call.call()));
  running.call.DropMemory();
  result.report_ = report;
  result.times_ = running.times;
  result.batched_with_ = batched_with;
  for (const TensorSpec& tensor : result.call().tensors()) {
    if (tensor.role == TensorRole::kOutput) result.outputs_.Add(tensor.id, staged[tensor.id]);
  }
  const bool keep = result.call().keep_residual() && deps_.leases != nullptr;
  if (keep && running.kept == nullptr) {
    LeaseHostMemory(running, result);
  } else {
    if (keep) LeaseDeviceMemory(running, result);
    KeepOutputs(running, result);
  }
  sink->OnResult(std::move(result));
}

// Until they are sent.
void DeviceWorker::KeepOutputs(Running& running, Result& result) {
  struct Outputs {
    Ticket ticket;  // returned after the memory
    StagingBlock block;
  };
  StagedTensors& staged = running.call.staged();
  staged.inputs.Release();
  auto kept = std::make_shared<Outputs>(
      Outputs{std::move(running.call.ticket()), std::move(staged.outputs)});
  kept->ticket.ReleaseWork();
  kept->ticket.ShrinkTo(kept->block.size());
  result.memory_ = std::move(kept);
}

// Of a forward whose caller asked for it: its outputs are sent from the residual, and the lease, if
// there is room for one, holds that too.
void DeviceWorker::LeaseHostMemory(Running& running, Result& result) {
  StagedTensors& staged = running.call.staged();
  staged.inputs.SplitOff(running.call.input_bytes());  // the workspace
  Ticket ticket = std::move(running.call.ticket());
  ticket.BecomeLease(staged.inputs.size() + staged.outputs.size());
  auto residual = std::make_shared<const ResidualTensors>(result.call().problem(),
                                                          std::move(staged), std::move(ticket));
  result.memory_ = residual;
  result.lease_ = deps_.leases->Grant(WishOf(result.call(), running.call.context().caller),
                                      std::move(residual));
}

// The same where the engine has left the tensors on the device: staging memory is a reply's only.
void DeviceWorker::LeaseDeviceMemory(Running& running, Result& result) {
  Ticket ticket = running.call.ticket().LeaseDeviceMemory(running.kept->bytes());
  auto residual = std::make_shared<const ResidualTensors>(
      result.call().problem(), std::move(running.kept), deps_.device, std::move(ticket));
  result.lease_ = deps_.leases->Grant(WishOf(result.call(), running.call.context().caller),
                                      std::move(residual));
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
