// BulkQueue: the completion queue of large transfers and the few threads that drive it. They read,
// write and land for all connections; the worker that waits for an RPC hears of its end by a
// mailbox.
//
// gRPC lets one thread at a time wait for all sockets of a process, and that thread wakes the next
// one after each event: with more threads than events more of them sleep when they are called, and
// cores stay idle. So large transfers share few threads, while a small call's thread drives a queue
// of its own (CompletionQueues). Without large transfers these threads wait for work elsewhere, so
// that they do not take the events of small calls.
//
// Threads: any.
#pragma once

#include <grpcpp/completion_queue.h>

#include <deque>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/steady_cond_var.h"

namespace attnd {

struct QueueTag;

// Receives the operations that gRPC has finished.
class EventSink {
 public:
  virtual ~EventSink() = default;
  // On a thread of the queue; of one sink several at a time.
  virtual void OnEvent(QueueTag* tag, bool ok) = 0;
};

// The base of every tag on the queue.
struct QueueTag {
  EventSink* sink = nullptr;
};

// Tags on their way to one thread.
class Mailbox {
 public:
  void Put(QueueTag* tag);
  QueueTag* Take(absl::Time until);  // null when none has come by then

 private:
  absl::Mutex mutex_;
  SteadyCondVar came_;
  std::deque<QueueTag*> tags_ ABSL_GUARDED_BY(mutex_);
};

class BulkQueue {
 public:
  explicit BulkQueue(int thread_count) : thread_count_(thread_count) {}
  ~BulkQueue();  // nothing may be pending on it

  // While one lives the threads drive the queue.
  class Use {
   public:
    explicit Use(BulkQueue& owner) : owner_(owner) { owner_.Begin(); }
    ~Use() { owner_.End(); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    grpc::CompletionQueue& queue() { return owner_.queue_; }

   private:
    BulkQueue& owner_;
  };

 private:
  void Begin();
  void End();
  void Drive();

  const int thread_count_;
  grpc::CompletionQueue queue_;
  absl::Mutex mutex_;
  int uses_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);  // from the first use on
};

}  // namespace attnd
