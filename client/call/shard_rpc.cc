#include "client/call/shard_rpc.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/async_stream.h>
#include <grpcpp/support/async_unary_call.h>

#include <memory>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "client/call/stream_reply.h"

namespace attnd {
namespace {

class UnaryRpc final : public ShardRpc {
 public:
  explicit UnaryRpc(const ShardAttempt& attempt)
      : ShardRpc(attempt),
        call_(attempt.call),
        shard_(attempt.shard),
        context_(attempt.context),
        request_(attempt.call.Encode(attempt.shard, attempt.borrowed)) {
    payload_bytes_ = request_.payload_bytes;
    leased_ = request_.leased;
  }

  void Start(const Connection& connection, grpc::CompletionQueue& queue) override {
    grpc::GenericStub stub(connection.channel());
    reader_ = stub.PrepareUnaryCall(&context_, call_.method(), request_.message, &queue);
    reader_->StartCall();
    reader_->Finish(&reply_, &status_, TagOf(Op::kFinish));
  }
  bool OnEvent(Op, bool) override { return true; }
  absl::StatusOr<int64_t> Land(int address) override {
    return call_.Land(shard_, reply_, address, header_);
  }
  const ShardReceipt& receipt() const override { return header_.receipt; }
  int64_t copied_bytes() const override { return request_.copied_bytes; }

 private:
  LogicalCall& call_;
  const int64_t shard_;
  grpc::ClientContext& context_;
  EncodedRequest request_;
  std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> reader_;
  grpc::ByteBuffer reply_;
  ReplyHeader header_;
};

class SharedRpc final : public ShardRpc {
 public:
  SharedRpc(const ShardAttempt& attempt, SharedMemory& memory, LogicalCall::ReplyPlace place,
            SharedShard request)
      : ShardRpc(attempt),
        call_(attempt.call),
        shard_(attempt.shard),
        context_(attempt.context),
        memory_(memory),
        place_(std::move(place)),
        request_(std::move(request)) {
    payload_bytes_ = request_.tensors.input_bytes();
    leased_ = request_.leased;
    shared_ = true;
  }

  void Start(const Connection& connection, grpc::CompletionQueue& queue) override {
    grpc::GenericStub stub(connection.channel());
    grpc::Slice slice(request_.header);
    reader_ = stub.PrepareUnaryCall(&context_, call_.method(), grpc::ByteBuffer(&slice, 1), &queue);
    reader_->StartCall();
    reader_->Finish(&reply_, &status_, TagOf(Op::kFinish));
  }
  // Whoever has given up on a call has the memory back only when the daemon has let go of it too.
  bool OnEvent(Op, bool) override {
    if (!status_.ok()) memory_.EndUse(request_.tensors.message().use());
    return true;
  }
  absl::StatusOr<int64_t> Land(int address) override {
    std::vector<ReplyPayload> travelled;
    if (!request_.tensors.has_outputs()) travelled = place_.payloads;
    RETURN_IF_ERROR(DecodeReply(reply_, travelled, header_));
    request_.tensors.Land();
    int64_t bytes = place_.bytes;
    call_.Landed(shard_, std::move(place_), header_, address);
    return bytes;
  }
  const ShardReceipt& receipt() const override { return header_.receipt; }
  int64_t copied_bytes() const override { return request_.tensors.copied_bytes(); }

 private:
  LogicalCall& call_;
  const int64_t shard_;
  grpc::ClientContext& context_;
  SharedMemory& memory_;
  LogicalCall::ReplyPlace place_;
  SharedShard request_;
  std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> reader_;
  grpc::ByteBuffer reply_;
  ReplyHeader header_;
};

// Writes and reads run beside each other, one of each at a time. The reading ends first: with the
// reply's last message, or because the server has said why not; then the status is asked for.
class StreamRpc final : public ShardRpc {
 public:
  StreamRpc(const ShardAttempt& attempt, int64_t chunk_bytes)
      : ShardRpc(attempt),
        call_(attempt.call),
        shard_(attempt.shard),
        context_(attempt.context),
        request_(attempt.call.EncodeStream(attempt.shard, attempt.borrowed, chunk_bytes)),
        place_(attempt.call.PlaceOf(attempt.shard)),
        reply_(place_.payloads) {
    payload_bytes_ = source_.payload_bytes();
    leased_ = request_.leased;
  }

  void Start(const Connection& connection, grpc::CompletionQueue& queue) override {
    grpc::GenericStub stub(connection.channel());
    stream_ = stub.PrepareCall(&context_, call_.stream_method(), &queue);
    stream_->StartCall(TagOf(Op::kStart));
    ++pending_;
  }

  bool OnEvent(Op op, bool ok) override {
    --pending_;
    switch (op) {
      case Op::kStart:
        ok ? Begin() : Finish();
        break;
      case Op::kWrite:
        if (ok && !source_.done()) Write();
        break;
      case Op::kRead:
        ok ? Read() : Finish();
        break;
      case Op::kFinish:
        finished_ = true;
        if (!landed_.ok()) status_ = grpc::Status::OK;  // what it was cancelled for, Land tells
    }
    return finished_ && pending_ == 0;
  }

  absl::StatusOr<int64_t> Land(int address) override {
    RETURN_IF_ERROR(landed_);
    RETURN_IF_ERROR(reply_.CheckComplete());
    int64_t bytes = place_.bytes;
    call_.Landed(shard_, std::move(place_), reply_.header(), address);
    return bytes;
  }
  const ShardReceipt& receipt() const override { return reply_.header().receipt; }
  int64_t copied_bytes() const override { return source_.copied_bytes(); }

 private:
  void Begin() {
    Write();
    AskForMessage();
  }
  void Write() {
    grpc::ByteBuffer message = source_.Next();
    grpc::WriteOptions options;
    if (source_.done()) options.set_last_message();
    stream_->Write(message, options, TagOf(Op::kWrite));
    ++pending_;
  }
  void AskForMessage() {
    stream_->Read(&message_, TagOf(Op::kRead));
    ++pending_;
  }
  void Read() {
    grpc::ByteBuffer message;
    message.Swap(&message_);
    AskForMessage();  // gRPC goes on while this one lands
    if (!landed_.ok()) return;
    landed_ = reply_.Take(message);
    if (landed_.ok()) return;
    context_.TryCancel();  // nothing more of it is wanted
  }
  void Finish() {
    stream_->Finish(&status_, TagOf(Op::kFinish));
    ++pending_;
  }

  LogicalCall& call_;
  const int64_t shard_;
  grpc::ClientContext& context_;
  StreamedRequest request_;
  ChunkSource& source_ = request_.source;
  LogicalCall::ReplyPlace place_;
  StreamReply reply_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  grpc::ByteBuffer message_;
  absl::Status landed_;
  int pending_ = 0;
  bool finished_ = false;
};

}  // namespace

ShardRpc::ShardRpc(const ShardAttempt& attempt) {
  for (Op op : {Op::kStart, Op::kWrite, Op::kRead, Op::kFinish}) {
    tags_[static_cast<int>(op)] = {{attempt.sink}, attempt.owner, op};
  }
}

std::unique_ptr<ShardRpc> MakeUnaryRpc(const ShardAttempt& attempt) {
  return std::make_unique<UnaryRpc>(attempt);
}

std::unique_ptr<ShardRpc> MakeSharedRpc(const ShardAttempt& attempt, SharedMemory& memory) {
  LogicalCall::ReplyPlace place = attempt.call.PlaceOf(attempt.shard);
  std::optional<SharedShard> request = attempt.call.EncodeShared(attempt.shard, memory, place);
  if (!request.has_value()) return nullptr;
  return std::make_unique<SharedRpc>(attempt, memory, std::move(place), *std::move(request));
}

std::unique_ptr<ShardRpc> MakeStreamRpc(const ShardAttempt& attempt, int64_t chunk_bytes) {
  return std::make_unique<StreamRpc>(attempt, chunk_bytes);
}

}  // namespace attnd
