// BulkQueue: the completion queue of large transfers and the few threads that drive it. They read,
// write and land for all connections; the lane that waits for an RPC hears of its end by a mailbox.
//
// In gRPC 1.51 one thread at a time waits for all sockets of a process, and it wakes the next one
// after each event: the more threads wait, the more of them sleep when they are called, and cores
// stay idle (docs/PERFORMANCE.md). So large transfers share few threads, while a small call's
// thread drives a queue of its own (CompletionQueues). Without large transfers these threads sleep
// elsewhere, so that they do not take the events of small calls. Where sockets can be handed over
// one of them waits for all and the others each for connections of their own (own_sockets.h).
//
// Threads: any.
#pragma once

#include <grpcpp/completion_queue.h>

#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/own_sockets.h"

namespace attnd {

struct QueueTag;

// Who hears of an operation that gRPC has finished.
class EventSink {
 public:
  virtual ~EventSink() = default;
  // On a thread of the queue; of one sink several at a time.
  virtual void OnEvent(QueueTag* tag, bool ok) = 0;
};

// The base of whatever is given to gRPC as a tag on the queue.
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
  absl::CondVar came_;
  std::deque<QueueTag*> tags_ ABSL_GUARDED_BY(mutex_);
};

class BulkQueue {
 public:
  // Threads for all connections where none can have its own, and else those with connections of
  // their own.
  BulkQueue(int shared_threads, int own_threads)
      : shared_threads_(shared_threads), own_threads_(own_threads) {}
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
  void AddOwnThreads() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Drive();
  void DriveOwn(OwnSockets& sockets);
  bool stopping() {
    absl::MutexLock lock(&mutex_);
    return stopping_;
  }

  const int shared_threads_, own_threads_;
  grpc::CompletionQueue queue_;
  absl::Mutex mutex_;
  int uses_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<OwnSockets>> own_sockets_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);  // from the first use on
};

}  // namespace attnd
