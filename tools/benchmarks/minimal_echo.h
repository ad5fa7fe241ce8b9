// MinimalEcho: the least that gRPC 1.51 needs for a small call there and back: a raw unary method
// that answers with bytes, no decoding, no admission, no metrics. The floor that attnd's own small
// calls are measured against. For benchmarks only.
#pragma once

#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>

#include <cstdint>
#include <memory>
#include <string>

namespace attnd {

// How the server takes its calls.
enum class EchoServer {
  kCallback,  // gRPC's callback service, as attnd's
  kQueue,     // a completion queue and one thread
};

// Serves on `address` ("host:port" or "unix:path") until SIGTERM ends the process.
void ServeMinimalEcho(const std::string& address, EchoServer kind);

// One caller who drives a completion queue of his own, as attnd's client does for small calls.
class MinimalEchoClient {
 public:
  explicit MinimalEchoClient(const std::string& address);
  ~MinimalEchoClient();
  // Sends `request_bytes` and receives `reply_bytes`.
  void Call(int64_t request_bytes, int64_t reply_bytes);

 private:
  std::unique_ptr<grpc::GenericStub> stub_;
  grpc::CompletionQueue queue_;
};

}  // namespace attnd
