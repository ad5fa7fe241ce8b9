#include "client/call/call_runner.h"

#include <algorithm>
#include <stop_token>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "client/call/borrowed_slices.h"
#include "client/call/poll_hook.h"
#include "client/call/worker_gate.h"
#include "client/channels/error_class.h"
#include "client/channels/grpc_status.h"
#include "client/channels/grpc_time.h"
#include "client/types/error_detail.h"

namespace attnd {
namespace {

// Another thread for each so many RPCs of a call.
constexpr size_t kRpcsPerWorker = 2;
// How long RPCs that should have ended, and their slices, may take before calls get another
// connection.
constexpr absl::Duration kEndingGrace = absl::Milliseconds(200);

std::vector<int64_t> ShardsThatNeedAServer(LogicalCall& call) {
  std::vector<int64_t> shards;
  for (int64_t n = 0; n < call.shard_count(); ++n) {
    if (!call.FillIfTrivial(n)) shards.push_back(n);
  }
  return shards;
}

Progress StartOf(const LogicalCall& call, const std::vector<int64_t>& pending) {
  Progress progress;
  progress.shards_total = call.shard_count();
  progress.shards_done = call.shard_count() - static_cast<int64_t>(pending.size());
  progress.bytes_total = call.total_bytes();
  return progress;
}

}  // namespace

// One try of one shard. Members die in reverse order: the RPC before its context.
struct CallRunner::Attempt {
  int64_t shard = 0;
  BorrowedSlices borrowed;
  std::shared_ptr<Connection> connection;
  absl::Time begun;
  absl::Time ending_since = absl::InfiniteFuture();  // has no business to go on
  int64_t bytes = 0;
  bool leased = false;
  std::unique_ptr<grpc::ClientContext> context;
  absl::Mutex mutex;  // of the RPC, which several threads of the bulk queue may drive
  absl::Time moved_at ABSL_GUARDED_BY(mutex);  // something of it was written or read
  std::unique_ptr<ShardRpc> rpc;
};

class CallRunner::ShardWorker final : public EventSink {
 public:
  // poll_hook: null on a helper's thread.
  ShardWorker(CallRunner& runner, PollHook* poll_hook) : runner_(runner), poll_hook_(poll_hook) {
    if (runner.bulk_) {
      mailbox_.emplace();
      bulk_.emplace(runner.core_.bulk_queue);
    } else {
      own_.emplace(runner.core_.queues);
    }
  }

  void Run() {
    while (true) {
      while (HasRoom() && StartOne()) {
      }
      if (!in_flight_.empty()) {
        TakeEnd();
      } else if (!runner_.state_.WaitUntilDue(runner_.core_.clock.Now() + PollHook::kInterval)) {
        break;
      }
      if (poll_hook_ != nullptr) poll_hook_->Poll();
    }
    TakeSlicesBack();
  }

 private:
  bool HasRoom() const {
    return in_flight_.size() < static_cast<size_t>(runner_.core_.in_flight_per_worker);
  }
  bool StartOne() {
    std::optional<int64_t> shard = runner_.state_.TakeReady();
    if (!shard.has_value()) return false;
    Start(*shard);
    return true;
  }

  void Start(int64_t shard) {
    auto attempt = std::make_unique<Attempt>();
    attempt->shard = shard;
    attempt->context = std::make_unique<grpc::ClientContext>();
    PrepareContext(runner_.core_.options, runner_.deadline_, runner_.options_.traceparent,
                   *attempt->context);
    if (!runner_.state_.Register(attempt->context.get())) return;  // the call has failed
    int lease_at = runner_.call_.LeasedAddress(shard);
    attempt->rpc = MakeRpc(*attempt);
    attempt->bytes = attempt->rpc->payload_bytes();
    attempt->leased = attempt->rpc->leased();
    Tries& tries = runner_.tries_[shard];
    const int mask_at = std::exchange(tries.mask_at, -1);
    const int only = attempt->leased ? lease_at
                     : mask_at >= 0  ? mask_at
                                     : runner_.call_.bound_address();
    attempt->connection = runner_.core_.connections.Acquire(attempt->bytes, tries.addresses, only);
    if (tries.failed > 0 && !tries.WasAt(attempt->connection->address_index())) {
      ++runner_.core_.counters.failovers;
    }
    attempt->begun = runner_.core_.clock.Now();
    attempt->connection->Enter(attempt->context.get());
    {
      absl::MutexLock lock(&attempt->mutex);
      attempt->moved_at = attempt->begun;
      attempt->rpc->Start(*attempt->connection, bulk_ ? bulk_->queue() : own_->queue());
    }
    in_flight_.push_back(std::move(attempt));
  }

  std::unique_ptr<ShardRpc> MakeRpc(Attempt& attempt) {
    const StreamUse& streams = runner_.streams_;
    ShardAttempt shard{.call = runner_.call_,
                       .shard = attempt.shard,
                       .borrowed = attempt.borrowed,
                       .context = *attempt.context,
                       .owner = &attempt,
                       .sink = this};
    if (runner_.Shares(attempt.shard)) {
      auto rpc = MakeSharedRpc(shard, *runner_.core_.shared_memory);
      if (rpc != nullptr) return rpc;
    }
    return runner_.call_.LargerMessage(attempt.shard) > streams.above_bytes
               ? MakeStreamRpc(shard, streams.chunk_bytes)
               : MakeUnaryRpc(shard);
  }

  // Takes an event of the bulk queue, on one of its threads.
  void OnEvent(QueueTag* tag, bool ok) override {
    if (HasEnded(tag, ok)) mailbox_->Put(tag);
  }

  // Lets the tag's RPC go on; true when it has ended, and what it has come to is noted.
  bool HasEnded(QueueTag* tag, bool ok) {
    auto& rpc_tag = *static_cast<ShardRpc::Tag*>(tag);
    Attempt& attempt = *static_cast<Attempt*>(rpc_tag.owner);
    {
      absl::MutexLock lock(&attempt.mutex);
      attempt.moved_at = runner_.core_.clock.Now();
      if (!attempt.rpc->OnEvent(rpc_tag.op, ok)) return false;
    }
    attempt.connection->Leave(attempt.context.get());
    runner_.state_.Unregister(attempt.context.get());
    runner_.core_.connections.Release(*attempt.connection, attempt.bytes);
    runner_.state_.CountSent(attempt.rpc->payload_bytes(), attempt.rpc->copied_bytes());
    runner_.Handle(attempt);
    return true;
  }

  // Lets RPCs go on until one has ended, or until then: null.
  QueueTag* NextEnd(absl::Time until) {
    if (bulk_) return mailbox_->Take(until);
    void* pointer;
    bool ok;
    while (own_->Next(&pointer, &ok, GrpcTime(until))) {
      auto* tag = static_cast<QueueTag*>(pointer);
      if (HasEnded(tag, ok)) return tag;
    }
    return nullptr;
  }

  // Waits for an RPC to end, for a delayed shard to become due, or for a while.
  void TakeEnd() {
    absl::Time until = SteadyNow() + PollHook::kInterval;
    if (HasRoom()) until = std::min(until, runner_.state_.NextDue());
    QueueTag* tag = NextEnd(until);
    if (SteadyNow() >= suspect_after_) SuspectSilent();
    if (tag == nullptr) return ReplaceStuckConnections(in_flight_);
    void* owner = static_cast<ShardRpc::Tag*>(tag)->owner;
    auto it = std::find_if(in_flight_.begin(), in_flight_.end(),
                           [&](const auto& attempt) { return attempt.get() == owner; });
    std::unique_ptr<Attempt> attempt = std::move(*it);
    in_flight_.erase(it);
    attempt->rpc.reset();
    attempt->context.reset();
    if (!attempt->borrowed.AllReturned()) held_.push_back(std::move(attempt));
  }

  // The arrays are the caller's again only when gRPC has dropped every slice. It does so when the
  // bytes are written, or when TCP has given the connection up (Connections::kWriteTimeout).
  void TakeSlicesBack() {
    while (true) {
      std::erase_if(held_, [](const auto& a) { return a->borrowed.AllReturned(); });
      if (held_.empty()) return;
      ReplaceStuckConnections(held_);
      // Nothing is pending: this only lets gRPC do its reading and writing.
      NextEnd(SteadyNow() + absl::Milliseconds(1));
      if (poll_hook_ != nullptr) poll_hook_->Poll();
    }
  }

  void SuspectSilent() {
    const absl::Time now = runner_.core_.clock.Now();
    suspect_after_ = SteadyNow() + PollHook::kInterval;
    for (auto& attempt : in_flight_) {
      absl::Time moved_at;
      {
        absl::MutexLock lock(&attempt->mutex);
        moved_at = attempt->moved_at;
      }
      if (now - moved_at < Picker::kSilence) continue;
      runner_.core_.connections.Suspect(attempt->connection, moved_at);
    }
  }

  // gRPC ends a cancelled or late RPC only after the write in which it takes part. An RPC that is
  // still there a while after it should have ended waits for a peer that does not read.
  void ReplaceStuckConnections(std::vector<std::unique_ptr<Attempt>>& attempts) {
    const absl::Time now = SteadyNow();
    bool ending = in_flight_.empty() || runner_.state_.failed() || now > runner_.deadline_;
    if (!ending) return;
    for (auto& attempt : attempts) {
      attempt->ending_since = std::min(attempt->ending_since, now);
      if (now < attempt->ending_since + kEndingGrace) continue;
      runner_.core_.connections.Replace(attempt->connection);
    }
  }

  CallRunner& runner_;
  PollHook* const poll_hook_;
  std::optional<CompletionQueues::Borrowed> own_;  // of small calls
  std::optional<Mailbox> mailbox_;                 // of large transfers
  std::optional<BulkQueue::Use> bulk_;
  absl::Time suspect_after_ = SteadyNow() + Picker::kSilence;
  std::vector<std::unique_ptr<Attempt>> in_flight_;
  std::vector<std::unique_ptr<Attempt>> held_;  // ended, slices not yet back
};

CallRunner::CallRunner(const ClientCore& core, LogicalCall& call, const CallOptions& options,
                       absl::Time deadline, const StreamUse& streams)
    : core_(core),
      call_(call),
      deadline_(deadline),
      streams_(streams),
      pending_(ShardsThatNeedAServer(call)),
      state_(pending_, StartOf(call, pending_), options.progress, core.clock),
      options_(options),
      tries_(call.shard_count()),
      bulk_(MovesBulk()) {}

absl::StatusOr<CallReceipt> CallRunner::Run() {
  absl::Time start = core_.clock.Now();
  {
    std::stop_callback cancel(options_.stop, [this] {
      state_.Fail(absl::CancelledError("the caller cancelled the call"));
    });
    RunWorkers();
  }
  absl::StatusOr<CallReceipt> receipt = state_.Result();
  core_.counters.Ended(receipt.ok());
  if (receipt.ok()) receipt->elapsed = core_.clock.Now() - start;
  return receipt;
}

int CallRunner::WorkerCount() const {
  size_t wanted = (pending_.size() + kRpcsPerWorker - 1) / kRpcsPerWorker;
  return static_cast<int>(std::min<size_t>(wanted, core_.max_workers));
}

void CallRunner::RunWorkers() {
  // shared_ptr: a helper that starts after the call has ended still looks at the gate.
  std::shared_ptr<WorkerGate> gate;
  for (int worker = WorkerCount(); worker > 1; --worker) {
    if (gate == nullptr) gate = std::make_shared<WorkerGate>();
    core_.workers.Run([this, gate] {
      if (!gate->Enter()) return;
      ShardWorker(*this, nullptr).Run();
      gate->Leave();
    });
  }
  PollHook poll_hook(options_.poll_hook);
  ShardWorker(*this, &poll_hook).Run();
  if (gate != nullptr) gate->CloseAndWait(poll_hook);
}

void CallRunner::Handle(Attempt& attempt) {
  if (!attempt.rpc->status().ok()) return HandleFailure(attempt);
  const int address = attempt.connection->address_index();
  core_.connections.ReportAlive(address);
  core_.connections.ReportMoved(address, attempt.bytes, core_.clock.Now() - attempt.begun);
  if (const auto queue = QueueOf(*attempt.context); queue.has_value()) {
    core_.connections.ReportQueue(address, *queue);
  }
  core_.budget.OnSuccess();
  if (state_.failed()) return;
  absl::StatusOr<int64_t> bytes = attempt.rpc->Land(attempt.connection->address_index());
  if (!bytes.ok()) return state_.Fail(bytes.status());
  if (attempt.leased) state_.CountLeased();
  if (attempt.rpc->shared()) state_.CountShared();
  state_.Done(attempt.rpc->receipt(), *bytes);
}

// Called while the call has not failed, so that its caller has cancelled nothing: CANCELLED comes
// from a connection that we closed, or from the server. Calls are pure and may go elsewhere.
absl::Status CallRunner::StatusOf(const Attempt& attempt) const {
  const absl::Status status =
      core_.connections.StatusOf(*attempt.connection, FromGrpc(attempt.rpc->status()), false);
  bool late = core_.clock.Now() >= deadline_;
  if (late && absl::IsUnavailable(status)) return absl::DeadlineExceededError(status.message());
  return status;
}

Pushback CallRunner::PushbackFor(const Attempt& attempt, const absl::Status& status) const {
  Pushback pushback = PushbackOf(*attempt.context);
  if (pushback.delay.has_value()) return pushback;
  std::optional<ErrorDetail> detail = DetailOf(status);
  if (detail.has_value()) pushback.delay = detail->retry_delay;
  return pushback;
}

// A lost lease is an ordinary answer and no retry: the shard is sent at once in full. So it is when
// the lease's server is away and there are others.
bool CallRunner::ResendWithoutResidual(const Attempt& attempt, const absl::Status& status) {
  if (!attempt.leased) return false;
  if (IsResidualLost(status)) {
    ++core_.counters.leases_lost;
    call_.DropLease(attempt.shard, true);
    return true;
  }
  bool elsewhere = absl::IsUnavailable(status) && core_.connections.address_count() > 1;
  if (elsewhere) call_.DropLease(attempt.shard, false);
  return false;
}

bool CallRunner::Shares(int64_t shard) const {
  if (core_.shared_memory == nullptr || tries_[shard].unshared) return false;
  int64_t bytes = call_.LargerMessage(shard);
  if (bytes < SharedTensors::kFewBytes) return false;
  // Outputs that come in the reply may be too large for one message.
  return !call_.keeps() || core_.shared_memory->takes_kept_outputs() ||
         bytes <= streams_.above_bytes;
}

// Whether it takes gRPC long enough to write or read a message that other threads should do it.
bool CallRunner::MovesBulk() const {
  constexpr int64_t kLargeMessage = int64_t{1} << 20;
  return std::any_of(pending_.begin(), pending_.end(), [this](int64_t shard) {
    return call_.LargerMessage(shard) >= kLargeMessage && !Shares(shard);
  });
}

// A daemon that was started anew, or has closed the connection, knows our regions no more: the
// tensors travel this time.
bool CallRunner::ResendUnshared(const Attempt& attempt, const absl::Status& status) {
  std::optional<ErrorDetail> detail = DetailOf(status);
  if (!attempt.rpc->shared() || !detail.has_value() || detail->reason != "REGION_UNKNOWN") {
    return false;
  }
  core_.shared_memory->Forget();
  tries_[attempt.shard].unshared = true;
  return true;
}

void CallRunner::HandleFailure(Attempt& attempt) {
  if (state_.failed()) return;
  absl::Status status = StatusOf(attempt);
  if (ResendUnshared(attempt, status)) return state_.Delay(attempt.shard, {});
  if (IsMaskUnknown(status) && call_.SendWholeMask(attempt.shard)) {
    tries_[attempt.shard].mask_at = attempt.connection->address_index();
    return state_.Delay(attempt.shard, {});
  }
  if (ResendWithoutResidual(attempt, status)) return state_.Delay(attempt.shard, {});
  const bool over_quota = IsOverQuota(status);
  // The call's own shards use the quota up: fewer at a time fit into it.
  if (over_quota && state_.Narrow(attempt.shard)) return state_.CountRetry();
  int address = attempt.connection->address_index();
  std::vector<bool>& tried = tries_[attempt.shard].addresses;
  tried.resize(core_.connections.address_count());  // a name may have brought new ones
  tried[address] = true;
  if (absl::IsUnavailable(status)) core_.connections.Reconnect(*attempt.connection);
  const bool news =
      !absl::IsUnavailable(status) || core_.connections.ReportUnavailable(address, attempt.begun);
  Pushback pushback = PushbackFor(attempt, status);
  // Whoever waits for servers waits on after an address that has left.
  const bool has_left = core_.options.wait_for_ready && attempt.connection->retired();
  FailedAttempt failed{
      .status = status,
      .is_waited_for = has_left || IsWaitedFor(status, core_.options.wait_for_ready),
      .attempts = ++tries_[attempt.shard].failed,
      .other_address = std::find(tried.begin(), tried.end(), false) != tried.end(),
      .retry_forbidden = pushback.forbids_retry,
      .server_delay = pushback.delay};
  absl::BitGen random;
  std::optional<absl::Duration> delay =
      RetryDelay(core_.options.retry, failed, absl::Uniform(random, 0.0, 1.0));
  // All shards that were with a replica when it died are one failure: the budget is for those that
  // would go on asking.
  const bool free = !news && failed.other_address;
  if (!delay.has_value() || core_.clock.Now() + *delay >= deadline_ ||
      !(free || core_.budget.TakeFor(failed))) {
    return state_.Fail(WithProgress(status));
  }
  core_.counters.Retried(*delay);
  state_.CountRetry();
  state_.Delay(attempt.shard, *delay);
}

absl::Status CallRunner::WithProgress(const absl::Status& status) {
  if (!absl::IsDeadlineExceeded(status)) return status;
  absl::Status longer(status.code(),
                      absl::StrCat(status.message(), " (", state_.shards_done(), " of ",
                                   call_.shard_count(), " shards were done)"));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { longer.SetPayload(url, payload); });
  return longer;
}

}  // namespace attnd
