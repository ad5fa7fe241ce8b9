#include "tools/benchmarks/minimal_echo.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/check.h"
#include "proto/attnd/v1/attention.grpc.pb.h"

namespace attnd {
namespace {

constexpr char kMethod[] = "/attnd.v1.Attention/Forward";

// The request's first bytes say how long the answer shall be.
grpc::ByteBuffer AnswerTo(const grpc::ByteBuffer& request) {
  std::vector<grpc::Slice> slices;
  CHECK(request.Dump(&slices).ok());
  std::string head;
  int64_t bytes = 0;
  for (const grpc::Slice& slice : slices) {
    if (head.size() >= sizeof(bytes)) break;
    head.append(reinterpret_cast<const char*>(slice.begin()),
                std::min(slice.size(), sizeof(bytes) - head.size()));
  }
  CHECK(head.size() == sizeof(bytes));
  std::memcpy(&bytes, head.data(), sizeof(bytes));
  grpc::Slice slice(static_cast<size_t>(bytes));
  return grpc::ByteBuffer(&slice, 1);
}

class CallbackEcho final
    : public v1::Attention::WithRawCallbackMethod_Forward<v1::Attention::CallbackService> {
  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* reply) override {
    grpc::ByteBuffer answer = AnswerTo(*request);
    reply->Swap(&answer);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
};

// One call on the queue: asked for, read, answered, and then the next.
class QueuedEcho {
 public:
  QueuedEcho(grpc::AsyncGenericService& service, grpc::ServerCompletionQueue& queue)
      : service_(service), queue_(queue), stream_(&context_) {
    service_.RequestCall(&context_, &stream_, &queue_, &queue_, this);
  }
  void Proceed(bool ok) {
    if (!ok || step_ == 2) {
      delete this;
    } else if (step_++ == 0) {
      new QueuedEcho(service_, queue_);
      stream_.Read(&request_, this);
    } else {
      stream_.WriteAndFinish(AnswerTo(request_), grpc::WriteOptions(), grpc::Status::OK, this);
    }
  }

 private:
  grpc::AsyncGenericService& service_;
  grpc::ServerCompletionQueue& queue_;
  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter stream_;
  grpc::ByteBuffer request_;
  int step_ = 0;
};

}  // namespace

void ServeMinimalEcho(const std::string& address, EchoServer kind) {
  CallbackEcho callback;
  grpc::AsyncGenericService generic;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  std::unique_ptr<grpc::ServerCompletionQueue> queue;
  if (kind == EchoServer::kCallback) {
    builder.RegisterService(&callback);
  } else {
    builder.RegisterAsyncGenericService(&generic);
    queue = builder.AddCompletionQueue();
  }
  auto server = builder.BuildAndStart();
  CHECK(server != nullptr) << address;
  if (kind == EchoServer::kCallback) return server->Wait();
  new QueuedEcho(generic, *queue);
  void* tag = nullptr;
  bool ok = false;
  while (queue->Next(&tag, &ok)) static_cast<QueuedEcho*>(tag)->Proceed(ok);
}

MinimalEchoClient::MinimalEchoClient(const std::string& address)
    : stub_(std::make_unique<grpc::GenericStub>(
          grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))) {}

MinimalEchoClient::~MinimalEchoClient() {
  queue_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
  }
}

void MinimalEchoClient::Call(int64_t request_bytes, int64_t reply_bytes) {
  grpc::Slice slice(static_cast<size_t>(std::max<int64_t>(request_bytes, sizeof(reply_bytes))));
  std::memcpy(const_cast<uint8_t*>(slice.begin()), &reply_bytes, sizeof(reply_bytes));
  grpc::ByteBuffer request(&slice, 1), reply;
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  grpc::Status status;
  auto call = stub_->PrepareUnaryCall(&context, kMethod, request, &queue_);
  call->StartCall();
  call->Finish(&reply, &status, this);
  void* tag = nullptr;
  bool ok = false;
  CHECK(queue_.Next(&tag, &ok) && status.ok()) << status.error_message();
  CHECK(static_cast<int64_t>(reply.Length()) == reply_bytes);
}

}  // namespace attnd
