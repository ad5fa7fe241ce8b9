// OwnSockets: sockets that one thread waits for by itself.
//
// In gRPC 1.51 all sockets of a process are in one epoll set, for which one thread at a time waits;
// it wakes the next before it reads, so transfers wait for threads to wake up, and each read of a
// connection happens on another core than the last. Here a socket that moves much leaves that set
// for the set of a thread (EventOrder::HandOver), which reads, writes and tells the calls of its
// connection without another thread, out of its own core's cache, as long as it moves much
// (docs/PERFORMANCE.md, Threads). It comes back when it has not for a while, so that small calls
// find the few threads that are awake; and other threads that wake up pass this one, whose time
// slice is long.
//
//   recvmsg: moves much → EAGAIN, from gRPC's set to that of the thread with the fewest such
//   thread: epoll_wait → grpc_completion_queue_next → grpc_pollset_work tells gRPC → completions
//
// For such a thread gRPC's grpc_pollset_work does not wait, it tells of what the thread has heard;
// and grpc_pollset_kick, which would wake another thread for a completion that this one is about to
// take, does nothing but remember. Both are called through the functions here (linkopts in BUILD)
// where gRPC lies within the program; a program without program_calls, or beside a shared gRPC,
// has no such threads.
//
// Threads: Drive is called by the one thread whose sockets they are; Wake by any.
// Source: gRPC 1.51, src/core/lib/iomgr/ev_epoll1_linux.cc and
// src/core/lib/surface/completion_queue.cc (cq_next).
#pragma once

#include <grpc/grpc.h>
#include <sys/epoll.h>

#include <array>
#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "base/file_descriptor.h"

namespace attnd {

class OwnSockets {
 public:
  // For one thread. Null where sockets cannot be handed over, which is known once there is a
  // completion queue, and without descriptors.
  static std::unique_ptr<OwnSockets> Create();
  // This program's system calls pass through EventOrder (program_calls.cc).
  static void OnProgramCalls();

  // Its sockets go back to gRPC's set.
  ~OwnSockets();
  OwnSockets(const OwnSockets&) = delete;
  OwnSockets& operator=(const OwnSockets&) = delete;

  // Waits for these sockets or Wake, tells gRPC, and runs completions of `queue` until there is
  // none. False: the queue has been shut down and is empty. What `run` does must not wait for
  // another completion of the queue.
  bool Drive(grpc_completion_queue* queue, absl::FunctionRef<void(void* tag, bool ok)> run);
  void Wake();

  // Of the thread that drives: tells gRPC of what was heard. Called by grpc_pollset_work.
  void Tell();

 private:
  static constexpr int kMostEvents = 16;

  OwnSockets(FileDescriptor epoll, FileDescriptor wake);
  void Wait();

  const FileDescriptor epoll_, wake_;
  std::array<epoll_event, kMostEvents> events_;
  int heard_ = 0;
  int64_t look_at_ = 0;  // when sockets that move little are looked for
};

}  // namespace attnd
