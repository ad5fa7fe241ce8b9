// GenericEcho and CallEcho: a server of gRPC's callback API that answers with what it has got, and
// a call of it, for tests of the threads that drive gRPC. Threads: any.
#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace attnd {

class GenericEcho final : public grpc::CallbackGenericService {
 public:
  // In the callback of each message, before the answer.
  using OnMessage = std::function<void(const grpc::ByteBuffer&)>;
  explicit GenericEcho(OnMessage on_message) : on_message_(std::move(on_message)) {}

 private:
  class Call final : public grpc::ServerGenericBidiReactor {
   public:
    explicit Call(const OnMessage& on_message) : on_message_(on_message) { StartRead(&message_); }
    void OnReadDone(bool ok) override {
      if (!ok) return Finish(grpc::Status::OK);
      on_message_(message_);
      StartWriteAndFinish(&message_, {}, grpc::Status::OK);
    }
    void OnDone() override { delete this; }

   private:
    const OnMessage& on_message_;
    grpc::ByteBuffer message_;
  };
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new Call(on_message_);
  }

  const OnMessage on_message_;
};

// By a completion queue of its own.
inline grpc::Status CallEcho(const std::shared_ptr<grpc::Channel>& channel,
                             const std::string& bytes, grpc::ByteBuffer& reply) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  grpc::Slice slice(bytes);
  grpc::ByteBuffer request(&slice, 1);
  grpc::CompletionQueue queue;
  grpc::Status status;
  auto call = stub.PrepareUnaryCall(&context, "/test/Echo", request, &queue);
  call->StartCall();
  call->Finish(&reply, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  return status;
}

}  // namespace attnd
