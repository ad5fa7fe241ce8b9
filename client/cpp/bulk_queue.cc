#include "client/cpp/bulk_queue.h"

#include <utility>

#include "absl/time/clock.h"

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
    if (came_.WaitWithDeadline(&mutex_, until) && tags_.empty()) return nullptr;
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
    for (const auto& sockets : own_sockets_) sockets->Wake();
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
  AddOwnThreads();
  const int shared = own_sockets_.empty() ? shared_threads_ : 1;
  for (int n = 0; n < shared; ++n) threads_.emplace_back([this] { Drive(); });
}

void BulkQueue::AddOwnThreads() {
  for (int n = 0; n < own_threads_; ++n) {
    auto sockets = OwnSockets::Create();
    if (sockets == nullptr) return;
    threads_.emplace_back([this, own = sockets.get()] { DriveOwn(*own); });
    own_sockets_.push_back(std::move(sockets));
  }
}

// Of gRPC's own tags some are for itself.
void BulkQueue::DriveOwn(OwnSockets& sockets) {
  auto tell = [](void* grpcs, bool ok) {
    void* tag = grpcs;
    if (!static_cast<grpc::internal::CompletionQueueTag*>(grpcs)->FinalizeResult(&tag, &ok)) return;
    static_cast<QueueTag*>(tag)->sink->OnEvent(static_cast<QueueTag*>(tag), ok);
  };
  while (!stopping() && sockets.Drive(queue_.cq(), tell)) {
  }
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
    auto until = absl::ToChronoTime(absl::Now() + kLinger);
    if (queue_.AsyncNext(&pointer, &ok, until) != grpc::CompletionQueue::GOT_EVENT) continue;
    auto* tag = static_cast<QueueTag*>(pointer);
    tag->sink->OnEvent(tag, ok);
  }
}

}  // namespace attnd
