// CallStream: one RPC of the service Modules as its handler sees it: messages to read and to write,
// one after the other, on a thread of its own, which may wait. gRPC's callbacks wake it; CallWatch
// cuts a peer that neither sends nor reads while the handler waits for it. One shape for all kinds:
// a unary or server-streaming request is read once, a unary or client-streaming reply is written
// once. Few wakes: messages are read ahead, and the last one goes out with the status.
//
//   reactor made → Begin → (once a message is there) handler: Read, Write → Finish → OnDone →
//   deleted
//
// Threads: the handler's, gRPC's and the watch's.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>
#include <grpcpp/support/slice.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "proto/attnd/v1/chunk_framing.h"
#include "server/metrics/metrics.h"
#include "server/rpc/call_room.h"
#include "server/rpc/call_watch.h"
#include "server/rpc/calls.h"
#include "server/rpc/open_calls.h"

namespace attnd {

// The parts of the server that a stream uses; all outlive it.
struct StreamDeps {
  const Clock& clock;
  Metrics& metrics;
  Calls& calls;
};

class CallStream : public WatchedCall {
 public:
  // `request`: the only message; null: they come as a stream.
  CallStream(const StreamDeps& deps, grpc::CallbackServerContext& context, CallCost cost,
             const grpc::ByteBuffer* request);
  ~CallStream() override = default;

  grpc::CallbackServerContext& context() { return context_; }

  // `run_handler`: once the first message is whole, or the call is broken before; has the handler
  // run, on another thread, or finishes the call.
  void Begin(std::function<void()> run_handler);

  // Before the handler runs: a place among the calls of its service, which it has taken, and room
  // for what it holds. Both come back when the last byte of the reply has left. CallRoom's errors.
  absl::Status Enter(FairShares::Share place, const FairShares::Holder& holder);

  // The handler's: room for the objects that a message becomes. CallRoom's errors.
  absl::Status HoldRequest(int64_t object_bytes) { return room_.HoldRequest(object_bytes); }
  // The handler's. False: half-close, or the call is broken. A message is written once another one
  // follows, or with Finish.
  bool Read(grpc::ByteBuffer& message);
  bool Write(grpc::ByteBuffer message);
  // Writes the message that is held, where the peer sends its next ones after it.
  bool Flush();
  // Why: the watch's status, CANCELLED, DEADLINE_EXCEEDED, or that there is no room for a message;
  // OK after a half-close.
  absl::Status Broken() const;
  std::stop_token stop() const { return stop_.get_token(); }
  bool is_unix_socket() const { return unix_socket_; }
  // The handler's: tensors that it takes from shared memory and will leave there.
  void Shared(int64_t received_bytes, int64_t sent_bytes);
  // How many bytes of payloads, beside those in shared memory, may come and go.
  virtual int64_t most_payload_bytes() const { return INT64_MAX; }
  // The handler's: of messages and shared memory so far.
  int64_t received_bytes() const { return received_bytes_; }
  int64_t sent_bytes() const { return sent_bytes_; }
  // Last; the handler touches the stream no more.
  void Finish(const grpc::Status& status);

  void Cut(const absl::Status& status) override;  // the watch's

 protected:
  // The reactor's side: a message of a stream; the end, with the last message, null: there is none.
  virtual void StartReading(grpc::ByteBuffer*) {}
  // Leaves the first of the messages that this one is made of, and returns the others.
  virtual grpc::ByteBuffer TakeOthers(grpc::ByteBuffer&) const { return {}; }
  virtual void StartWriting(grpc::ByteBuffer*) {}
  virtual void FinishCall(grpc::ByteBuffer* last, const grpc::Status& status) = 0;
  void ReadDone(bool ok);
  void WriteDone(bool ok);
  void Cancelled();
  void Done();

 private:
  bool IsBroken() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !write_ok_ || cancelled_ || !cut_.ok();
  }
  bool WriteHeld();
  void ReadAhead();
  void RunHandler();
  void Release() {
    if (--lives_ == 0) delete this;
  }

  const StreamDeps deps_;
  const OpenCalls::Call open_;
  FairShares::Share place_;
  CallRoom room_;
  absl::Status no_room_;  // the handler's: for a message of the reply
  grpc::CallbackServerContext& context_;
  const bool unix_socket_;
  const absl::Time deadline_;
  std::atomic<int> lives_{2};  // the handler's and gRPC's
  std::stop_source stop_;
  grpc::ByteBuffer read_;       // gRPC's while reading_
  grpc::ByteBuffer write_;      // gRPC's until write_done_
  bool sending_ = false;        // the handler's: the peer's time to read runs
  bool holds_message_ = false;  // the handler's: write_ is yet to be written
  int64_t received_bytes_ = 0, sent_bytes_ = 0;

  mutable absl::Mutex mutex_;
  std::function<void()> run_handler_ ABSL_GUARDED_BY(mutex_);  // null: it runs
  std::deque<grpc::ByteBuffer> arrived_ ABSL_GUARDED_BY(mutex_);
  size_t arrived_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  int starting_reads_ ABSL_GUARDED_BY(mutex_) = 0;  // StartReading has not returned yet
  bool read_all_ ABSL_GUARDED_BY(mutex_) = false;
  bool write_done_ ABSL_GUARDED_BY(mutex_) = true;
  bool write_ok_ ABSL_GUARDED_BY(mutex_) = true;
  bool finishing_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status cut_ ABSL_GUARDED_BY(mutex_);
};

// A message that gRPC writes and the one behind it, each a chunk with its header.
inline constexpr CallCost kStreamedReply{2 * (kChunkBytes + (int64_t{1} << 10))};

// The kinds, over gRPC's reactors.
class UnaryStream final : public grpc::ServerUnaryReactor, public CallStream {
 public:
  UnaryStream(const StreamDeps& deps, grpc::CallbackServerContext& context, CallCost cost,
              const grpc::ByteBuffer& request, grpc::ByteBuffer& reply)
      : CallStream(deps, context, cost, &request), reply_(reply) {}
  void OnCancel() override { Cancelled(); }
  void OnDone() override { Done(); }

 private:
  void FinishCall(grpc::ByteBuffer* last, const grpc::Status& status) override;

  grpc::ByteBuffer& reply_;
};

// A stream's messages end to end, as one message each way.
class WholeStream final : public grpc::ServerUnaryReactor, public CallStream {
 public:
  WholeStream(const StreamDeps& deps, grpc::CallbackServerContext& context, CallCost cost,
              const grpc::ByteBuffer& request, grpc::ByteBuffer& reply)
      : CallStream(deps, context, cost, &request), reply_(reply) {}
  void OnCancel() override { Cancelled(); }
  void OnDone() override { Done(); }
  int64_t most_payload_bytes() const override { return kWholeBytes; }

 private:
  grpc::ByteBuffer TakeOthers(grpc::ByteBuffer& message) const override;
  void StartWriting(grpc::ByteBuffer* message) override;
  void FinishCall(grpc::ByteBuffer* last, const grpc::Status& status) override;

  grpc::ByteBuffer& reply_;
  std::vector<grpc::Slice> written_;
};

class ReadStream final : public grpc::ServerReadReactor<grpc::ByteBuffer>, public CallStream {
 public:
  ReadStream(const StreamDeps& deps, grpc::CallbackServerContext& context, CallCost cost,
             grpc::ByteBuffer& reply)
      : CallStream(deps, context, cost, nullptr), reply_(reply) {}
  void OnReadDone(bool ok) override { ReadDone(ok); }
  void OnCancel() override { Cancelled(); }
  void OnDone() override { Done(); }

 private:
  void StartReading(grpc::ByteBuffer* message) override { StartRead(message); }
  void FinishCall(grpc::ByteBuffer* last, const grpc::Status& status) override;

  grpc::ByteBuffer& reply_;
};

class WriteStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer>, public CallStream {
 public:
  WriteStream(const StreamDeps& deps, grpc::CallbackServerContext& context, CallCost cost,
              const grpc::ByteBuffer& request)
      : CallStream(deps, context, cost, &request) {}
  void OnWriteDone(bool ok) override { WriteDone(ok); }
  void OnCancel() override { Cancelled(); }
  void OnDone() override { Done(); }

 private:
  void StartWriting(grpc::ByteBuffer* message) override { StartWrite(message); }
  void FinishCall(grpc::ByteBuffer* last, const grpc::Status& status) override;
};

class BidiStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                         public CallStream {
 public:
  BidiStream(const StreamDeps& deps, grpc::CallbackServerContext& context, CallCost cost)
      : CallStream(deps, context, cost, nullptr) {}
  void OnReadDone(bool ok) override { ReadDone(ok); }
  void OnWriteDone(bool ok) override { WriteDone(ok); }
  void OnCancel() override { Cancelled(); }
  void OnDone() override { Done(); }

 private:
  void StartReading(grpc::ByteBuffer* message) override { StartRead(message); }
  void StartWriting(grpc::ByteBuffer* message) override { StartWrite(message); }
  void FinishCall(grpc::ByteBuffer* last, const grpc::Status& status) override;
};

}  // namespace attnd
