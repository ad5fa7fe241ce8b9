#include "server/modules/modules_service.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "server/call/status_details.h"
#include "server/rpc/load_report.h"
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

absl::Status TooManyCarry(int64_t most) {
  return WithRetryAfter(
      Failure(absl::StatusCode::kResourceExhausted, reason::kTenantQuota,
              "as many streams of Carry are open as may be; the call goes on without this one",
              {{"limit", "module_calls_of_caller"}, {"value", absl::StrCat(most)}}),
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

// Stages of a call that computed; others have none. Turns of others that came between are within
// `kernel`: attnd.compute_seconds is without them.
std::vector<CallSpan::Stage> StagesOf(const ModuleTimes& times, absl::Time end) {
  if (times.computed == absl::InfinitePast()) return {};
  const absl::Time uploaded =
      std::min(times.turn + absl::Seconds(times.transfers.upload), times.computed);
  const absl::Time kernel_end =
      std::max(times.computed - absl::Seconds(times.transfers.download), uploaded);
  std::vector<CallSpan::Stage> stages = {{"receive", times.began, times.landed},
                                         {"queue", times.landed, times.turn},
                                         {"upload", times.turn, uploaded},
                                         {"kernel", uploaded, kernel_end},
                                         {"download", kernel_end, times.computed}};
  const absl::Time saved = std::max(times.saved, times.computed);
  if (saved > times.computed) stages.push_back({"save", times.computed, saved});
  stages.push_back({"send", saved, end});
  return stages;
}

void ExportSpan(SpanExport& spans, TraceContext trace, ModuleMethod method, const ModuleCall& call,
                const absl::Status& status) {
  const absl::Time end = SteadyNow();
  spans.Add(
      {.trace = std::move(trace),
       .name = absl::StrCat("attnd.v1.Modules/", ModuleMethodName(method)),
       .begin = call.times.began,
       .end = end,
       .stages = StagesOf(call.times, end),
       .attributes = {{"rpc.system", "grpc"},
                      {"attnd.caller", call.caller},
                      {"attnd.compute_seconds", absl::StrCat(absl::ToDoubleSeconds(call.compute))}},
       .ok = status.ok(),
       .error = std::string(status.message())});
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
    if (entered.ok()) entered = Enter(method, stream, caller);
    if (!entered.ok()) return Finish(method, stream, caller, entered);
    threads_.Run([this, method, &stream, caller] { Serve(method, stream, caller); });
  });
}

absl::Status ModulesService::Enter(ModuleMethod method, CallStream& stream,
                                   const std::string& caller) {
  const FairShares::Holder holder = {caller, CallerOfPeer(stream.context().peer())};
  const bool carries = method == ModuleMethod::kCarry;
  FairShares::Share place;
  const FairShares::Outcome outcome = (carries ? carry_places_ : places_).Take(holder, 1, place);
  if (outcome == FairShares::Outcome::kTaken) return stream.Enter(std::move(place), holder);
  if (carries) return TooManyCarry(carry_places_.most_of_caller());
  return outcome == FairShares::Outcome::kOwnIsFull
             ? TooManyOfCaller(caller, places_.most_of_caller())
             : TooManyCalls();
}

void ModulesService::Serve(ModuleMethod method, CallStream& stream, const std::string& caller) {
  const absl::Time begin = SteadyNow(), latest = begin + deps_.longest;
  ModuleCall call{stream,
                  caller,
                  CallWait{stream.stop(), std::min(latest, DeadlineOf(stream.context()))},
                  absl::ZeroDuration(),
                  {.began = begin}};
  const absl::Status status = deps_.calls.Run(method, call);
  if (call.compute > absl::ZeroDuration()) {
    deps_.streams.calls.recent_work().Answered(call.compute);
  }
  deps_.streams.metrics.callers().CallEnded(CallerLabel(caller, stream.context().peer()),
                                            {.ok = status.ok(),
                                             .received_bytes = stream.received_bytes(),
                                             .sent_bytes = stream.sent_bytes(),
                                             .compute = call.compute});
  TraceContext trace = TraceOf(stream.context());
  if (trace.sampled && deps_.streams.metrics.spans() != nullptr) {
    ExportSpan(*deps_.streams.metrics.spans(), std::move(trace), method, call, status);
  }
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
                     {"trace_id", TraceOf(stream.context()).trace_id},
                     {"lines_left_out", *left_out}});
    }
  }
  AddPushback(status, stream.context());
  if (!caller.empty()) AddLoad(stream, caller);
  stream.Finish(ToGrpcStatus(status));
}

void ModulesService::AddLoad(CallStream& stream, const std::string& caller) {
  double queue = 0;
  const Calls& calls = deps_.streams.calls;
  for (int n = 0; n < calls.device_count(); ++n) queue += calls.QueueSeconds(n);
  queue /= deps_.calls.device_count();
  const ModuleMemory& memory = deps_.calls.memory();
  const auto free = static_cast<double>(memory.FreeFor(caller).bytes);
  const auto all = static_cast<double>(memory.capacity().bytes);
  const double used = all > 0 ? std::clamp(1 - free / all, 0.0, 1.0) : 1;
  xds::data::orca::v3::OrcaLoadReport report = LoadReportOf(deps_.streams.calls);
  (*report.mutable_named_metrics())["attnd.module_queue_seconds"] = queue;
  (*report.mutable_named_metrics())["attnd.module_free_bytes"] = free;
  report.set_mem_utilization(used);
  AddLoadReport(report, stream.context());
  stream.context().AddTrailingMetadata("attnd-module-queue-seconds", absl::StrCat(queue));
  stream.context().AddTrailingMetadata("attnd-module-memory", absl::StrCat(used));
}

UnaryStream* ModulesService::StartUnary(ModuleMethod method, Context* context, const Bytes* request,
                                        Bytes* reply) {
  auto* stream = new UnaryStream(deps_.streams, *context, kSmallReply, *request, *reply);
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

BidiStream* ModulesService::StartBidi(ModuleMethod method, Context* context) {
  auto* stream = new BidiStream(deps_.streams, *context, kStreamedReply);
  Start(method, *stream);
  return stream;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ModulesService::Forward(
    Context* context) {
  return StartBidi(ModuleMethod::kForward, context);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ModulesService::Backward(
    Context* context) {
  return StartBidi(ModuleMethod::kBackward, context);
}

WholeStream* ModulesService::StartWhole(ModuleMethod method, Context* context, const Bytes* request,
                                        Bytes* reply) {
  auto* stream = new WholeStream(deps_.streams, *context, CallCost(kWholeBytes), *request, *reply);
  Start(method, *stream);
  return stream;
}

grpc::ServerUnaryReactor* ModulesService::ForwardWhole(Context* context, const Bytes* request,
                                                       Bytes* reply) {
  return StartWhole(ModuleMethod::kForward, context, request, reply);
}

grpc::ServerUnaryReactor* ModulesService::BackwardWhole(Context* context, const Bytes* request,
                                                        Bytes* reply) {
  return StartWhole(ModuleMethod::kBackward, context, request, reply);
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ModulesService::Carry(
    Context* context) {
  return StartBidi(ModuleMethod::kCarry, context);
}

grpc::ServerUnaryReactor* ModulesService::GradientStats(Context* context, const Bytes* request,
                                                        Bytes* reply) {
  return StartUnary(ModuleMethod::kGradientStats, context, request, reply);
}

grpc::ServerUnaryReactor* ModulesService::SumGradients(Context* context, const Bytes* request,
                                                       Bytes* reply) {
  return StartUnary(ModuleMethod::kSumGradients, context, request, reply);
}

grpc::ServerUnaryReactor* ModulesService::Step(Context* context, const Bytes* request,
                                               Bytes* reply) {
  return StartUnary(ModuleMethod::kStep, context, request, reply);
}

grpc::ServerReadReactor<grpc::ByteBuffer>* ModulesService::PutTensors(Context* context,
                                                                      Bytes* reply) {
  auto* stream = new ReadStream(deps_.streams, *context, kSmallReply, *reply);
  Start(ModuleMethod::kPutTensors, *stream);
  return stream;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* ModulesService::GetTensors(Context* context,
                                                                       const Bytes* request) {
  auto* stream = new WriteStream(deps_.streams, *context, kStreamedReply, *request);
  Start(ModuleMethod::kGetTensors, *stream);
  return stream;
}

}  // namespace attnd
