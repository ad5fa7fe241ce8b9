#include "server/service.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/encode.h"
#include "server/status_details.h"
#include "server/stream_call.h"
#include "server/unary_call.h"

namespace attnd {
namespace {

constexpr int kMaxReleases = 1024;  // of one call

}  // namespace

grpc::ServerUnaryReactor* AttentionService::Forward(grpc::CallbackServerContext* context,
                                                    const grpc::ByteBuffer* request,
                                                    grpc::ByteBuffer* reply) {
  return StartUnaryCall(deps_, *context, *request, *reply, Direction::kForward, next_id_++);
}

grpc::ServerUnaryReactor* AttentionService::Backward(grpc::CallbackServerContext* context,
                                                     const grpc::ByteBuffer* request,
                                                     grpc::ByteBuffer* reply) {
  return StartUnaryCall(deps_, *context, *request, *reply, Direction::kBackward, next_id_++);
}

RawStreamReactor* AttentionService::ForwardStream(grpc::CallbackServerContext* context) {
  return StartStreamCall(deps_, *context, Direction::kForward, next_id_++);
}

RawStreamReactor* AttentionService::BackwardStream(grpc::CallbackServerContext* context) {
  return StartStreamCall(deps_, *context, Direction::kBackward, next_id_++);
}

grpc::ServerUnaryReactor* AttentionService::AnswerSmall(
    grpc::CallbackServerContext* context, Method method,
    const std::function<absl::Status(const std::string& caller)>& work) {
  absl::Time begin = deps_.clock.Now();
  deps_.metrics.CallStarted(method);
  absl::StatusOr<std::string> caller = deps_.auth.Identify(*context);
  if (!caller.ok()) deps_.metrics.AuthFailed(ReasonOf(caller.status()));
  absl::Status status = caller.ok() ? work(*caller) : caller.status();
  deps_.metrics.CallFinished(method, status.code(), ReasonOf(status), deps_.clock.Now() - begin);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

grpc::ServerUnaryReactor* AttentionService::GetServerInfo(grpc::CallbackServerContext* context,
                                                          const v1::GetServerInfoRequest*,
                                                          v1::GetServerInfoResponse* reply) {
  return AnswerSmall(context, Method::kGetServerInfo, [&](const std::string&) {
    *reply = deps_.server_info;
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AttentionService::RenewResidual(grpc::CallbackServerContext* context,
                                                          const v1::RenewResidualRequest* request,
                                                          v1::RenewResidualResponse* reply) {
  return AnswerSmall(context, Method::kRenewResidual, [&](const std::string& caller) {
    absl::StatusOr<LeaseGrant> lease =
        deps_.leases.Renew(request->token(), caller, absl::Milliseconds(request->ttl_ms()));
    if (lease.ok()) *reply->mutable_residual() = EncodeLease(*lease);
    return lease.status();
  });
}

grpc::ServerUnaryReactor* AttentionService::ReleaseResidual(
    grpc::CallbackServerContext* context, const v1::ReleaseResidualRequest* request,
    v1::ReleaseResidualResponse*) {
  return AnswerSmall(context, Method::kReleaseResidual, [&](const std::string& caller) {
    if (request->tokens_size() > kMaxReleases) {
      return FieldError(reason::kBadField, "tokens", absl::StrCat("at most ", kMaxReleases),
                        absl::StrCat(request->tokens_size()));
    }
    if (!request->token().empty() || request->tokens().empty()) {
      RETURN_IF_ERROR(deps_.leases.Release(request->token(), caller));
    }
    for (const std::string& token : request->tokens()) {
      RETURN_IF_ERROR(deps_.leases.Release(token, caller));
    }
    return absl::OkStatus();
  });
}

}  // namespace attnd
