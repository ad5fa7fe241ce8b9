// EventThreads: the threads that drive gRPC's callback API in this process.
//
// gRPC 1.51 takes half of the machine's cores, 2 to 16, and has no setting for it. Each event wakes
// the next of them, so that many cost small calls up to twice the time (docs/PERFORMANCE.md, A
// small call); and one that has seen nothing for a second sleeps for 0.1 s, all of them together
// when a server is idle, so that a call may find nobody. Here gRPC starts two, one beside them
// never sleeps, and more join while there is much to do.
//
// gRPC asks gpr_cpu_num_cores() for their number when the first server or channel with callbacks is
// made in the process; that function is replaced, and answers as gRPC's own except to this class.
// Where gRPC is linked statically, or was first, its own number stays.
//
// Threads: any.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace grpc {
class CompletionQueue;
}

namespace attnd {

class EventThreads {
 public:
  static constexpr int kLeast = 3, kMost = 64;

  // Before the server is built, and gone after it: at most `most` threads, gRPC's included.
  explicit EventThreads(int most);
  ~EventThreads();
  EventThreads(const EventThreads&) = delete;
  EventThreads& operator=(const EventThreads&) = delete;

  // Something to do. A large transfer is much at once, small calls are when there are kMuch.
  static constexpr int kMuch = 4;
  class Use {
   public:
    Use(EventThreads& owner, int weight) : owner_(owner), weight_(weight) { owner_.Add(weight_); }
    ~Use() { owner_.load_ -= weight_; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    EventThreads& owner_;
    const int weight_;
  };

 private:
  void Add(int weight);
  void Drive();
  void DriveWhileThereIsMuch();
  void RunNext(int milliseconds);

  grpc::CompletionQueue* const queue_;  // gRPC's; held
  std::atomic<int> load_{0};
  std::atomic<bool> stopping_{false};
  absl::Mutex mutex_;
  std::vector<std::thread> threads_;
};

}  // namespace attnd
