// CarryStreams: the streams of Carry beside the own stream of one Forward or Backward whose tensors
// travel, each on a connection and a thread of its own. One connection moves what one core copies.
//
// Each stream takes the next chunk that no other has taken, once the server has told it that the
// call is admitted, and lands those of the reply that come over it. So the call ends as well where
// the server, or a thread here, has no time for some of them. A stream that fails while it may have
// chunks under way ends the call, which is tried again.
//
// Threads: the caller's alone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/call/client_core.h"
#include "client/call/reply_landings.h"
#include "client/call/unary_call.h"
#include "client/call/worker_gate.h"
#include "client/modules/module_stream.h"
#include "client/types/call_options.h"
#include "proto/attnd/v1/chunk_queue.h"
#include "proto/attnd/v1/module.pb.h"

namespace attnd {

// How many streams are worth while beside the call's own; `most`: as the server allows.
int CarryStreamCount(const ClientCore& core, int most, int64_t sent_bytes, int64_t received_bytes);

class CarryStreams {
 public:
  // All outlive it.
  struct Call {
    const ClientCore& core;
    int address;
    const CallMetadata& metadata;
    const v1::ModuleCarryHeader& header;
    ChunkQueue& chunks;
    ReplyLandings& landings;
    int64_t bytes;  // for the choice of each connection
    absl::Time deadline;
    const CallOptions& options;
  };
  CarryStreams(const Call& call, int count);
  ~CarryStreams();

  // For the call's own stream: the caller's options, but it also stops where one of these fails.
  const CallOptions& options() const { return own_options_; }
  // The own stream has ended so. Waits until the whole reply has landed, then ends these. Gives the
  // status of the call.
  absl::Status Finish(const absl::Status& own);

 private:
  void Run();
  void EndAll();
  bool IsOver() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  const Call call_;
  PollHook poll_hook_;
  const std::shared_ptr<WorkerGate> gate_ = std::make_shared<WorkerGate>();
  std::stop_source stop_, own_stop_;
  std::stop_callback<std::function<void()>> stopped_;  // by the caller
  CallOptions own_options_, options_;
  mutable absl::Mutex mutex_;
  int running_ ABSL_GUARDED_BY(mutex_) = 0, admitted_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);  // of one that may have had chunks
};

}  // namespace attnd
