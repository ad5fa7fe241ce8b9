// TransportOptions: what gRPC enforces for the daemon, and its settings for large messages.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "server/call/transfer_progress.h"

namespace attnd {

struct TransportOptions {
  int64_t max_message_bytes = int64_t{16} << 20;    // request or reply, header included
  int64_t max_metadata_bytes = 16 << 10;            // headers of one call
  int max_concurrent_streams = 64;                  // calls of one connection at a time
  int64_t receive_memory_bytes = int64_t{1} << 30;  // gRPC's resource quota: requests in arrival
  int max_connections = 4096;                       // open at a time; a further one is closed
  absl::Duration max_connection_age = absl::Minutes(30);
  absl::Duration max_connection_age_grace = absl::Minutes(20);
  absl::Duration max_connection_idle = absl::Minutes(10);  // without a call
  absl::Duration handshake_timeout = absl::Seconds(10);
  absl::Duration keepalive_time = absl::Minutes(2);
  absl::Duration keepalive_timeout = absl::Seconds(20);
  absl::Duration min_ping_interval = absl::Seconds(5);  // of a peer; more often: disconnected
  // on: gRPC probes each connection for its bandwidth-delay product and sets the windows by it, at
  // least 4 MiB; auto: where an address is not this host's alone; off.
  std::string bdp_probe = "auto";
  int64_t stream_window_bytes = int64_t{4} << 20;  // of one call, that a peer may send unread
  int64_t max_frame_bytes = int64_t{4} << 20;      // of HTTP/2, that a peer may send in one piece
  TransferLimits transfers;
};

// Whether a server that listens on these addresses probes.
bool ProbesBandwidth(const TransportOptions& transport, const std::vector<std::string>& listen);

}  // namespace attnd
