// CallRunner: drives a LogicalCall's shards over the connections until all are done or one has
// failed for good. Each worker is one thread with a completion queue of its own and a few RPCs in
// flight; the caller's thread is the first worker, helpers are the others.
//
//     worker: take a shard → best connection → Encode → RPC → Land, or delay for a retry
//
// When Run returns no RPC is running and no slice of the caller's arrays is held any more. gRPC
// ends an RPC only after the write in which it takes part. Where a peer has stopped reading, TCP
// ends that write after Connections::kWriteTimeout; a unix socket, when the peer reads on or ends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/call/call_state.h"
#include "client/call/client_core.h"
#include "client/call/logical_call.h"
#include "client/call/shard_rpc.h"
#include "client/channels/connections.h"
#include "client/channels/grpc_status.h"
#include "client/channels/retry.h"
#include "client/types/call_options.h"
#include "client/types/call_receipt.h"

namespace attnd {

// Which shards are streamed rather than sent as one message.
struct StreamUse {
  int64_t above_bytes = INT64_MAX;  // of the larger message; none
  int64_t chunk_bytes = 0;          // most data of a chunk
};

class CallRunner {
 public:
  // All outlive it.
  CallRunner(const ClientCore& core, LogicalCall& call, const CallOptions& options,
             absl::Time deadline, const StreamUse& streams);
  absl::StatusOr<CallReceipt> Run();

 private:
  class ShardWorker;
  struct Attempt;

  void RunWorkers();
  int WorkerCount() const;
  // A shard's RPC has ended: lands it, delays it, or fails the call.
  void Handle(Attempt& attempt);
  bool Shares(int64_t shard) const;
  bool MovesBulk() const;
  bool ResendUnshared(const Attempt& attempt, const absl::Status& status);
  void HandleFailure(Attempt& attempt);
  bool ResendWithoutResidual(const Attempt& attempt, const absl::Status& status);
  absl::Status StatusOf(const Attempt& attempt) const;
  Pushback PushbackFor(const Attempt& attempt, const absl::Status& status) const;
  absl::Status WithProgress(const absl::Status& status);

  const ClientCore& core_;
  LogicalCall& call_;
  const absl::Time deadline_;
  const StreamUse streams_;
  std::vector<int64_t> pending_;  // shards that need a server
  CallState state_;
  const CallOptions& options_;
  // Each shard has these; the worker that holds it touches them.
  struct Tries {
    int failed = 0;
    bool unshared = false;        // its tensors have to travel
    std::vector<bool> addresses;  // where it has been; those beyond: not yet
    bool WasAt(int address) const {
      return address < static_cast<int>(addresses.size()) && addresses[address];
    }
    int mask_at = -1;  // the server that wants the mask itself: another would leave it without
  };
  std::vector<Tries> tries_;
  const bool bulk_;  // its RPCs run on the bulk queue
};

}  // namespace attnd
