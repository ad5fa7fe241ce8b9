#include "tools/benchmarks/load_sender.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "client/channels/grpc_status.h"
#include "client/types/error_detail.h"

namespace attnd {
namespace {

constexpr size_t kChunkBytes = size_t{2} << 20;

enum class Op { kStart, kWrite, kRead, kFinish };

// The daemon refuses a call with these before it takes it.
bool IsRefusal(const std::string& reason) {
  for (const char* refusal :
       {"DEADLINE_UNMEETABLE", "QUEUE_FULL", "MEMORY_PRESSURE", "HBM_PRESSURE", "TENANT_QUOTA"}) {
    if (reason == refusal) return true;
  }
  return false;
}

// "client: DEADLINE_EXCEEDED" when the status did not come from the daemon.
std::string ReasonOf(const grpc::Status& grpc_status) {
  const absl::Status status = FromGrpc(grpc_status);
  const std::optional<ErrorDetail> detail = DetailOf(status);
  if (detail.has_value()) return detail->reason;
  return "client: " + absl::StatusCodeToString(status.code());
}

grpc::ByteBuffer Bytes(const google::protobuf::MessageLite& message) {
  grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

std::vector<grpc::ByteBuffer> StreamMessages(const v1::ForwardRequest& request) {
  v1::ForwardStreamRequest header;
  *header.mutable_header() = request;
  for (auto* tensor : {header.mutable_header()->mutable_k(), header.mutable_header()->mutable_v(),
                       header.mutable_header()->mutable_q()}) {
    tensor->clear();
  }
  std::vector<grpc::ByteBuffer> messages = {Bytes(header)};
  auto add = [&](int tensor, const std::string& data) {
    for (size_t at = 0; at < data.size(); at += kChunkBytes) {
      v1::ForwardStreamRequest chunk;
      chunk.mutable_chunk()->set_tensor(static_cast<uint32_t>(tensor));
      chunk.mutable_chunk()->set_offset(at);
      chunk.mutable_chunk()->set_data(data.substr(at, kChunkBytes));
      messages.push_back(Bytes(chunk));
    }
  };
  add(v1::ForwardRequest::kKFieldNumber, request.k());
  add(v1::ForwardRequest::kVFieldNumber, request.v());
  add(v1::ForwardRequest::kQFieldNumber, request.q());
  return messages;
}

}  // namespace

class LoadSender::Call {
 public:
  struct Tag {
    Call* call;
    Op op;
  };
  Call(LoadClock::time_point due_at, LoadSeconds until)
      : due(due_at), sent(LoadClock::now()), deadline(until) {
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::duration_cast<std::chrono::microseconds>(deadline));
  }
  virtual ~Call() = default;
  // Whether nothing more will come.
  virtual bool OnEvent(Op op, bool ok) = 0;

  const LoadClock::time_point due, sent;
  const LoadSeconds deadline;
  grpc::ClientContext context;
  grpc::Status status;

 protected:
  void* TagOf(Op op) { return &tags_[static_cast<int>(op)]; }

 private:
  Tag tags_[4] = {{this, Op::kStart}, {this, Op::kWrite}, {this, Op::kRead}, {this, Op::kFinish}};
};

class LoadSender::UnaryCall final : public Call {
 public:
  UnaryCall(LoadClock::time_point due_at, LoadSeconds deadline, grpc::GenericStub& stub,
            const grpc::ByteBuffer& request, grpc::CompletionQueue& queue)
      : Call(due_at, deadline),
        reader_(stub.PrepareUnaryCall(&context, "/attnd.v1.Attention/Forward", request, &queue)) {
    reader_->StartCall();
    reader_->Finish(&reply_, &status, TagOf(Op::kFinish));
  }
  bool OnEvent(Op, bool) override { return true; }

 private:
  grpc::ByteBuffer reply_;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader_;
};

// One write and one read at a time, beside each other; the reading ends first.
class LoadSender::StreamCall final : public Call {
 public:
  StreamCall(LoadClock::time_point due_at, LoadSeconds deadline, grpc::GenericStub& stub,
             const std::vector<grpc::ByteBuffer>& messages, grpc::CompletionQueue& queue)
      : Call(due_at, deadline),
        messages_(messages),
        stream_(stub.PrepareCall(&context, "/attnd.v1.Attention/ForwardStream", &queue)) {
    ++pending_;
    stream_->StartCall(TagOf(Op::kStart));
  }

  bool OnEvent(Op op, bool ok) override {
    --pending_;
    switch (op) {
      case Op::kStart:
        if (ok) Write();
        ok ? Read() : Finish();
        break;
      case Op::kWrite:
        if (ok && next_ < messages_.size()) Write();
        break;
      case Op::kRead:
        message_.Clear();
        ok ? Read() : Finish();
        break;
      case Op::kFinish:
        finished_ = true;
    }
    return finished_ && pending_ == 0;
  }

 private:
  void Write() {
    ++pending_;
    grpc::WriteOptions options;
    if (next_ + 1 == messages_.size()) options.set_last_message();
    stream_->Write(messages_[next_++], options, TagOf(Op::kWrite));
  }
  void Read() {
    ++pending_;
    stream_->Read(&message_, TagOf(Op::kRead));
  }
  void Finish() {
    ++pending_;
    stream_->Finish(&status, TagOf(Op::kFinish));
  }

  const std::vector<grpc::ByteBuffer>& messages_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  grpc::ByteBuffer message_;
  size_t next_ = 0;
  int pending_ = 0;
  bool finished_ = false;
};

LoadSender::LoadSender(const std::string& address, int connections,
                       const v1::ForwardRequest& request, bool streamed)
    : streamed_(streamed), request_(Bytes(request)), messages_(StreamMessages(request)) {
  for (int n = 0; n < connections; ++n) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
    arguments.SetMaxReceiveMessageSize(-1);
    stubs_.push_back(std::make_unique<grpc::GenericStub>(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments)));
    queues_.push_back(std::make_unique<grpc::CompletionQueue>());
  }
  for (auto& queue : queues_) threads_.emplace_back([this, &queue] { Collect(*queue); });
}

LoadSender::~LoadSender() {
  for (auto& queue : queues_) queue->Shutdown();
  for (std::thread& thread : threads_) thread.join();
}

void LoadSender::Send(LoadClock::time_point due, LoadSeconds deadline) {
  const size_t n = next_++ % stubs_.size();
  ++in_flight_;
  // It deletes itself: Collect.
  if (streamed_) {
    new StreamCall(due, deadline, *stubs_[n], messages_, *queues_[n]);
  } else {
    new UnaryCall(due, deadline, *stubs_[n], request_, *queues_[n]);
  }
}

void LoadSender::WaitUntilIdle() const {
  while (in_flight_ > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

LoadOutcome LoadSender::Take() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(outcome_, {});
}

void LoadSender::Count(const Call& call) {
  const LoadClock::time_point now = LoadClock::now();
  const std::string reason = call.status.ok() ? "" : ReasonOf(call.status);
  std::lock_guard<std::mutex> lock(mutex_);
  LoadOutcome::Share& share = outcome_.by_deadline[call.deadline.count()];
  ++share.sent;
  share.accepted += call.status.ok();
  outcome_.late = std::max(outcome_.late, LoadSeconds(call.sent - call.due).count());
  if (call.status.ok()) {
    outcome_.accepted.push_back(LoadSeconds(now - call.due).count());
  } else if (IsRefusal(reason)) {
    outcome_.refused.push_back(LoadSeconds(now - call.sent).count());
  } else {
    ++outcome_.lost[reason];
  }
}

void LoadSender::Collect(grpc::CompletionQueue& queue) {
  void* tag = nullptr;
  for (bool ok = false; queue.Next(&tag, &ok);) {
    auto* event = static_cast<Call::Tag*>(tag);
    if (!event->call->OnEvent(event->op, ok)) continue;
    std::unique_ptr<Call> call(event->call);
    Count(*call);
    --in_flight_;
  }
}

}  // namespace attnd
