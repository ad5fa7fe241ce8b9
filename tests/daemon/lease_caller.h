// LeaseCaller: the calls of one of two callers, alice and bob, to a daemon in this process whose
// token file is TokenFile(); with what tests of residual leases send and expect.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {

inline constexpr char kAlice[] = "alice-token-0123456789", kBob[] = "bob-token-0123456789ab";

inline std::string TokenFile() {
  std::string path = absl::StrCat(testing::TempDir(), "/tokens_", getpid());
  std::ofstream(path) << "alice " << kAlice << "\nbob " << kBob << "\n";
  return path;
}

// Calls as one caller.
class LeaseCaller {
 public:
  LeaseCaller(Daemon& daemon, const std::string& token) : stub_(daemon.NewStub()), token_(token) {}

  grpc::Status Forward(const v1::ForwardRequest& request, v1::ForwardResponse* reply) {
    return Call([&](grpc::ClientContext* c) { return stub_->Forward(c, request, reply); });
  }
  grpc::Status Backward(const v1::BackwardRequest& request, v1::BackwardResponse* reply) {
    return Call([&](grpc::ClientContext* c) { return stub_->Backward(c, request, reply); });
  }
  grpc::Status Backward(const v1::BackwardRequest& request) {
    v1::BackwardResponse reply;
    return Backward(request, &reply);
  }
  grpc::Status Renew(const std::string& token, uint32_t ttl_ms, v1::Residual* residual = nullptr) {
    v1::RenewResidualRequest request;
    request.set_token(token);
    request.set_ttl_ms(ttl_ms);
    v1::RenewResidualResponse reply;
    grpc::Status status =
        Call([&](grpc::ClientContext* c) { return stub_->RenewResidual(c, request, &reply); });
    if (residual != nullptr) *residual = reply.residual();
    return status;
  }
  grpc::Status Release(const std::string& token, const std::vector<std::string>& more = {}) {
    v1::ReleaseResidualRequest request;
    request.set_token(token);
    for (const std::string& one : more) request.add_tokens(one);
    v1::ReleaseResidualResponse reply;
    return Call([&](grpc::ClientContext* c) { return stub_->ReleaseResidual(c, request, &reply); });
  }
  // Forward of `problem` with the wish to keep it.
  v1::ForwardResponse Keep(const Problem& problem, uint64_t seed = 1, uint32_t ttl_ms = 0) {
    v1::ForwardRequest request = MakeForward(problem, seed);
    request.mutable_options()->set_keep_residual(true);
    request.mutable_options()->set_residual_ttl_ms(ttl_ms);
    v1::ForwardResponse reply;
    grpc::Status status = Forward(request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply;
  }

 private:
  template <class Method>
  grpc::Status Call(const Method& method) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", absl::StrCat("Bearer ", token_));
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    return method(&context);
  }
  std::unique_ptr<v1::Attention::Stub> stub_;
  const std::string token_;
};

// Leaves out of a backward what a lease holds.
inline v1::BackwardRequest Leased(const v1::BackwardRequest& whole, const std::string& token) {
  v1::BackwardRequest request;
  *request.mutable_problem() = whole.problem();
  request.set_d_o(whole.d_o());
  request.set_d_lse(whole.d_lse());
  request.set_residual_token(token);
  return request;
}

inline void ExpectError(const grpc::Status& status, grpc::StatusCode code,
                        const std::string& reason) {
  EXPECT_EQ(status.error_code(), code) << status.error_message();
  EXPECT_EQ(ErrorInfoOf(status).reason(), reason) << status.error_message();
  if (code != grpc::StatusCode::FAILED_PRECONDITION) return;
  google::rpc::Status details;
  google::rpc::PreconditionFailure failure;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  bool found = false;
  for (const auto& detail : details.details()) found = found || detail.UnpackTo(&failure);
  ASSERT_TRUE(found);
  EXPECT_EQ(failure.violations(0).type(), reason);
}

}  // namespace attnd
