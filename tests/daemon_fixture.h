// A real server in this process on a free port, and a generated stub on its own connection.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "kernels/backend.h"
#include "proto/attnd/v1/attention.grpc.pb.h"
#include "proto/google/rpc/error_details.pb.h"
#include "proto/google/rpc/status.pb.h"
#include "server/attnd_server.h"

namespace attnd {

// Options for tests: free ports, no waiting on the way out.
inline ServerOptions TestOptions() {
  ServerOptions options;
  options.listen = {"127.0.0.1:0"};
  options.metrics_listen = "";
  options.admission.memory_bytes = int64_t{64} << 20;
  options.admission.caller_max_bytes = int64_t{64} << 20;
  options.leases.memory_bytes = options.leases.caller_bytes = int64_t{32} << 20;
  options.worker.inline_time = absl::ZeroDuration();  // each call takes a slot
  options.drain_delay = absl::ZeroDuration();
  return options;
}

class Daemon {
 public:
  explicit Daemon(std::unique_ptr<Backend> backend, const ServerOptions& options = TestOptions())
      : Daemon(ListOf(std::move(backend)), options) {}
  // By a clock that outlives it.
  Daemon(std::unique_ptr<Backend> backend, const ServerOptions& options, const Clock& clock)
      : Daemon(ListOf(std::move(backend)), options, &clock) {}
  // One engine for each device.
  Daemon(std::vector<std::unique_ptr<Backend>> engines, const ServerOptions& options,
         const Clock* clock = nullptr)
      : log_(stderr, LogFormat::kText, Severity::kWarning) {
    auto server = AttndServer::Start(options, std::move(engines),
                                     clock == nullptr ? real_clock_ : *clock, log_);
    CHECK(server.ok()) << server.status().message();
    server_ = *std::move(server);
    stub_ = NewStub();
  }

  AttndServer& server() { return *server_; }
  v1::Attention::Stub& stub() { return *stub_; }
  const std::string& address() const { return server_->addresses().front(); }

  std::shared_ptr<grpc::Channel> NewChannel() const {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    arguments.SetMaxReceiveMessageSize(-1);
    return grpc::CreateCustomChannel(address(), grpc::InsecureChannelCredentials(), arguments);
  }
  std::unique_ptr<v1::Attention::Stub> NewStub() const {
    return v1::Attention::NewStub(NewChannel());
  }

 private:
  static std::vector<std::unique_ptr<Backend>> ListOf(std::unique_ptr<Backend> one) {
    std::vector<std::unique_ptr<Backend>> list;
    list.push_back(std::move(one));
    return list;
  }

  RealClock real_clock_;
  Logger log_;
  std::unique_ptr<AttndServer> server_;
  std::unique_ptr<v1::Attention::Stub> stub_;
};

// The ErrorInfo of a failed call; empty when there is none.
inline google::rpc::ErrorInfo ErrorInfoOf(const grpc::Status& status) {
  google::rpc::Status details;
  google::rpc::ErrorInfo info;
  if (!details.ParseFromString(status.error_details())) return info;
  for (const auto& detail : details.details()) {
    if (detail.UnpackTo(&info)) return info;
  }
  return info;
}

}  // namespace attnd
