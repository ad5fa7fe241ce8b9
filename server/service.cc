#include "server/service.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/decode.h"
#include "server/encode.h"
#include "server/landing.h"
#include "server/message_bytes.h"
#include "server/status_details.h"

namespace attnd {
namespace {

void AddPushback(const absl::Status& status, grpc::CallbackServerContext& context) {
  std::optional<absl::Duration> delay = RetryAfterOf(status);
  if (!delay.has_value()) return;
  context.AddTrailingMetadata("grpc-retry-pushback-ms",
                              absl::StrCat(absl::ToInt64Milliseconds(*delay)));
}

// A deadline further away than any call may take is none.
absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  auto deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return absl::InfiniteFuture();
  return absl::FromChrono(deadline);
}

// A reply up to this is sent by the slot that computed it: a socket takes it at once.
constexpr int64_t kReplyBytesAtOnce = 256 << 10;

// One Forward or Backward. Deletes itself when gRPC is done with the call.
class CallReactor final : public grpc::ServerUnaryReactor, public ReplySink {
 public:
  CallReactor(const ServiceDeps& deps, grpc::CallbackServerContext& context,
              grpc::ByteBuffer& reply, Direction direction, uint64_t id)
      : deps_(deps),
        context_(context),
        reply_(reply),
        direction_(direction),
        id_(id),
        received_at_(deps.clock.Now()),
        unix_socket_(absl::StartsWith(context.peer(), "unix")) {
    deps_.metrics.CallStarted(MethodOf(direction_));
  }

  // Called once, from the method's handler; gRPC calls nothing here before that has returned, so
  // OnCancel finds the call submitted.
  void Start(const grpc::ByteBuffer& request) {
    absl::StatusOr<AdmittedCall> call = Accept(request);
    // gRPC's own reference to the request would keep its slices until the end of the call.
    const_cast<grpc::ByteBuffer&>(request).Clear();
    if (!call.ok()) return FinishWith(call.status());
    deps_.worker.Submit(*std::move(call));
  }

  void OnResult(absl::StatusOr<Result> result) override {
    if (!result.ok()) return FinishWith(result.status());
    if (result->call().output_bytes() <= kReplyBytesAtOnce) return Send(*std::move(result));
    // shared_ptr: std::function wants what it holds to be copyable.
    auto shared = std::make_shared<Result>(*std::move(result));
    deps_.reply_threads.Run([this, shared] { Send(std::move(*shared)); });
  }

 private:
  void Send(Result result) {
    times_ = result.times();
    priority_ = result.call().priority();
    Reply reply = Encode(std::move(result), deps_.engine, deps_.clock.Now());
    deps_.metrics.Sent(unix_socket_, static_cast<int64_t>(reply.bytes.Length()));
    reply_.Swap(&reply.bytes);
    Finish(grpc::Status::OK);  // nothing of this object may be touched after it
  }

  absl::StatusOr<AdmittedCall> Accept(const grpc::ByteBuffer& request) {
    deps_.metrics.Received(unix_socket_, static_cast<int64_t>(request.Length()));
    ASSIGN_OR_RETURN(caller_, deps_.auth.Identify(context_));
    ASSIGN_OR_RETURN(MessageBytes bytes, MessageBytes::From(request));
    ASSIGN_OR_RETURN(AttentionCall call, Decoder::Decode(std::move(bytes), direction_));
    request_id_ = call.request_id();
    RETURN_IF_ERROR(AttachResidual(deps_.leases, caller_, call));
    CallContext context{.id = id_,
                        .caller = caller_,
                        .deadline = DeadlineOf(context_),
                        .received_at = received_at_,
                        .sink = this};
    ASSIGN_OR_RETURN(AdmittedCall admitted,
                     deps_.admission.Admit(std::move(call), std::move(context)));
    deps_.metrics.CallAdmitted(admitted.call());
    RETURN_IF_ERROR(TakePlaces(admitted, deps_.staging, &deps_.leases));
    deps_.metrics.HostCopied(Land(admitted));
    admitted.staged().landed_at = deps_.clock.Now();
    return admitted;
  }

  void FinishWith(const absl::Status& status) {
    status_ = Classified(status);
    AddPushback(status_, context_);
    Finish(ToGrpcStatus(status_));
  }

  void OnCancel() override {
    bool expired = deps_.clock.Now() >= DeadlineOf(context_);
    deps_.worker.Cancel(id_, expired ? StopCause::kExpired : StopCause::kCancelled);
  }

  void OnDone() override {
    absl::Time now = deps_.clock.Now();
    if (status_.ok()) ReportStages(now);
    std::string reason = ReasonOf(status_);
    if (status_.code() == absl::StatusCode::kUnauthenticated) deps_.metrics.AuthFailed(reason);
    deps_.metrics.CallFinished(MethodOf(direction_), status_.code(), reason, now - received_at_);
    LogCall(now - received_at_, reason);
    delete this;
  }

  void ReportStages(absl::Time now) {
    Method method = MethodOf(direction_);
    Metrics& metrics = deps_.metrics;
    metrics.StageTook(method, RequestStage::kReceive, times_.admitted - times_.received);
    metrics.StageTook(method, RequestStage::kQueue,
                      times_.kernel_begin - times_.landed - times_.upload);
    metrics.StageTook(method, RequestStage::kUpload,
                      times_.landed - times_.admitted + times_.upload);
    metrics.StageTook(method, RequestStage::kKernel, times_.kernel_end - times_.kernel_begin);
    metrics.StageTook(method, RequestStage::kDownload, times_.downloaded - times_.kernel_end);
    metrics.StageTook(method, RequestStage::kSend, now - times_.downloaded);
    metrics.CallQueued(direction_, priority_, times_.taken - times_.landed);
  }

  void LogCall(absl::Duration took, absl::string_view reason) {
    bool slow = took > deps_.slow_call;
    Severity severity = Severity::kDebug;
    if (!status_.ok()) severity = Severity::kInfo;
    if (slow || status_.code() == absl::StatusCode::kInternal) severity = Severity::kWarning;
    if (!deps_.log.Writes(severity)) return;
    std::optional<int64_t> left_out = deps_.log_limit.Take(deps_.clock.Now());
    if (!left_out.has_value()) return;
    deps_.log.Log(severity, slow ? "slow_call" : "call",
                  {{"method", MethodName(MethodOf(direction_))},
                   {"code", absl::StatusCodeToString(status_.code())},
                   {"reason", reason},
                   {"message", status_.message()},
                   {"caller", caller_},
                   {"request_id", request_id_},
                   {"milliseconds", absl::ToDoubleMilliseconds(took)},
                   {"lines_left_out", *left_out}});
  }

  const ServiceDeps& deps_;
  grpc::CallbackServerContext& context_;
  grpc::ByteBuffer& reply_;
  const Direction direction_;
  const uint64_t id_;
  const absl::Time received_at_;
  const bool unix_socket_;
  std::string caller_, request_id_;
  absl::Status status_;
  CallTimes times_;
  Priority priority_ = Priority::kNormal;
};

constexpr int kMaxReleases = 1024;  // of one call

}  // namespace

std::optional<int64_t> CallLogLimit::Take(absl::Time now) {
  int64_t second = absl::ToUnixSeconds(now);
  absl::MutexLock lock(&mutex_);
  if (second != second_) lines_ = 0;
  second_ = second;
  if (++lines_ > kLinesPerSecond) {
    ++left_out_;
    return std::nullopt;
  }
  return std::exchange(left_out_, 0);
}

grpc::ServerUnaryReactor* AttentionService::Forward(grpc::CallbackServerContext* context,
                                                    const grpc::ByteBuffer* request,
                                                    grpc::ByteBuffer* reply) {
  auto* reactor = new CallReactor(deps_, *context, *reply, Direction::kForward, next_id_++);
  reactor->Start(*request);
  return reactor;
}

grpc::ServerUnaryReactor* AttentionService::Backward(grpc::CallbackServerContext* context,
                                                     const grpc::ByteBuffer* request,
                                                     grpc::ByteBuffer* reply) {
  auto* reactor = new CallReactor(deps_, *context, *reply, Direction::kBackward, next_id_++);
  reactor->Start(*request);
  return reactor;
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
