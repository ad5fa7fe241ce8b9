// SumGradients of a module.
//
//   memory for sums → the module's turn → the replicas' GPUs exchange gradients and add them up →
//   the gradients become these sums
//
// The exchange waits for other daemons, at most until its deadline. It has no turn at the device,
// which computes other modules' calls meanwhile.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "modules/field_error.h"
#include "server/call/status_details.h"
#include "server/modules/module_calls.h"
#include "server/modules/module_errors.h"

namespace attnd {
namespace {

constexpr uint32_t kMaxReplicas = 64;
constexpr size_t kGroupBytes = 128;

absl::Status CheckRequest(const v1::SumGradientsRequest& request) {
  RETURN_IF_ERROR(FieldInRange("replicas", request.replicas(), 2, kMaxReplicas));
  RETURN_IF_ERROR(FieldInRange("replica", request.replica(), 0, request.replicas() - 1));
  if (request.group().empty() || request.group().size() == kGroupBytes) return absl::OkStatus();
  return WrongField("group", absl::StrCat("0 or ", kGroupBytes, " bytes"), request.group().size());
}

absl::Status CheckModule(const RegisteredModule& module) {
  if (module.record().plan.nccl_version() != 0) return absl::OkStatus();
  return Failure(absl::StatusCode::kUnimplemented, reason::kModuleUnsupported,
                 "token: expected a trained module on one GPU, of a server with NCCL "
                 "(plan.nccl_version), got another; exchange gradients through the workers",
                 {{"field", "token"}});
}

}  // namespace

absl::Status ModuleCalls::PrepareReplicas(const RegisteredModule& module,
                                          RegisteredModule::Hold& hold, int replicas) {
  const int64_t bytes = hold.instance().ReplicaBytes(replicas);
  if (hold.replica_memory().bytes() != bytes) {
    hold.instance().EndReplicas();
    hold.replica_memory() = {};
    EnginePlan beside;
    beside.engine_bytes = bytes;
    beside.device = module.plan().device;
    ASSIGN_OR_RETURN(hold.replica_memory(),
                     deps_.table.memory().Reserve(module.record().caller, beside));
  }
  absl::Status prepared = hold.instance().PrepareReplicas(replicas);
  if (!prepared.ok()) hold.replica_memory() = {};
  return OfEngine(std::move(prepared));
}

absl::StatusOr<std::string> ModuleCalls::NewGroup(RegisteredModule& module,
                                                  const v1::SumGradientsRequest& request,
                                                  const CallWait& wait) {
  ASSIGN_OR_RETURN(RegisteredModule::Hold hold, module.Take(request.sequence(), wait));
  RETURN_IF_ERROR(PrepareReplicas(module, hold, static_cast<int>(request.replicas())));
  if (request.replica() > 0) return std::string();
  absl::StatusOr<std::string> group = hold.instance().NewGroup();
  if (!group.ok()) return SumFailed(group.status().message());
  return group;
}

absl::Status ModuleCalls::SumGradients(ModuleCall& call) {
  v1::SumGradientsRequest request;
  RETURN_IF_ERROR(ReadRequest(call.stream, request));
  ASSIGN_OR_RETURN(const Module module, deps_.table.Find(request.token(), call.caller));
  if (absl::Status status = CheckRequest(request); !status.ok()) {
    return Classified(std::move(status));
  }
  RETURN_IF_ERROR(CheckModule(*module));
  v1::SumGradientsResponse response;
  call.times.landed = absl::Now();
  if (request.group().empty()) {
    ASSIGN_OR_RETURN(*response.mutable_group(), NewGroup(*module, request, call.wait));
    return Reply(call.stream, response);
  }
  CallWait patience = call.wait;
  if (request.timeout_ms() > 0) {
    patience.deadline =
        std::min(patience.deadline, absl::Now() + absl::Milliseconds(request.timeout_ms()));
  }
  const ReplicaCall sum = {.group = request.group(),
                           .replica = static_cast<int>(request.replica()),
                           .replicas = static_cast<int>(request.replicas()),
                           .deadline = patience.deadline,
                           .stop = patience.stop};
  // The same sums, whichever group and token brought them.
  request.clear_token();
  request.clear_group();
  request.clear_timeout_ms();
  const std::string digest = DigestOf(request);
  {
    ASSIGN_OR_RETURN(
        RegisteredModule::MicroBatchTurn turn,
        module->TakeMicroBatch(
            request.sequence(), request.micro_batch(), [&] { return digest; }, patience));
    response.set_replayed(turn.added);
    if (!turn.added) {
      RETURN_IF_ERROR(PrepareReplicas(*module, turn.hold, sum.replicas));
      const absl::Status summed = turn.hold.instance().SumReplicas(sum);
      if (!summed.ok()) {
        turn.hold.instance().EndReplicas();
        turn.hold.replica_memory() = {};
        if (absl::IsCancelled(summed)) return call.wait.Stopped();
        return SumFailed(summed.message());
      }
      absl::Status taken = turn.hold.instance().TakeSums();
      if (!taken.ok()) {
        turn.hold.Fail();
        return Classified(std::move(taken));
      }
      turn.hold.Added(digest);
    }
  }
  return Reply(call.stream, response);
}

}  // namespace attnd
