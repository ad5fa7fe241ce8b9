#include "client/channels/bulk_queue.h"

#include "base/clock.h"
#include "client/channels/grpc_time.h"

namespace attnd {
namespace {

// After the last use a thread goes on waiting for events for so long.
constexpr absl::Duration kLinger = absl::Milliseconds(20);

}  // namespace

void Mailbox::Put(QueueTag* tag) {
  absl::MutexLock lock(&mutex_);
  tags_.push_back(tag);
  came_.Signal();
}

QueueTag* Mailbox::Take(absl::Time until) {
  absl::MutexLock lock(&mutex_);
  while (tags_.empty()) {
    if (!came_.WaitUntil(mutex_, until) && tags_.empty()) return nullptr;
  }
  QueueTag* tag = tags_.front();
  tags_.pop_front();
  return tag;
}

BulkQueue::~BulkQueue() {
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
  queue_.Shutdown();
  void* tag;
  bool ok;
  while (queue_.Next(&tag, &ok)) {
  }
}

void BulkQueue::Begin() {
  absl::MutexLock lock(&mutex_);
  ++uses_;
  if (!threads_.empty()) return;
  for (int n = 0; n < thread_count_; ++n) threads_.emplace_back([this] { Drive(); });
}

void BulkQueue::End() {
  absl::MutexLock lock(&mutex_);
  --uses_;
}

void BulkQueue::Drive() {
  auto wanted = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || uses_ > 0; };
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&wanted));
      if (stopping_) return;
    }
    void* pointer;
    bool ok;
    const gpr_timespec until = GrpcTime(SteadyNow() + kLinger);
    if (queue_.AsyncNext(&pointer, &ok, until) != grpc::CompletionQueue::GOT_EVENT) continue;
    auto* tag = static_cast<QueueTag*>(pointer);
    tag->sink->OnEvent(tag, ok);
  }
}

}  // namespace attnd
