// AttentionClient: exact attention on remote daemons, as if it were a function call.
//
//     Forward(problem, arrays, outputs)
//       → Validate → PlanShards → one RPC per shard over several connections → the outputs
//
// Tensors are contiguous in the problem's layout and element type. Inputs are sent from the
// caller's arrays and outputs are written to them; none is read or written after a call has
// returned. Where a peer has stopped reading, a call may return up to 5 s after its deadline for
// that. A call gives its whole result or an error; after an error the contents of the outputs are
// unspecified. The result is bitwise the same however the call is cut into shards.
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
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/problem.h"
#include "client/residual.h"
#include "client/types/call_options.h"
#include "client/types/call_receipt.h"
#include "client/types/capture.h"
#include "client/types/client_options.h"
#include "client/types/error_detail.h"
#include "client/types/mask_report.h"
#include "client/types/server_info.h"
#include "client/types/tensors.h"

namespace attnd {

namespace v1 {
class BuildPatternRequest;
class BuildPatternResponse;
}  // namespace v1

struct ClientCore;

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

  // Asks the address with this index in ClientOptions::addresses, where a name counts as often as
  // it has addresses.
  absl::StatusOr<ServerInfo> GetServerInfo(int address_index = 0, const CallOptions& options = {});
  absl::StatusOr<Health> CheckHealth(int address_index = 0, const CallOptions& options = {});
  // Asks that daemon what the mask of such calls costs; it keeps the mask for them. Not needed: a
  // call that brings its mask does the same. INVALID_ARGUMENT without problem.mask.
  absl::StatusOr<MaskReport> CompileMask(const Problem& problem, int address_index = 0,
                                         const CallOptions& options = {});

  // Builds a block pattern from a map that a server keeps: a serialized
  // attnd.v1.BuildPatternRequest, whose token is `kept`'s. FAILED_PRECONDITION CAPTURE_LOST.
  absl::StatusOr<v1::BuildPatternResponse> BuildPattern(v1::BuildPatternRequest request,
                                                        const KeptAttentionMap& kept,
                                                        const CallOptions& options = {});
  // Frees it there.
  absl::Status ReleaseCapture(const KeptAttentionMap& kept, const CallOptions& options = {});

  const ClientOptions& options() const;
  // Connections, retries and queues, for other services' calls of this library.
  const ClientCore& core() const;

 private:
  class Impl;
  explicit AttentionClient(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace attnd
