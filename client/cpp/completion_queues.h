// CompletionQueues: queues that calls borrow, one for each thread that drives RPCs. A thread that
// polls its own queue does its own reading and writing, without a hand-over to one of gRPC's
// threads; making a queue costs far more than a small call. Threads: any.
#pragma once

#include <grpcpp/completion_queue.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/cpu_quota.h"
#include "base/short_waits.h"

namespace attnd {

class CompletionQueues {
 public:
  // Waits for what such queues bring, of all clients of the process.
  static ShortWaits& Waits() {
    static ShortWaits waits(AvailableCpus());
    return waits;
  }

  // Borrowed: gives its queue back when it goes; nothing may be pending on it then.
  class Borrowed {
   public:
    explicit Borrowed(CompletionQueues& pool) : pool_(pool), queue_(pool.Take()) {}
    ~Borrowed() { pool_.Give(std::move(queue_)); }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    grpc::CompletionQueue& queue() { return *queue_; }

   private:
    CompletionQueues& pool_;
    std::unique_ptr<grpc::CompletionQueue> queue_;
  };

  ~CompletionQueues() {
    absl::MutexLock lock(&mutex_);
    for (auto& queue : free_) {
      queue->Shutdown();
      void* tag;
      bool ok;
      while (queue->Next(&tag, &ok)) {
      }
    }
  }

 private:
  std::unique_ptr<grpc::CompletionQueue> Take() {
    absl::MutexLock lock(&mutex_);
    if (free_.empty()) return std::make_unique<grpc::CompletionQueue>();
    auto queue = std::move(free_.back());
    free_.pop_back();
    return queue;
  }
  void Give(std::unique_ptr<grpc::CompletionQueue> queue) {
    absl::MutexLock lock(&mutex_);
    free_.push_back(std::move(queue));
  }

  absl::Mutex mutex_;
  std::vector<std::unique_ptr<grpc::CompletionQueue>> free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
