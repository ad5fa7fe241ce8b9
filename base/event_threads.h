// EventThreads: the threads that drive gRPC's callback API in this process, in place of gRPC's own.
//
// gRPC 1.51 takes half of the machine's cores, 2 to 16, and has no setting for it. One of them at a
// time waits for all sockets, and each event wakes the next, which costs a small call more than
// its work; and one that has seen nothing for a second sleeps for 0.1 s, all of them together when
// a server is idle. Here one thread waits and does what comes. A few others join at once when it
// has no pause, and one when it is held up; once there has been none of it for kStay they leave
// again. Connections that move much have the remaining threads, each its own (own_sockets.h)
// (docs/PERFORMANCE.md).
//
// gRPC takes the queue of its callbacks from two functions of its own, which are replaced (where
// gRPC lies within the program, by leave of third_party/system.BUILD). Without an object of this
// class a process gets gRPC's number of threads.
//
// Threads: any; the last server or channel with callbacks must not go on one of these.
#pragma once

#include <memory>

#include "absl/time/time.h"

namespace attnd {

class EventThreads {
 public:
  static constexpr int kMost = 64;
  // How long the others stay after they were last needed.
  static constexpr absl::Duration kStay = absl::Milliseconds(20);

  // At most `most` threads for connections that move much, and a quarter of that, or three, for
  // all others; several objects share the threads of the one with the most.
  explicit EventThreads(int most);
  ~EventThreads();
  EventThreads(const EventThreads&) = delete;
  EventThreads& operator=(const EventThreads&) = delete;

  // How many drive now, of those for all connections.
  int driving() const;

  class Pool;

 private:
  const std::shared_ptr<Pool> pool_;
};

}  // namespace attnd
