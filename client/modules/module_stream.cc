#include "client/modules/module_stream.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/async_stream.h>
#include <grpcpp/support/async_unary_call.h>

#include <memory>
#include <optional>
#include <stop_token>
#include <utility>

#include "base/clock.h"
#include "base/status_macros.h"
#include "client/call/poll_hook.h"
#include "client/channels/grpc_time.h"
#include "proto/attnd/v1/chunk_framing.h"

namespace attnd {
namespace {

// One RPC: at most one write and one read are pending at a time.
class Stream {
 public:
  Stream(grpc::ClientContext& context, const StreamEnds& ends) : context_(context), ends_(ends) {}

  void Start(const Connection& connection, const std::string& method,
             grpc::CompletionQueue& queue) {
    grpc::GenericStub stub(connection.channel());
    context_.set_initial_metadata_corked(true);  // they travel with the first message
    stream_ = stub.PrepareCall(&context_, method, &queue);
    stream_->StartCall(nullptr);  // no event, since corked
    Write();
    Read();
  }
  bool ended() const { return finished_ && pending_ == 0; }

  void OnEvent(void* tag, bool ok) {
    --pending_;
    switch (static_cast<Op>(reinterpret_cast<intptr_t>(tag))) {
      case kWrite:
        writing_ = false;
        if (ok) Write();
        return;
      case kRead:
        return ok ? Take() : Finish();
      case kFinish:
        finished_ = true;
    }
  }
  // The refusal of the reply comes before the status with which the RPC was cancelled.
  absl::Status status() const { return taken_.ok() ? FromGrpc(status_) : taken_; }

 private:
  enum Op : intptr_t { kWrite = 1, kRead, kFinish };

  void* Pending(Op op) {
    ++pending_;
    return reinterpret_cast<void*>(op);
  }
  void Write() {
    if (written_ || writing_ || finishing_) return;
    const std::optional<grpc::ByteBuffer> message = ends_.next(written_);
    if (!message.has_value()) {
      if (written_) stream_->WritesDone(Pending(kWrite));
      return;
    }
    writing_ = true;
    grpc::WriteOptions options;
    if (written_) options.set_last_message();
    stream_->Write(*message, options, Pending(kWrite));
  }
  void Read() { stream_->Read(&message_, Pending(kRead)); }
  void Take() {
    grpc::ByteBuffer message;
    message.Swap(&message_);
    Read();
    if (!taken_.ok()) return;
    taken_ = ends_.take(message);
    if (!taken_.ok()) return context_.TryCancel();
    Write();
  }
  void Finish() {
    finishing_ = true;
    stream_->Finish(&status_, Pending(kFinish));
  }

  grpc::ClientContext& context_;
  const StreamEnds& ends_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  grpc::ByteBuffer message_;
  grpc::Status status_;
  absl::Status taken_;
  bool writing_ = false, written_ = false, finishing_ = false, finished_ = false;
  int pending_ = 0;
};

// The same with one message each way.
class Whole {
 public:
  Whole(grpc::ClientContext& context, const grpc::ByteBuffer& request)
      : context_(context), request_(request) {}

  void Start(const Connection& connection, const std::string& method,
             grpc::CompletionQueue& queue) {
    grpc::GenericStub stub(connection.channel());
    reader_ = stub.PrepareUnaryCall(&context_, method, request_, &queue);
    reader_->StartCall();
    reader_->Finish(&reply_, &status_, this);
  }
  bool ended() const { return ended_; }
  void OnEvent(void*, bool) { ended_ = true; }
  absl::Status status() const { return FromGrpc(status_); }
  const grpc::ByteBuffer& reply() const { return reply_; }

 private:
  grpc::ClientContext& context_;
  const grpc::ByteBuffer& request_;
  std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> reader_;
  grpc::ByteBuffer reply_;
  grpc::Status status_;
  bool ended_ = false;
};

// Runs an RPC until it has ended, on a connection to the address.
template <class Rpc>
absl::Status Drive(const ClientCore& core, int address, const std::string& method,
                   const CallMetadata& metadata, int64_t bytes, absl::Time deadline,
                   const CallOptions& options, grpc::ClientContext& context, Rpc& rpc,
                   Pushback& pushback) {
  CompletionQueues::Borrowed borrowed(core.queues);
  PrepareContext(core.options, deadline, options.traceparent, context);
  for (const auto& [key, value] : metadata) context.AddMetadata(key, value);
  const absl::Time begun = core.clock.Now();
  std::shared_ptr<Connection> connection = core.connections.Acquire(bytes, {}, address);
  connection->Enter(&context);
  rpc.Start(*connection, method, borrowed.queue());
  {
    std::stop_callback cancel(options.stop, [&context] { context.TryCancel(); });
    PollHook poll_hook(options.poll_hook);
    absl::Time moved_at = begun;
    while (!rpc.ended()) {
      void* tag;
      bool ok;
      const auto until = GrpcTime(SteadyNow() + PollHook::kInterval);
      if (borrowed.Next(&tag, &ok, until)) {
        rpc.OnEvent(tag, ok);
        moved_at = core.clock.Now();
      } else if (core.clock.Now() - moved_at >= Picker::kSilence) {
        core.connections.Suspect(connection, moved_at);
      }
      poll_hook.Poll();
    }
  }
  connection->Leave(&context);
  core.connections.Release(*connection, bytes);
  pushback = PushbackOf(context);
  if (std::optional<ReportedLoad> load = ReportedLoadOf(context)) {
    core.connections.ReportModules(address, *load);
  }
  absl::Status status =
      core.connections.StatusOf(*connection, rpc.status(), options.stop.stop_requested());
  if (absl::IsUnavailable(status)) {
    core.connections.ReportUnavailable(address, begun);
    core.connections.Reconnect(*connection);
  } else if (status.ok()) {
    core.connections.ReportAlive(address);
  }
  return status;
}

}  // namespace

grpc::ByteBuffer HeaderMessage(const google::protobuf::MessageLite& header) {
  const grpc::Slice slice(FrameHeader(header.SerializeAsString()));
  return grpc::ByteBuffer(&slice, 1);
}

absl::Status RunStream(const ClientCore& core, int address, const std::string& method,
                       const CallMetadata& metadata, int64_t bytes, const StreamEnds& ends,
                       absl::Time deadline, const CallOptions& options, Pushback& pushback) {
  grpc::ClientContext context;
  Stream stream(context, ends);
  return Drive(core, address, method, metadata, bytes, deadline, options, context, stream,
               pushback);
}

absl::StatusOr<grpc::ByteBuffer> RunWhole(const ClientCore& core, int address,
                                          const std::string& method, const CallMetadata& metadata,
                                          const grpc::ByteBuffer& request, absl::Time deadline,
                                          const CallOptions& options, Pushback& pushback) {
  grpc::ClientContext context;
  Whole whole(context, request);
  RETURN_IF_ERROR(Drive(core, address, method, metadata, static_cast<int64_t>(request.Length()),
                        deadline, options, context, whole, pushback));
  return whole.reply();
}

}  // namespace attnd
