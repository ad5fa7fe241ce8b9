// FakeServer: an attnd for the client's tests, in this process, on the float64 reference engine and
// gRPC's generated service. It reads Problems by its own decoder, so that it checks the client's
// encoder, and fails on demand.
//
// Threads: any; gRPC's call it.
#pragma once

#include <grpcpp/server.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "attention/problem.h"
#include "proto/attnd/v1/attention.grpc.pb.h"

namespace attnd {

// What the server saw of one call.
struct SeenCall {
  Direction direction;
  Problem problem;
  int64_t request_bytes;
  std::string request_id;
  std::string authorization;
  absl::Duration time_left;
};

class FakeServer {
 public:
  // Runs before a call is computed, with its number from 0; anything but OK ends it.
  using Script = std::function<grpc::Status(int call, grpc::ServerContext& context)>;

  // `address`: "unix:path", or "127.0.0.1:0" for a free port.
  explicit FakeServer(const std::string& address, Script script = nullptr,
                      int64_t max_message_bytes = 16 << 20);
  ~FakeServer();

  std::string address() const;
  void Stop();   // running calls are cancelled
  void Start();  // on the address it had

  std::vector<SeenCall> calls();
  int call_count() { return static_cast<int>(calls().size()); }
  void SetScript(Script script);
  // From now on each reply's o or d_q has one wrong number.
  void CorruptReplies();

 private:
  class Service;
  std::unique_ptr<Service> service_;
  std::string address_;
  const int64_t max_message_bytes_;
  std::unique_ptr<grpc::Server> server_;
};

// The status that attnd sends: google.rpc.Status with an ErrorInfo in the details.
grpc::Status StatusWithReason(grpc::StatusCode code, const std::string& message,
                              const std::string& reason, absl::Duration retry_delay);

}  // namespace attnd
