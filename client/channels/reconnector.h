// Reconnector: drives channels that have lost their server until they have one again.
//
// In gRPC 1.51 a channel's sockets move only while somebody waits on a completion queue that the
// channel knows. A call that fails at once waits for nothing, so that between such calls nobody
// reads the greeting of a server that is back, and after gRPC's time limit for an attempt the next
// one begins (its own stand-in looks every 5 s, as long as that limit).
//
// Threads: any.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/completion_queue.h>

#include <map>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace attnd {

class Reconnector {
 public:
  Reconnector() = default;
  ~Reconnector();
  Reconnector(const Reconnector&) = delete;
  Reconnector& operator=(const Reconnector&) = delete;

  // Drives `channel` until it is connected, for a minute at most; again for a minute when it is
  // driven already. Returns at once.
  void Drive(const std::shared_ptr<grpc::Channel>& channel);

 private:
  struct Driven {
    std::shared_ptr<grpc::Channel> channel;
    absl::Time until;
  };

  // Asks the queue to report the channel's next change; false when there is no need to.
  bool Watch(const Driven& driven) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Main();

  grpc::CompletionQueue queue_;
  absl::Mutex mutex_;
  std::map<const void*, Driven> driven_
      ABSL_GUARDED_BY(mutex_);  // by the channel, which is the tag
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mutex_);  // from the first channel on
};

}  // namespace attnd
