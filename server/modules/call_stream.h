// CallStream: one RPC of the service Modules as its handler sees it: messages to read and to write,
// one after the other, on a thread of its own, which may wait. gRPC's callbacks wake it; CallWatch
// cuts a peer that neither sends nor reads while the handler waits for it. One shape for all kinds:
// a unary or server-streaming request is read once, a unary or client-streaming reply is written
// once and goes out with the status.
//
//   reactor made → Start (a thread) → handler: Read, Write → Finish → OnDone → deleted
//
// Threads: the handler's, gRPC's and the watch's.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "server/metrics/metrics.h"
#include "server/rpc/call_watch.h"
#include "server/rpc/open_calls.h"

namespace attnd {

// What a stream uses of the server; all outlive it.
struct StreamDeps {
  const Clock& clock;
  Metrics& metrics;
  CallWatch& call_watch;
  OpenCalls& open_calls;
};

class CallStream : public WatchedCall {
 public:
  CallStream(const StreamDeps& deps, grpc::CallbackServerContext& context);
  ~CallStream() override = default;

  grpc::CallbackServerContext& context() { return context_; }

  // The handler's. False: half-close, or the call is broken.
  bool Read(grpc::ByteBuffer& message);
  bool Write(grpc::ByteBuffer message);
  // Why: the watch's status, CANCELLED or DEADLINE_EXCEEDED; OK after a half-close.
  absl::Status Broken() const;
  std::stop_token stop() const { return stop_.get_token(); }
  // The handler's: of messages so far.
  int64_t received_bytes() const { return received_bytes_; }
  int64_t sent_bytes() const { return sent_bytes_; }
  // Last; the handler touches the stream no more.
  void Finish(const grpc::Status& status);

  void Cut(const absl::Status& status) override;  // the watch's

 protected:
  // The reactor's side.
  enum class Started { kPending, kDone, kNothing };
  virtual Started StartReading(grpc::ByteBuffer* message) = 0;
  virtual Started StartWriting(grpc::ByteBuffer* message) = 0;
  virtual void FinishCall(const grpc::Status& status) = 0;
  // A unary or server-streaming request, which gRPC owns while the call lives.
  static Started TakeOnce(const grpc::ByteBuffer*& request, grpc::ByteBuffer* message);
  void Moved(bool* done, bool* ok, bool with);
  void ReadDone(bool ok) { Moved(&read_done_, &read_ok_, ok); }
  void WriteDone(bool ok) { Moved(&write_done_, &write_ok_, ok); }
  void Cancelled();
  void Done();

 private:
  void Release() {
    if (--lives_ == 0) delete this;
  }

  const StreamDeps deps_;
  const OpenCalls::Call open_;
  grpc::CallbackServerContext& context_;
  const bool unix_socket_;
  const absl::Time deadline_;
  std::atomic<int> lives_{2};  // the handler's and gRPC's
  std::stop_source stop_;
  grpc::ByteBuffer read_, write_;
  bool receiving_ = false, sending_ = false;  // the handler's: the peer's time runs
  int64_t received_bytes_ = 0, sent_bytes_ = 0;

  mutable absl::Mutex mutex_;
  bool read_done_ ABSL_GUARDED_BY(mutex_) = true;
  bool read_ok_ ABSL_GUARDED_BY(mutex_) = true;
  bool write_done_ ABSL_GUARDED_BY(mutex_) = true;
  bool write_ok_ ABSL_GUARDED_BY(mutex_) = true;
  bool finishing_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status cut_ ABSL_GUARDED_BY(mutex_);
};

// The four kinds, over gRPC's reactors.
class UnaryStream final : public grpc::ServerUnaryReactor, public CallStream {
 public:
  UnaryStream(const StreamDeps& deps, grpc::CallbackServerContext& context,
              const grpc::ByteBuffer& request, grpc::ByteBuffer& reply)
      : CallStream(deps, context), request_(&request), reply_(reply) {}
  void OnCancel() override { Cancelled(); }
  void OnDone() override { Done(); }

 private:
  Started StartReading(grpc::ByteBuffer* message) override;
  Started StartWriting(grpc::ByteBuffer* message) override;
  void FinishCall(const grpc::Status& status) override { grpc::ServerUnaryReactor::Finish(status); }

  const grpc::ByteBuffer* request_;  // null: it has been read
  grpc::ByteBuffer& reply_;
};

class ReadStream final : public grpc::ServerReadReactor<grpc::ByteBuffer>, public CallStream {
 public:
  ReadStream(const StreamDeps& deps, grpc::CallbackServerContext& context, grpc::ByteBuffer& reply)
      : CallStream(deps, context), reply_(reply) {}
  void OnReadDone(bool ok) override { ReadDone(ok); }
  void OnCancel() override { Cancelled(); }
  void OnDone() override { Done(); }

 private:
  Started StartReading(grpc::ByteBuffer* message) override;
  Started StartWriting(grpc::ByteBuffer* message) override;
  void FinishCall(const grpc::Status& status) override {
    grpc::ServerReadReactor<grpc::ByteBuffer>::Finish(status);
  }

  grpc::ByteBuffer& reply_;
};

class WriteStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer>, public CallStream {
 public:
  WriteStream(const StreamDeps& deps, grpc::CallbackServerContext& context,
              const grpc::ByteBuffer& request)
      : CallStream(deps, context), request_(&request) {}
  void OnWriteDone(bool ok) override { WriteDone(ok); }
  void OnCancel() override { Cancelled(); }
  void OnDone() override { Done(); }

 private:
  Started StartReading(grpc::ByteBuffer* message) override;
  Started StartWriting(grpc::ByteBuffer* message) override;
  void FinishCall(const grpc::Status& status) override {
    grpc::ServerWriteReactor<grpc::ByteBuffer>::Finish(status);
  }

  const grpc::ByteBuffer* request_;  // null: it has been read
};

class BidiStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                         public CallStream {
 public:
  using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;
  using CallStream::CallStream;
  void OnReadDone(bool ok) override { ReadDone(ok); }
  void OnWriteDone(bool ok) override { WriteDone(ok); }
  void OnCancel() override { Cancelled(); }
  void OnDone() override { Done(); }

 private:
  Started StartReading(grpc::ByteBuffer* message) override;
  Started StartWriting(grpc::ByteBuffer* message) override;
  void FinishCall(const grpc::Status& status) override { Reactor::Finish(status); }
};

}  // namespace attnd
