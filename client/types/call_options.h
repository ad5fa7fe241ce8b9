// CallOptions: what a caller may choose for one call, and Progress, which a call reports.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>

#include "absl/time/time.h"
#include "client/types/capture.h"
#include "client/types/client_options.h"

namespace attnd {

// Payload bytes of a call so far. Retried bytes count again.
struct Progress {
  int64_t shards_done = 0;
  int64_t shards_total = 0;
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
  int64_t bytes_total = 0;  // both ways, without retries
};

struct CallOptions {
  std::optional<absl::Duration> timeout;  // absent: ClientOptions::timeout
  std::stop_token stop;                   // a stop request ends the call with CANCELLED
  std::optional<CallPriority> priority;   // absent: ClientOptions::priority
  // ≤ 64 bytes, in the server's logs; empty: a random one. A kept Forward needs one of its own: the
  // next of the same name takes its residual's place.
  std::string request_id;
  // W3C's, of the span that the call is part of: in the server's logs, and parent of its spans.
  // Empty: none.
  std::string traceparent;
  // Forward: also capture the attention map. The call is then sent in one piece, to the server that
  // keeps the previous map if there is one.
  std::optional<CaptureOptions> capture;
  // Called after each shard, one call at a time, from any thread; must not block.
  std::function<void(const Progress&)> progress;
  // Called every 50 ms on the caller's thread while that waits, for example to handle signals; not
  // by a call that ends sooner.
  std::function<void()> poll_hook;
};

}  // namespace attnd
