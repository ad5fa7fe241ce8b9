// AttentionClient: exact attention on remote daemons, as if it were a function call.
//
//     Forward(problem, arrays, outputs)
//       → Validate → PlanShards → one RPC per shard over several connections → the outputs
//
// Tensors are contiguous in the problem's layout and element type. Inputs are sent from where they
// lie and outputs are written where they are wanted: the caller's arrays stay his, and none is read
// or written after a call has returned. A call gives its whole result or an error; after an error
// the contents of the outputs are unspecified. The result is bitwise the same however the call is
// cut into shards.
//
// Errors: what Validate refuses is INVALID_ARGUMENT before a byte is sent; a piece that no message
// can hold, where a server takes no streams, is OUT_OF_RANGE naming the limit; everything else is
// the server's status with its ErrorInfo (DetailOf). UNAVAILABLE is retried here. The deadline
// covers the whole call.
//
// Threads: every method may be called from any thread, at the same time. A call runs on its
// caller's thread, helped by the client's own threads when it has several shards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "attention/problem.h"
#include "client/cpp/client_options.h"
#include "client/cpp/error_detail.h"

namespace attnd {

// Inputs. Names are the wire's; shapes are those of docs/NUMERICS.md.
struct ForwardTensors {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const uint8_t* mask_bits = nullptr;  // iff problem.bool_mask
  const void* bias = nullptr;          // iff problem.bias
};

struct ForwardOutputs {
  void* o = nullptr;
  float* lse = nullptr;  // [batch, q_heads, q_len], packed [q_heads, q_len]; null: not wanted
};

struct BackwardTensors {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const uint8_t* mask_bits = nullptr;  // iff problem.bool_mask
  const void* bias = nullptr;          // iff problem.bias
  const void* o = nullptr;             // as Forward gave them
  const float* lse = nullptr;
  const void* d_o = nullptr;
  const float* d_lse = nullptr;  // null: zero
};

struct BackwardOutputs {
  void* d_q = nullptr;
  void* d_k = nullptr;
  void* d_v = nullptr;
  float* d_bias = nullptr;  // of the bias's shape, iff problem.bias->want_gradient
  float* d_sink = nullptr;  // [batch, q_heads], iff the denominator is a sink
};

struct ResidualState;

// Residual: what the servers keep of one Forward so that its Backward sends d_o alone. It may hold
// nothing: keeping is a favour, and a server may take it back at any time; Backward then sends
// everything, and the result is bitwise the same. Its end gives the leases back soon, without
// waiting for anything; while it lives the client prolongs them. It may outlive its client and is
// then empty. Threads: several Backwards may use one at once.
class Residual {
 public:
  Residual();
  Residual(Residual&&) noexcept;
  Residual& operator=(Residual&&) noexcept;
  ~Residual();

  int64_t bytes_held() const;  // on the servers, as far as is known here; 0: nothing

 private:
  friend class AttentionClient;
  explicit Residual(std::unique_ptr<ResidualState> state);
  std::unique_ptr<ResidualState> state_;
};

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
  // Called after each shard, one call at a time, from any thread; must not block.
  std::function<void(const Progress&)> progress;
  // Called some twenty times a second on the caller's thread while that waits, so that it can look
  // after other things (signals, a stop request); not by a call that ends sooner.
  std::function<void()> look_around;
};

// What was done: the servers' receipts of all shards, merged.
struct CallReceipt {
  struct Stage {
    std::string name;  // receive, queue, h2d, kernel, d2h, send
    absl::Duration total;
    absl::Duration longest;  // of one shard
  };
  std::string backend, device, kernel;  // of the first shard; others differ only between replicas
  AccumulateType accumulate = AccumulateType::kFloat32;
  double dropout_p_effective = 0;
  bool deterministic = true;
  std::vector<Stage> stages;
  int64_t shards = 0;
  int64_t retries = 0;
  int64_t leased = 0;  // backward: shards whose tensors the server had; forward: shards it keeps
  int64_t shared = 0;  // shards whose tensors lay in memory shared with the daemon
  int64_t bytes_sent = 0;      // payload, retries included
  int64_t bytes_received = 0;  // payload
  int64_t bytes_copied = 0;    // of those sent: gathered first, since they lay in small pieces
  absl::Duration elapsed;
};

struct DeviceInfo {
  std::string name, uuid, backend, architecture;
  int64_t memory_bytes = 0;
  bool serving = false;
  int threads = 0;
};

struct ServerInfo {
  std::string address;
  std::string version, boot_epoch;
  int64_t max_message_bytes = 0;
  std::vector<std::string> features;
  std::vector<DeviceInfo> devices;
};

enum class Health { kServing, kNotServing };

class AttentionClient {
 public:
  // Reads the TLS files and checks the options; connects when the first call needs it. Errors:
  // INVALID_ARGUMENT naming the option, NOT_FOUND for a file.
  static absl::StatusOr<std::unique_ptr<AttentionClient>> Connect(ClientOptions options);
  ~AttentionClient();  // no call may be running
  AttentionClient(const AttentionClient&) = delete;
  AttentionClient& operator=(const AttentionClient&) = delete;

  // `keep`, if not null, receives what the servers keep for Backward; the call is then cut as
  // Backward's would be, and problem.bias->want_gradient should be what Backward's will be.
  absl::StatusOr<CallReceipt> Forward(const Problem& problem, const ForwardTensors& in,
                                      const ForwardOutputs& out, const CallOptions& options = {},
                                      Residual* keep = nullptr);
  // `residual`, if not null, is that of the Forward with the same tensors; it is used as far as it
  // still holds something and its problem is this one.
  absl::StatusOr<CallReceipt> Backward(const Problem& problem, const BackwardTensors& in,
                                       const BackwardOutputs& out, const CallOptions& options = {},
                                       const Residual* residual = nullptr);

  // Memory for tensors, 64-byte aligned. Where it is shared with the daemon (one address,
  // "unix:path"), calls do not copy tensors that lie there; elsewhere it is ordinary memory. It may
  // outlive the client. RESOURCE_EXHAUSTED when there is none.
  absl::StatusOr<std::shared_ptr<std::byte>> Allocate(int64_t bytes);

  // Of the address with this index in ClientOptions::addresses, where a name counts as often as it
  // has addresses.
  absl::StatusOr<ServerInfo> GetServerInfo(int address_index = 0, const CallOptions& options = {});
  absl::StatusOr<Health> CheckHealth(int address_index = 0, const CallOptions& options = {});

  const ClientOptions& options() const;

 private:
  class Impl;
  explicit AttentionClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace attnd
