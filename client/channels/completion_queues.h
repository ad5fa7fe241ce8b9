// CompletionQueues: queues that calls borrow, one for each thread that drives RPCs. A thread that
// polls its own queue does its own reading and writing, without a hand-over to one of gRPC's
// threads; making a queue costs far more than a small call. Threads: any.
#pragma once

#include <grpcpp/completion_queue.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "net/spin_wait.h"

namespace attnd {

class CompletionQueues {
 public:
  // Borrowed: gives its queue back when it goes; nothing may be pending on it then.
  class Borrowed {
   public:
    explicit Borrowed(CompletionQueues& pool) : pool_(pool), queue_(pool.Take()) {
      ++OfProcess().borrowed;
    }
    ~Borrowed() {
      --OfProcess().borrowed;
      pool_.Give(std::move(queue_));
    }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    grpc::CompletionQueue& queue() { return *queue_; }

    // As queue().AsyncNext(tag, ok, until); true: an event. Looks for it before it sleeps, if no
    // other thread of the process drives such a queue.
    template <typename Time>
    bool Next(void** tag, bool* ok, const Time& until) {
      auto next = [&](const auto& time) {
        return queue_->AsyncNext(tag, ok, time) == grpc::CompletionQueue::GOT_EVENT;
      };
      return OfProcess().waits.Wait(
          OfProcess().borrowed == 1, [&] { return next(gpr_inf_past(GPR_CLOCK_MONOTONIC)); },
          [&] { return next(until); });
    }

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

  struct Process {
    SpinWait waits;
    std::atomic<int> borrowed{0};  // queues of all clients
  };
  static Process& OfProcess() {
    static Process process;
    return process;
  }

  absl::Mutex mutex_;
  std::vector<std::unique_ptr<grpc::CompletionQueue>> free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
