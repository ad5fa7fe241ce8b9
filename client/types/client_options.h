// ClientOptions: the addresses of an AttentionClient, its credentials, retries and limits.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace attnd {

enum class CallPriority : uint8_t { kLow = 1, kNormal = 2, kHigh = 3 };

// PEM files. All empty: the server is checked against the system's certificate authorities.
struct ClientTlsOptions {
  std::string ca_file;
  std::string certificate_file;  // with key_file: the client's own, for mutual TLS
  std::string key_file;
  std::string server_name;  // expected in the server's certificate; empty: the address's host
};

// Says what is retried: UNAVAILABLE, the caller's own quota (RESOURCE_EXHAUSTED with TENANT_QUOTA),
// and a CANCELLED that the caller did not ask for. A shard that is over the quota because others of
// the same call are under way only waits for one of them, which is no attempt. A call that is over
// it because of the caller's other calls is tried until its deadline. A retry goes to another
// address at once if there is one that the shard has not tried; otherwise it waits: as long as the
// server says (RetryInfo or grpc-retry-pushback-ms), else a random time below initial_backoff·2ⁿ,
// at most max_backoff.
struct RetryPolicy {
  int max_attempts = 3;  // of one shard, the first included; 1: no retries
  absl::Duration initial_backoff = absl::Milliseconds(50);
  absl::Duration max_backoff = absl::Seconds(2);
  // A retry takes one token, a success gives this back; without a token there is no retry, so a
  // server in trouble sees at most a tenth more calls.
  double budget = 10;
  double budget_per_success = 0.1;
};

struct ClientOptions {
  // "host:port", "unix:path", or any gRPC target. At least one; several are replicas that any shard
  // may go to, as are the addresses of a name: "dns:///name:port", "srv:name", "dir:path",
  // "file:path" (channels/replica_names.h). 16 of all are kept.
  std::vector<std::string> addresses;
  int channels_per_address = 8;  // connections; 1..64
  std::optional<ClientTlsOptions> tls;
  // Sent as "authorization: Bearer ...", so printable ASCII in one line. Refused without TLS unless
  // the address is loopback or a unix socket.
  std::string bearer_token;
  // HTTP proxy to connect through: "" none, "http://host:port", or "environment", the first that is
  // set of grpc_proxy, https_proxy and http_proxy; not for addresses that no_proxy names.
  std::string proxy;
  absl::Duration timeout = absl::Seconds(30);  // of a call that names none
  CallPriority priority = CallPriority::kNormal;
  RetryPolicy retry;
  // Waits for a connection until the deadline, instead of UNAVAILABLE when there is none: a
  // training job then outlives a restart of its daemon.
  bool wait_for_ready = false;
  // Size of a shard's larger message that PlanShards aims at; the servers' limits hold beside it.
  int64_t shard_bytes = int64_t{8} << 20;
  // Also cuts where the shards' results have to be put together here: backward by rows of Q, whose
  // d_k and d_v are added up, and forward by keys, merged by lse. Exact to rounding, but not
  // bitwise what the uncut call gives, as every other cut is.
  bool merge_partial_results = false;
  // How long a server shall keep an unused Residual; renewed while the Residual lives.
  absl::Duration residual_ttl = absl::Minutes(2);
  // A shard whose larger message is above this is streamed in chunks, where the servers can.
  int64_t stream_above_bytes = int64_t{8} << 20;
  // Most memory that is shared with the daemon when the only address is "unix:path"; 0: none, and
  // all tensors travel.
  int64_t shared_memory_bytes = int64_t{4} << 30;
  // Largest reply that is accepted in one message.
  int64_t max_reply_bytes = int64_t{256} << 20;
};

}  // namespace attnd
