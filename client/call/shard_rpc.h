// ShardRpc: one try of one shard on the wire, as one message each way or as a stream of chunks. It
// is driven by the worker that made it: each operation that gRPC has finished comes back through
// OnEvent until that says that the RPC has ended. One thread at a time; `call`, `borrowed` and
// `context` outlive it.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "client/call/borrowed_slices.h"
#include "client/call/logical_call.h"
#include "client/channels/bulk_queue.h"
#include "client/channels/connections.h"

namespace attnd {

struct ShardAttempt {
  LogicalCall& call;
  int64_t shard;
  BorrowedSlices& borrowed;
  grpc::ClientContext& context;
  void* owner;      // of its tags
  EventSink* sink;  // likewise
};

class ShardRpc {
 public:
  enum class Op { kStart, kWrite, kRead, kFinish };
  // A completion queue gives this back. `owner` is the worker's.
  struct Tag : QueueTag {
    void* owner;
    Op op;
  };

  virtual ~ShardRpc() = default;

  // The attempt keeps the connection.
  virtual void Start(const Connection& connection, grpc::CompletionQueue& queue) = 0;
  // True when the RPC has ended and no operation of it is pending.
  virtual bool OnEvent(Op op, bool ok) = 0;
  // Lands the reply of an RPC that has ended with OK: it is in the caller's arrays; gives the
  // payload bytes. `address`: where it was computed.
  virtual absl::StatusOr<int64_t> Land(int address) = 0;
  virtual const ShardReceipt& receipt() const = 0;  // of an RPC that has landed

  const grpc::Status& status() const { return status_; }
  int64_t payload_bytes() const { return payload_bytes_; }  // of the request
  virtual int64_t copied_bytes() const = 0;                 // of them, gathered so far
  bool leased() const { return leased_; }                   // by a residual's token
  bool shared() const { return shared_; }                   // its tensors do not travel

 protected:
  void* TagOf(Op op) { return static_cast<QueueTag*>(&tags_[static_cast<int>(op)]); }

  explicit ShardRpc(const ShardAttempt& attempt);

  grpc::Status status_;
  int64_t payload_bytes_ = 0;
  bool leased_ = false;
  bool shared_ = false;

 private:
  Tag tags_[4];
};

std::unique_ptr<ShardRpc> MakeUnaryRpc(const ShardAttempt& attempt);
// Null when there is no shared memory to be had.
std::unique_ptr<ShardRpc> MakeSharedRpc(const ShardAttempt& attempt, SharedMemory& memory);
// `chunk_bytes`: most data of a chunk.
std::unique_ptr<ShardRpc> MakeStreamRpc(const ShardAttempt& attempt, int64_t chunk_bytes);

}  // namespace attnd
