#include "server/rpc/service.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"
#include "server/rpc/stream_call.h"
#include "server/wire/decode_problem.h"
#include "server/wire/decode_small.h"
#include "server/wire/encode.h"

namespace attnd {
namespace {

constexpr int kMaxReleases = 1024;  // of one call

// LeaseTable's errors name BackwardRequest's field; other requests have the token in their own.
absl::Status InField(absl::string_view field, absl::Status status) {
  return RenameField(std::move(status), "residual_token", field);
}

}  // namespace

void AttentionService::Request(Direction direction, grpc::ServerContext& context,
                               grpc::ByteBuffer& request,
                               grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>& responder,
                               grpc::ServerCompletionQueue& queue, void* tag) {
  if (direction == Direction::kForward) {
    RequestForward(&context, &request, &responder, &queue, &queue, tag);
  } else {
    RequestBackward(&context, &request, &responder, &queue, &queue, tag);
  }
}

RawStreamReactor* AttentionService::ForwardStream(grpc::CallbackServerContext* context) {
  return StartStreamCall(deps_, *context, Direction::kForward, NextId());
}

RawStreamReactor* AttentionService::BackwardStream(grpc::CallbackServerContext* context) {
  return StartStreamCall(deps_, *context, Direction::kBackward, NextId());
}

grpc::ServerUnaryReactor* AttentionService::AnswerSmall(
    grpc::CallbackServerContext* context, Method method,
    const std::function<absl::Status(const std::string& caller)>& work) {
  absl::Time begin = deps_.clock.Now();
  deps_.metrics.CallStarted(method);
  absl::StatusOr<std::string> caller = deps_.auth.Identify(*context, context->peer());
  if (!caller.ok()) deps_.metrics.AuthFailed(ReasonOf(caller.status()));
  absl::Status status = caller.ok() ? work(*caller) : caller.status();
  deps_.metrics.CallFinished(method, status.code(), ReasonOf(status), deps_.clock.Now() - begin);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

grpc::ServerUnaryReactor* AttentionService::GetServerInfo(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* request,
                                                          grpc::ByteBuffer* reply) {
  return AnswerSmall(context, Method::kGetServerInfo, [&](const std::string&) -> absl::Status {
    v1::GetServerInfoRequest wire;
    RETURN_IF_ERROR(DecodeLenient(*request, wire));  // a newer client may want to learn our version
    *reply = EncodeSmall(deps_.server_info);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AttentionService::RenewResidual(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* request,
                                                          grpc::ByteBuffer* reply) {
  return AnswerSmall(context, Method::kRenewResidual,
                     [&](const std::string& caller) -> absl::Status {
                       ASSIGN_OR_RETURN(LeaseGrant lease, Renew(*request, caller));
                       v1::RenewResidualResponse wire;
                       *wire.mutable_residual() = EncodeLease(lease);
                       *reply = EncodeSmall(wire);
                       return absl::OkStatus();
                     });
}

grpc::ServerUnaryReactor* AttentionService::ReleaseResidual(grpc::CallbackServerContext* context,
                                                            const grpc::ByteBuffer* request,
                                                            grpc::ByteBuffer* reply) {
  return AnswerSmall(context, Method::kReleaseResidual,
                     [&](const std::string& caller) -> absl::Status {
                       RETURN_IF_ERROR(Release(*request, caller));
                       *reply = EncodeSmall(v1::ReleaseResidualResponse());
                       return absl::OkStatus();
                     });
}

grpc::ServerUnaryReactor* AttentionService::CompileMask(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request,
                                                        grpc::ByteBuffer* reply) {
  return AnswerSmall(context, Method::kCompileMask, [&](const std::string& caller) -> absl::Status {
    ASSIGN_OR_RETURN(v1::CompileMaskResponse wire, Compile(*request, caller));
    *reply = EncodeSmall(wire);
    return absl::OkStatus();
  });
}

absl::StatusOr<v1::CompileMaskResponse> AttentionService::Compile(const grpc::ByteBuffer& request,
                                                                  const std::string& caller) {
  v1::CompileMaskRequest wire;
  RETURN_IF_ERROR(DecodeSmall(request, wire));
  ASSIGN_OR_RETURN(const Problem problem, DecodeProblem(wire.problem(), {deps_.masks, caller}));
  if (problem.mask == nullptr) {
    return FieldError(reason::kBadField, "problem.mask", "a mask", "none");
  }
  ASSIGN_OR_RETURN(auto compiled, deps_.masks.plans().Get(problem, HostMaskOptions()));
  v1::CompileMaskResponse reply;
  reply.set_id(problem.mask->id().data(), problem.mask->id().size());
  reply.set_bytes_held(static_cast<uint64_t>(problem.mask->bytes() + compiled->bytes()));
  uint64_t visible = 0, empty_rows = 0, full = 0, partial = 0;
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t h = 0; h < problem.q_heads; ++h) {
      const MaskPlan& plan = compiled->PlanAt(b, h);
      visible += static_cast<uint64_t>(plan.visible);
      empty_rows += static_cast<uint64_t>(plan.empty_rows);
      full += static_cast<uint64_t>(plan.full_tiles);
      partial += static_cast<uint64_t>(plan.partial_tiles);
    }
  }
  reply.set_visible(visible);
  reply.set_empty_rows(empty_rows);
  reply.set_tiles_full(full);
  reply.set_tiles_partial(partial);
  return reply;
}

absl::StatusOr<LeaseGrant> AttentionService::Renew(const grpc::ByteBuffer& request,
                                                   const std::string& caller) {
  v1::RenewResidualRequest wire;
  RETURN_IF_ERROR(DecodeSmall(request, wire));
  auto lease = deps_.leases.Renew(wire.token(), caller, absl::Milliseconds(wire.ttl_ms()));
  if (!lease.ok()) return InField("token", lease.status());
  return lease;
}

absl::Status AttentionService::Release(const grpc::ByteBuffer& request, const std::string& caller) {
  v1::ReleaseResidualRequest wire;
  RETURN_IF_ERROR(DecodeSmall(request, wire));
  if (wire.tokens_size() > kMaxReleases) {
    return FieldError(reason::kBadField, "tokens", absl::StrCat("at most ", kMaxReleases),
                      absl::StrCat(wire.tokens_size()));
  }
  if (!wire.token().empty() || wire.tokens().empty()) {
    RETURN_IF_ERROR(InField("token", deps_.leases.Release(wire.token(), caller)));
  }
  for (int n = 0; n < wire.tokens_size(); ++n) {
    RETURN_IF_ERROR(
        InField(absl::StrCat("tokens[", n, "]"), deps_.leases.Release(wire.tokens(n), caller)));
  }
  return absl::OkStatus();
}

}  // namespace attnd
