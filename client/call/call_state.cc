#include "client/call/call_state.h"

#include <algorithm>
#include <utility>

namespace attnd {

CallState::CallState(std::vector<int64_t> shards, Progress progress,
                     std::function<void(const Progress&)> on_progress, const Clock& clock)
    : clock_(clock),
      on_progress_(std::move(on_progress)),
      ready_(shards.begin(), shards.end()),
      progress_(progress) {}

void CallState::PromoteDue() {
  absl::Time now = clock_.Now();
  while (!delayed_.empty() && delayed_.begin()->first <= now) {
    ready_.push_back(delayed_.begin()->second);
    delayed_.erase(delayed_.begin());
  }
}

std::optional<int64_t> CallState::TakeReady() {
  absl::MutexLock lock(&mutex_);
  PromoteDue();
  if (!MayTake()) return std::nullopt;
  int64_t shard = ready_.front();
  ready_.pop_front();
  ++in_hand_;
  if (ready_.empty()) changed_.SignalAll();
  return shard;
}

absl::Time CallState::NextDue() {
  absl::MutexLock lock(&mutex_);
  return delayed_.empty() ? absl::InfiniteFuture() : delayed_.begin()->first;
}

bool CallState::WaitUntilDue(absl::Time until) {
  absl::MutexLock lock(&mutex_);
  auto wakes = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !failure_.ok() || MayTake() || (ready_.empty() && delayed_.empty());
  };
  const auto next = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return delayed_.empty() ? until : std::min(delayed_.begin()->first, until);
  };
  while (!wakes() && next() > clock_.Now() && changed_.WaitFor(mutex_, next() - clock_.Now())) {
  }
  PromoteDue();
  return failure_.ok() && !(ready_.empty() && delayed_.empty());
}

void CallState::Delay(int64_t shard, absl::Duration delay) {
  absl::MutexLock lock(&mutex_);
  --in_hand_;
  if (failure_.ok()) delayed_.emplace(clock_.Now() + delay, shard);
  changed_.SignalAll();
}

bool CallState::Narrow(int64_t shard) {
  absl::MutexLock lock(&mutex_);
  if (in_hand_ == 1) return false;
  max_in_hand_ = --in_hand_;
  if (failure_.ok()) ready_.push_back(shard);
  changed_.SignalAll();
  return true;
}

void CallState::Done(const ShardReceipt& receipt, int64_t bytes_received) {
  absl::MutexLock progress_lock(&progress_mutex_);
  Progress now;
  {
    absl::MutexLock lock(&mutex_);
    ++progress_.shards_done;
    --in_hand_;
    progress_.bytes_received += bytes_received;
    receipt_.Add(receipt);
    now = progress_;
    changed_.SignalAll();
  }
  if (on_progress_) on_progress_(now);
}

void CallState::Fail(absl::Status status) {
  absl::MutexLock lock(&mutex_);
  if (!failure_.ok()) return;
  failure_ = std::move(status);
  ready_.clear();
  delayed_.clear();
  for (grpc::ClientContext* context : contexts_) context->TryCancel();
  changed_.SignalAll();
}

bool CallState::failed() {
  absl::MutexLock lock(&mutex_);
  return !failure_.ok();
}

bool CallState::Register(grpc::ClientContext* context) {
  absl::MutexLock lock(&mutex_);
  if (!failure_.ok()) return false;
  contexts_.insert(context);
  return true;
}

void CallState::Unregister(grpc::ClientContext* context) {
  absl::MutexLock lock(&mutex_);
  contexts_.erase(context);
}

void CallState::CountSent(int64_t bytes, int64_t copied) {
  absl::MutexLock lock(&mutex_);
  progress_.bytes_sent += bytes;
  receipt_.receipt().bytes_copied += copied;
}

void CallState::CountRetry() {
  absl::MutexLock lock(&mutex_);
  ++receipt_.receipt().retries;
}

void CallState::CountLeased() {
  absl::MutexLock lock(&mutex_);
  ++receipt_.receipt().leased;
}

void CallState::CountShared() {
  absl::MutexLock lock(&mutex_);
  ++receipt_.receipt().shared;
}

int64_t CallState::shards_done() {
  absl::MutexLock lock(&mutex_);
  return progress_.shards_done;
}

absl::StatusOr<CallReceipt> CallState::Result() {
  absl::MutexLock lock(&mutex_);
  if (!failure_.ok()) return failure_;
  CallReceipt receipt = std::move(receipt_.receipt());
  receipt.shards = progress_.shards_total;
  receipt.bytes_sent = progress_.bytes_sent;
  receipt.bytes_received = progress_.bytes_received;
  return receipt;
}

}  // namespace attnd
