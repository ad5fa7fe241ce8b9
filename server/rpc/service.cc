#include "server/rpc/service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"
#include "server/rpc/build_pattern.h"
#include "server/rpc/compile_mask.h"
#include "server/rpc/small_call.h"
#include "server/rpc/stream_call.h"
#include "server/wire/decode_small.h"
#include "server/wire/encode.h"

namespace attnd {
namespace {

constexpr int kMaxReleases = 1024;  // of one call

// LeaseTable's errors name BackwardRequest's field; other requests have the token in their own.
absl::Status InField(absl::string_view field, absl::Status status) {
  return RenameField(std::move(status), "residual_token", field);
}

absl::Status GaveUp() {
  return Failure(absl::StatusCode::kCancelled, reason::kCancelled,
                 "the caller gave up while its call waited for a thread");
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

grpc::ServerUnaryReactor* AttentionService::AnswerSmall(grpc::CallbackServerContext* context,
                                                        Method method,
                                                        const grpc::ByteBuffer& request,
                                                        grpc::ByteBuffer* reply,
                                                        const SmallWork& work) {
  auto* call = new SmallCall(deps_, *context, method, kSmallReply, *reply);
  const absl::Status begun = call->Begin(request);
  call->Finish(begun.ok() ? work(*call) : begun);
  return call;
}

grpc::ServerUnaryReactor* AttentionService::AnswerLong(grpc::CallbackServerContext* context,
                                                       Method method,
                                                       const grpc::ByteBuffer& request,
                                                       grpc::ByteBuffer* reply, SmallWork work) {
  auto* call = new SmallCall(deps_, *context, method, kSmallReply, *reply);
  absl::Status begun = call->Begin(request);
  if (begun.ok()) {
    begun = deps_.calls.mask_workers().Run(call->caller(), [context, call, work = std::move(work)] {
      call->Finish(context->IsCancelled() ? GaveUp() : work(*call));
    });
  }
  if (!begun.ok()) call->Finish(begun);
  return call;
}

grpc::ServerUnaryReactor* AttentionService::GetServerInfo(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* request,
                                                          grpc::ByteBuffer* reply) {
  return AnswerSmall(context, Method::kGetServerInfo, *request, reply,
                     [&](SmallCall&) -> absl::StatusOr<grpc::ByteBuffer> {
                       // A newer client may want to learn our version.
                       RETURN_IF_ERROR(CheckEmpty(*request));
                       return EncodeSmall(deps_.server_info);
                     });
}

grpc::ServerUnaryReactor* AttentionService::RenewResidual(grpc::CallbackServerContext* context,
                                                          const grpc::ByteBuffer* request,
                                                          grpc::ByteBuffer* reply) {
  return AnswerSmall(context, Method::kRenewResidual, *request, reply,
                     [&](SmallCall& call) -> absl::StatusOr<grpc::ByteBuffer> {
                       ASSIGN_OR_RETURN(LeaseGrant lease, Renew(call));
                       v1::RenewResidualResponse wire;
                       *wire.mutable_residual() = EncodeLease(lease);
                       return EncodeSmall(wire);
                     });
}

grpc::ServerUnaryReactor* AttentionService::ReleaseResidual(grpc::CallbackServerContext* context,
                                                            const grpc::ByteBuffer* request,
                                                            grpc::ByteBuffer* reply) {
  return AnswerSmall(context, Method::kReleaseResidual, *request, reply,
                     [&](SmallCall& call) -> absl::StatusOr<grpc::ByteBuffer> {
                       RETURN_IF_ERROR(Release(call));
                       return EncodeSmall(v1::ReleaseResidualResponse());
                     });
}

grpc::ServerUnaryReactor* AttentionService::CompileMask(grpc::CallbackServerContext* context,
                                                        const grpc::ByteBuffer* request,
                                                        grpc::ByteBuffer* reply) {
  return AnswerLong(context, Method::kCompileMask, *request, reply,
                    [this](SmallCall& call) -> absl::StatusOr<grpc::ByteBuffer> {
                      ASSIGN_OR_RETURN(const v1::CompileMaskResponse wire,
                                       attnd::CompileMask(call, deps_));
                      return EncodeSmall(wire);
                    });
}

grpc::ServerUnaryReactor* AttentionService::BuildPattern(grpc::CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request,
                                                         grpc::ByteBuffer* reply) {
  return AnswerLong(context, Method::kBuildPattern, *request, reply,
                    [this](SmallCall& call) -> absl::StatusOr<grpc::ByteBuffer> {
                      ASSIGN_OR_RETURN(const v1::BuildPatternResponse wire,
                                       BuildPatternOfCaller(call, deps_.keep.maps()));
                      return EncodeSmall(wire);
                    });
}

grpc::ServerUnaryReactor* AttentionService::ReleaseCapture(grpc::CallbackServerContext* context,
                                                           const grpc::ByteBuffer* request,
                                                           grpc::ByteBuffer* reply) {
  return AnswerSmall(context, Method::kReleaseCapture, *request, reply,
                     [&](SmallCall& call) -> absl::StatusOr<grpc::ByteBuffer> {
                       RETURN_IF_ERROR(attnd::ReleaseCapture(call, deps_.keep.maps()));
                       return EncodeSmall(v1::ReleaseCaptureResponse());
                     });
}

absl::StatusOr<LeaseGrant> AttentionService::Renew(SmallCall& call) {
  v1::RenewResidualRequest wire;
  RETURN_IF_ERROR(call.Decode(wire));
  auto lease =
      deps_.keep.leases().Renew(wire.token(), call.caller(), absl::Milliseconds(wire.ttl_ms()));
  if (!lease.ok()) return InField("token", lease.status());
  return lease;
}

absl::Status AttentionService::Release(SmallCall& call) {
  v1::ReleaseResidualRequest wire;
  RETURN_IF_ERROR(call.Decode(wire));
  if (wire.tokens_size() > kMaxReleases) {
    return FieldError(reason::kBadField, "tokens", absl::StrCat("at most ", kMaxReleases),
                      absl::StrCat(wire.tokens_size()));
  }
  if (!wire.token().empty() || wire.tokens().empty()) {
    RETURN_IF_ERROR(InField("token", deps_.keep.leases().Release(wire.token(), call.caller())));
  }
  for (int n = 0; n < wire.tokens_size(); ++n) {
    RETURN_IF_ERROR(InField(absl::StrCat("tokens[", n, "]"),
                            deps_.keep.leases().Release(wire.tokens(n), call.caller())));
  }
  return absl::OkStatus();
}

}  // namespace attnd
