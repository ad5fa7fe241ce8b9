// ClientCounters: what a client has had to do so that its calls succeed, since it was made. Any
// thread.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"

namespace attnd {

struct ClientCounters {
  std::atomic<int64_t> calls{0};         // of attention and modules, that have ended
  std::atomic<int64_t> failed_calls{0};  // of these
  std::atomic<int64_t> retries{0};       // of pieces of calls
  std::atomic<int64_t> failovers{0};     // of these, at another address; modules that have moved
  std::atomic<int64_t> leases_lost{0};   // residuals that a server had no more: all was sent again
  std::atomic<int64_t> replays{0};       // calls of modules that were repeated after a restart
  std::atomic<int64_t> waiting_ns{0};    // before retries

  void Retried(absl::Duration delay) {
    ++retries;
    waiting_ns += absl::ToInt64Nanoseconds(delay);
  }
  void Ended(bool ok) {
    ++calls;
    if (!ok) ++failed_calls;
  }
};

}  // namespace attnd
