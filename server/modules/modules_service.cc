#include "server/modules/modules_service.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/call/status_details.h"
#include "server/rpc/server_context.h"
#include "server/security/caller_label.h"

namespace attnd {
namespace {

absl::Status TooManyCalls() {
  return WithRetryAfter(
      Failure(absl::StatusCode::kUnavailable, reason::kQueueFull,
              absl::StrCat("other callers use most of the ", kMaxModuleCalls,
                           " calls of modules; wait, or try another replica"),
              {{"limit", "module_calls"}, {"value", absl::StrCat(kMaxModuleCalls)}}),
      absl::Milliseconds(100));
}

absl::Status TooManyOfCaller(const std::string& caller, int64_t most) {
  return WithRetryAfter(
      Failure(
          absl::StatusCode::kResourceExhausted, reason::kTenantQuota,
          absl::StrCat("this caller has ", most,
                       " calls of modules open, as many as it may; wait for one to end"),
          {{"caller", caller}, {"limit", "module_calls_of_caller"}, {"value", absl::StrCat(most)}}),
      absl::Milliseconds(100));
}

}  // namespace

void ModulesService::Start(ModuleMethod method, CallStream& stream) {
  const absl::StatusOr<std::string> caller =
      deps_.auth.Identify(stream.context(), stream.context().peer());
  if (!caller.ok()) {
    deps_.streams.metrics.AuthFailed(ReasonOf(caller.status()));
    return Finish(method, stream, "", caller.status());
  }
  stream.Begin([this, method, &stream, caller = *caller] {
    absl::Status entered = stream.Broken();
    if (entered.ok()) entered = Enter(stream, caller);
    if (!entered.ok()) return Finish(method, stream, caller, entered);
    threads_.Run([this, method, &stream, caller] { Serve(method, stream, caller); });
  });
}

absl::Status ModulesService::Enter(CallStream& stream, const std::string& caller) {
  const FairShares::Holder holder = {caller, CallerOfPeer(stream.context().peer())};
  FairShares::Share place;
  const FairShares::Outcome outcome = places_.Take(holder, 1, place);
  if (outcome == FairShares::Outcome::kTaken) return stream.Enter(std::move(place), holder);
  return outcome == FairShares::Outcome::kOwnIsFull
             ? TooManyOfCaller(caller, places_.most_of_caller())
             : TooManyCalls();
}

void ModulesService::Serve(ModuleMethod method, CallStream& stream, const std::string& caller) {
  const absl::Time latest = absl::Now() + deps_.longest;
  ModuleCall call{stream, caller,
                  CallWait{stream.stop(), std::min(latest, DeadlineOf(stream.context()))},
                  absl::ZeroDuration()};
  const absl::Status status = deps_.calls.Run(method, call);
  deps_.streams.metrics.callers().CallEnded(CallerLabel(caller, stream.context().peer()),
                                            {.ok = status.ok(),
                                             .received_bytes = stream.received_bytes(),
                                             .sent_bytes = stream.sent_bytes(),
                                             .compute = call.compute});
  Finish(method, stream, caller, status);
}

void ModulesService::Finish(ModuleMethod method, CallStream& stream, const std::string& caller,
                            const absl::Status& status) {
  deps_.metrics.CallFinished(method, status);
  Severity severity = Severity::kDebug;
  if (!status.ok()) severity = Severity::kInfo;
  if (status.code() == absl::StatusCode::kInternal) severity = Severity::kWarning;
  if (deps_.log.Writes(severity)) {
    const std::optional<int64_t> left_out =
        deps_.streams.calls.log_limit().Take(deps_.streams.clock.Now());
    if (left_out.has_value()) {
      deps_.log.Log(severity, "module_call",
                    {{"method", ModuleMethodName(method)},
                     {"code", absl::StatusCodeToString(status.code())},
                     {"reason", ReasonOf(status)},
                     {"message", status.message()},
                     {"caller", caller},
                     {"lines_left_out", *left_out}});
    }
  }
  AddPushback(status, stream.context());
  stream.Finish(ToGrpcStatus(status));
}

UnaryStream* ModulesService::StartUnary(ModuleMethod method, Context* context, const Bytes* request,
                                        Bytes* reply) {
  auto* stream = new UnaryStream(deps_.streams, *context, *request, *reply);
  Start(method, *stream);
  return stream;
}

grpc::ServerUnaryReactor* ModulesService::Register(Context* context, const Bytes* request,
                                                   Bytes* reply) {
  return StartUnary(ModuleMethod::kRegister, context, request, reply);
}

grpc::ServerUnaryReactor* ModulesService::GetModule(Context* context, const Bytes* request,
                                                    Bytes* reply) {
  return StartUnary(ModuleMethod::kGetModule, context, request, reply);
}

grpc::ServerUnaryReactor* ModulesService::ListModules(Context* context, const Bytes* request,
                                                      Bytes* reply) {
  return StartUnary(ModuleMethod::kListModules, context, request, reply);
}

grpc::ServerUnaryReactor* ModulesService::Renew(Context* context, const Bytes* request,
                                                Bytes* reply) {
  return StartUnary(ModuleMethod::kRenew, context, request, reply);
}

grpc::ServerUnaryReactor* ModulesService::Release(Context* context, const Bytes* request,
                                                  Bytes* reply) {
  return StartUnary(ModuleMethod::kRelease, context, request, reply);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ModulesService::Forward(
    Context* context) {
  auto* stream = new BidiStream(deps_.streams, *context);
  Start(ModuleMethod::kForward, *stream);
  return stream;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ModulesService::Backward(
    Context* context) {
  auto* stream = new BidiStream(deps_.streams, *context);
  Start(ModuleMethod::kBackward, *stream);
  return stream;
}

grpc::ServerUnaryReactor* ModulesService::GradientStats(Context* context, const Bytes* request,
                                                        Bytes* reply) {
  return StartUnary(ModuleMethod::kGradientStats, context, request, reply);
}

grpc::ServerUnaryReactor* ModulesService::Step(Context* context, const Bytes* request,
                                               Bytes* reply) {
  return StartUnary(ModuleMethod::kStep, context, request, reply);
}

grpc::ServerReadReactor<grpc::ByteBuffer>* ModulesService::PutTensors(Context* context,
                                                                      Bytes* reply) {
  auto* stream = new ReadStream(deps_.streams, *context, *reply);
  Start(ModuleMethod::kPutTensors, *stream);
  return stream;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* ModulesService::GetTensors(Context* context,
                                                                       const Bytes* request) {
  auto* stream = new WriteStream(deps_.streams, *context, *request);
  Start(ModuleMethod::kGetTensors, *stream);
  return stream;
}

}  // namespace attnd
