#include "server/rpc/rpc_context.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/admission/staging_copy.h"
#include "server/call/status_details.h"
#include "server/rpc/load_report.h"
#include "server/rpc/server_context.h"
#include "server/security/caller_label.h"
#include "server/wire/decode.h"

namespace attnd {
RpcContext::RpcContext(const ServiceDeps& deps, grpc::ServerContextBase& context,
                       Direction direction, uint64_t id)
    : deps_(deps),
      open_(deps.calls.open()),
      context_(context),
      direction_(direction),
      id_(id),
      received_at_(deps.clock.Now()),
      deadline_(DeadlineOf(context)),
      peer_(context.peer()),
      unix_socket_(absl::StartsWith(peer_, "unix")),
      trace_(TraceOf(context)),
      room_(deps.calls.call_bytes(), kAdmittedReply) {
  deps_.metrics.CallStarted(MethodOf(direction_));
}

absl::Status RpcContext::Identify() {
  ASSIGN_OR_RETURN(caller_, deps_.auth.Identify(context_, peer_));
  return absl::OkStatus();
}

absl::Status RpcContext::TakeRoom() { return room_.Take({caller_, CallerOfPeer(peer_)}); }

CallersMasks RpcContext::masks(bool* takes_long) const {
  return {.table = deps_.keep.masks(),
          .caller = caller_,
          .takes_long = takes_long,
          .is_repeated = takes_long == nullptr,
          .read_shared = [this](const SharedRequest& request, const TensorSpec& tensor) {
            return deps_.shared_memory.Copy(request, tensor, caller_, unix_socket_);
          }};
}

absl::StatusOr<AdmittedCall> RpcContext::Admit(AttentionCall call, ReplySink& sink, bool streamed) {
  request_id_ = call.request_id();
  CallMemory memory;
  RETURN_IF_ERROR(deps_.shared_memory.FindFor(call, caller_, unix_socket_, memory));
  deps_.metrics.SharedReceived(call.shared_input_bytes());
  used_.received_bytes += call.shared_input_bytes();
  RETURN_IF_ERROR(deps_.keep.leases().FindFor(call, caller_, memory));
  RETURN_IF_ERROR(FindCapture(call, memory));
  CallContext context{.id = id_,
                      .caller = caller_,
                      .deadline = deadline_,
                      .received_at = received_at_,
                      .sink = &sink,
                      .streamed = streamed};
  ASSIGN_OR_RETURN(
      AdmittedCall admitted,
      deps_.calls.admission().Admit(std::move(call), std::move(context), std::move(memory)));
  RETURN_IF_ERROR(TakePlaces(admitted, deps_.staging, &deps_.keep.leases()));
  deps_.metrics.CallAdmitted(admitted.call());
  return admitted;
}

// The map that a capture is compared with, and room for the one that it keeps.
absl::Status RpcContext::FindCapture(const AttentionCall& call, CallMemory& memory) const {
  const CaptureWish* wish = call.capture();
  if (wish == nullptr) return absl::OkStatus();
  const Problem& p = call.problem();
  if (wish->keep) {
    RETURN_IF_ERROR(
        deps_.keep.maps().MayKeep(p.q_len * p.kv_len * static_cast<int64_t>(sizeof(float))));
  }
  if (wish->previous.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(memory.previous_map,
                   deps_.keep.maps().Find(wish->previous, caller_, "capture.previous"));
  if (memory.previous_map->rows == p.q_len && memory.previous_map->keys == p.kv_len) {
    return absl::OkStatus();
  }
  return FieldError(
      reason::kBadShape, "capture.previous",
      absl::StrCat("a map of ", p.q_len, " rows and ", p.kv_len, " keys"),
      absl::StrCat("one of ", memory.previous_map->rows, " and ", memory.previous_map->keys));
}

void RpcContext::NoteRefused(const MessageBytes& message, ByteRange range) {
  if (request_id_.empty()) request_id_ = Decoder::RequestIdOf(message, range);
}

void RpcContext::Received(int64_t bytes) {
  deps_.metrics.Received(unix_socket_, bytes);
  used_.received_bytes += bytes;
}
void RpcContext::Sent(int64_t bytes) {
  deps_.metrics.Sent(unix_socket_, bytes);
  used_.sent_bytes += bytes;
}

void RpcContext::Landed(AdmittedCall& call, int64_t bytes) {
  deps_.metrics.HostCopied(bytes);
  call.staged().landed_at = deps_.clock.Now();
}

// The caller's time begins before its header comes, and gRPC rounds it up to 1 % on the way: it
// cancels before the deadline that is known here.
bool RpcContext::Expired() const {
  const absl::Duration whole = deadline_ - received_at_;
  const absl::Duration early = std::min(absl::Milliseconds(20) + whole / 100, whole / 4);
  return deps_.clock.Now() + early >= deadline_;
}

void RpcContext::Cancel() {
  const bool expired = Expired();
  deps_.worker.Cancel(id_, expired ? StopCause::kExpired : StopCause::kCancelled);
}

absl::Status RpcContext::Stopped(WorkStage stage) {
  const bool expired = Expired();
  deps_.metrics.CallStopped(stage, expired);
  const absl::string_view where = WorkStageName(stage);
  if (expired) {
    return Failure(absl::StatusCode::kDeadlineExceeded, reason::kDeadlineExceededQueue,
                   "the deadline passed while bytes were moved", {{"stage", where}});
  }
  return Failure(absl::StatusCode::kCancelled, reason::kCancelled,
                 "the caller cancelled or its connection broke", {{"stage", where}});
}

void RpcContext::Answered(const Result& result) {
  times_ = result.times();
  deps_.calls.recent_work().Answered(times_.compute);
  AddQueue(deps_.calls, context_);
  priority_ = result.call().priority();
  deps_.metrics.SharedSent(result.call().shared_output_bytes());
  used_.sent_bytes += result.call().shared_output_bytes();
  used_.compute = times_.compute;
}

grpc::Status RpcContext::Failed(const absl::Status& status) {
  status_ = Classified(status);
  AddPushback(status_, context_);
  return ToGrpcStatus(status_);
}

void RpcContext::Close() {
  absl::Time now = deps_.clock.Now();
  if (status_.ok()) ReportStages(now);
  std::string reason = ReasonOf(status_);
  if (status_.code() == absl::StatusCode::kUnauthenticated) deps_.metrics.AuthFailed(reason);
  deps_.metrics.CallFinished(MethodOf(direction_), status_.code(), reason, now - received_at_);
  if (!caller_.empty()) {
    used_.ok = status_.ok();
    deps_.metrics.callers().CallEnded(CallerLabel(caller_, peer_), used_);
  }
  if (trace_.sampled && deps_.metrics.spans() != nullptr) ExportSpan(now);
  Log(now - received_at_, reason);
}

void RpcContext::ReportStages(absl::Time now) {
  Method method = MethodOf(direction_);
  Metrics& metrics = deps_.metrics;
  metrics.StageTook(method, RequestStage::kReceive, times_.admitted - times_.received);
  metrics.StageTook(method, RequestStage::kQueue,
                    times_.kernel_begin - times_.landed - times_.upload);
  metrics.StageTook(method, RequestStage::kUpload, times_.landed - times_.admitted + times_.upload);
  metrics.StageTook(method, RequestStage::kKernel, times_.kernel_end - times_.kernel_begin);
  metrics.StageTook(method, RequestStage::kDownload, times_.downloaded - times_.kernel_end);
  metrics.StageTook(method, RequestStage::kSend, now - times_.downloaded);
  metrics.CallQueued(direction_, priority_, times_.taken - times_.landed);
}

// Stages are known of a call that was answered.
void RpcContext::ExportSpan(absl::Time now) {
  CallSpan span{.trace = trace_,
                .name = absl::StrCat("attnd.v1.Attention/", MethodName(MethodOf(direction_))),
                .begin = received_at_,
                .end = now,
                .stages = {},
                .attributes = {{"rpc.system", "grpc"},
                               {"attnd.request_id", request_id_},
                               {"attnd.caller", caller_}},
                .ok = status_.ok(),
                .error = std::string(status_.message())};
  if (status_.ok()) {
    span.stages = {{"receive", received_at_, times_.admitted},
                   {"queue", times_.landed, times_.kernel_begin - times_.upload},
                   {"upload", times_.kernel_begin - times_.upload, times_.kernel_begin},
                   {"kernel", times_.kernel_begin, times_.kernel_end},
                   {"download", times_.kernel_end, times_.downloaded},
                   {"send", times_.downloaded, now}};
  }
  deps_.metrics.spans()->Add(std::move(span));
}

void RpcContext::Log(absl::Duration took, absl::string_view reason) {
  bool slow = took > deps_.slow_call;
  Severity severity = Severity::kDebug;
  if (!status_.ok()) severity = Severity::kInfo;
  if (slow || status_.code() == absl::StatusCode::kInternal) severity = Severity::kWarning;
  if (!deps_.log.Writes(severity)) return;
  std::optional<int64_t> left_out = deps_.calls.log_limit().Take(deps_.clock.Now());
  if (!left_out.has_value()) return;
  deps_.log.Log(severity, slow ? "slow_call" : "call",
                {{"method", MethodName(MethodOf(direction_))},
                 {"code", absl::StatusCodeToString(status_.code())},
                 {"reason", reason},
                 {"message", status_.message()},
                 {"caller", caller_},
                 {"request_id", request_id_},
                 {"trace_id", trace_.trace_id},
                 {"milliseconds", absl::ToDoubleMilliseconds(took)},
                 {"lines_left_out", *left_out}});
}

}  // namespace attnd
