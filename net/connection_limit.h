// ConnectionLimit: how many connections the daemon has, and no more.
//
// gRPC 1.51 has no such limit, and does not tell when it closes a connection, so that is looked for
// when the limit seems to be reached: a descriptor whose socket is another one, or none.
//
// Threads: any.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace attnd {

class ConnectionLimit {
 public:
  // `clock` outlives it.
  ConnectionLimit(int max_connections, const Clock& clock) : max_(max_connections), clock_(clock) {}

  // Counts a new connection; false when there are enough already.
  bool Take(int socket);

  struct Open {
    int tcp = 0, unix_sockets = 0;
    int all() const { return tcp + unix_sockets; }
  };
  Open open();        // connections now
  int64_t refused();  // since the start

 private:
  struct Connection {
    int socket;
    uint64_t cookie;  // of the kernel's socket: no other has the same
    bool is_unix;
  };
  void ForgetClosed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t max_;
  const Clock& clock_;
  absl::Mutex mutex_;
  std::vector<Connection> open_ ABSL_GUARDED_BY(mutex_);
  absl::Time looked_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t refused_ ABSL_GUARDED_BY(mutex_) = 0;
};

// `wanted`, or as many as leave the process descriptors for everything else.
int ConnectionsThatFit(int wanted);

}  // namespace attnd
