// GradientStats, SumGradients and Step of a module.
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "modules/field_error.h"
#include "server/call/status_details.h"
#include "server/modules/module_calls.h"
#include "server/modules/module_errors.h"
#include "server/modules/tensor_copy.h"
#include "server/wire/wire_check.h"

namespace attnd {
namespace {

int64_t GroupCount(const OptimizerSpec& optimizer, size_t entries) {
  int64_t most = 0;
  for (size_t n = 0; n < entries; ++n) {
    most = std::max(most, optimizer.GroupOf(static_cast<int64_t>(n)));
  }
  return most + 1;
}

absl::Status CheckGroups(const v1::StepRequest& request, int64_t groups) {
  const int64_t expected = request.discard() ? 0 : groups;
  if (request.group_size() != expected) {
    return WrongField("group", absl::StrCat(expected, " entries"), request.group_size());
  }
  for (int n = 0; n < request.group_size(); ++n) {
    const std::string path = absl::StrCat("group[", n, "].");
    RETURN_IF_ERROR(FieldIsFinite(path + "learning_rate", request.group(n).learning_rate()));
    RETURN_IF_ERROR(FieldIsFinite(path + "weight_decay", request.group(n).weight_decay()));
  }
  return absl::OkStatus();
}

StepValues ValuesOf(const v1::StepValues& from, const OptimizerSpec& registered) {
  StepValues values{.rates = {from.learning_rate(), from.weight_decay()}};
  values.spec.kind = registered.kind;
  if (registered.kind == OptimizerKind::kSgd) {
    values.spec.momentum = from.momentum();
    values.spec.dampening = from.dampening();
    values.spec.nesterov = from.nesterov();
  } else {
    values.spec.beta1 = from.beta1();
    values.spec.beta2 = from.beta2();
    values.spec.epsilon = from.epsilon();
    values.spec.coupled_decay = from.coupled_decay();
    values.spec.amsgrad = from.amsgrad();
  }
  return values;
}

std::vector<StepValues> ValuesOf(const v1::StepRequest& request, const OptimizerSpec& registered) {
  std::vector<StepValues> values;
  for (const v1::StepValues& one : request.values()) values.push_back(ValuesOf(one, registered));
  return values;
}

std::vector<ParameterStep> ParametersOf(const v1::StepRequest& request) {
  std::vector<ParameterStep> steps;
  for (const v1::ParameterStep& one : request.parameter()) {
    steps.push_back({.values = one.values(),
                     .step = static_cast<int64_t>(one.step()),
                     .multiplier = one.has_multiplier() ? one.multiplier() : 1});
  }
  return steps;
}

// Checks a request with an entry for each parameter.
absl::Status CheckParameters(const v1::StepRequest& request, const ModuleDescription& module) {
  constexpr uint64_t kMostSteps = uint64_t{1} << 53;  // exact in float64
  const int64_t entries = static_cast<int64_t>(module.table.entries().size());
  RETURN_IF_ERROR(FieldInRange("parameter", request.parameter_size(), entries, entries));
  RETURN_IF_ERROR(FieldInRange("values", request.values_size(), 1, kMaxOptimizerGroups));
  if (request.discard() || request.group_size() > 0 || request.has_multiplier() ||
      request.max_norm() != 0) {
    return WrongField("parameter", "none beside group, multiplier, max_norm or discard", "some");
  }
  for (int n = 0; n < request.values_size(); ++n) {
    RETURN_IF_ERROR(CheckStepValues(absl::StrCat("values[", n, "]."),
                                    ValuesOf(request.values(n), module.optimizer),
                                    module.optimizer));
  }
  for (int n = 0; n < request.parameter_size(); ++n) {
    const std::string path = absl::StrCat("parameter[", n, "].");
    const v1::ParameterStep& one = request.parameter(n);
    RETURN_IF_ERROR(FieldInRange(path + "values", one.values(), 0, request.values_size() - 1));
    if (one.step() <= kMostSteps) continue;
    return WrongField(path + "step", "0..2^53", one.step());
  }
  return absl::OkStatus();
}

// Checks what does not depend on the module's state.
absl::Status CheckRequest(const v1::StepRequest& request, const ModuleDescription& module) {
  if (module.optimizer.kind == OptimizerKind::kNone && !request.discard()) {
    return WrongField("discard", "true without an optimizer", "false");
  }
  if (request.parameter_size() > 0) return CheckParameters(request, module);
  RETURN_IF_ERROR(
      CheckGroups(request, GroupCount(module.optimizer, module.table.entries().size())));
  RETURN_IF_ERROR(FieldIsFinite("multiplier", request.multiplier()));
  if (std::isfinite(request.max_norm()) && request.max_norm() >= 0) return absl::OkStatus();
  return WrongField("max_norm", "a finite number, 0 or above", request.max_norm());
}

constexpr uint32_t kMaxReplicas = 64;
constexpr size_t kGroupBytes = 128;

absl::Status CheckSum(const v1::SumGradientsRequest& request) {
  RETURN_IF_ERROR(FieldInRange("replicas", request.replicas(), 2, kMaxReplicas));
  RETURN_IF_ERROR(FieldInRange("replica", request.replica(), 0, request.replicas() - 1));
  if (request.group().empty() || request.group().size() == kGroupBytes) return absl::OkStatus();
  return WrongField("group", absl::StrCat("0 or ", kGroupBytes, " bytes"), request.group().size());
}

absl::Status CheckConnected(const RegisteredModule& module) {
  if (module.record().plan.nccl_version() != 0) return absl::OkStatus();
  return Failure(absl::StatusCode::kUnimplemented, reason::kModuleUnsupported,
                 "token: expected a trained module on one GPU, of a server with NCCL "
                 "(plan.nccl_version), got another; exchange gradients through the workers",
                 {{"field", "token"}});
}

StepOutcome OutcomeOf(const v1::StepResponse& response) {
  if (response.replayed()) return StepOutcome::kReplayed;
  return response.applied() ? StepOutcome::kApplied : StepOutcome::kSkipped;
}

}  // namespace

absl::Status ModuleCalls::FillStats(const RegisteredModule& module, ModuleInstance& instance,
                                    const v1::GradientStatsRequest& request,
                                    v1::GradientStatsResponse& response) {
  const std::vector<WeightEntry>& entries = instance.description().table.entries();
  std::vector<double> norms(entries.size());
  RETURN_IF_ERROR(instance.SquaredNorms(absl::MakeSpan(norms)));
  double all = 0;
  for (double norm : norms) all += norm;
  response.set_squared_norm(all);
  response.set_finite(std::isfinite(all));
  if (!request.by_parameter()) return absl::OkStatus();
  for (size_t n = 0; n < entries.size(); ++n) {
    v1::ParameterGradient& of = *response.add_parameter();
    of.set_squared_norm(norms[n]);
    if (!request.all_norms() || !entries[n].trained_offset.has_value()) continue;
    ASSIGN_OR_RETURN(const TensorCopy copy,
                     TensorCopy::Make(HeaderOf(instance.description(), entries[n],
                                               TensorRole::kGradient, v1::ELEMENT_FLOAT32),
                                      module, deps_.table.memory()));
    RETURN_IF_ERROR(instance.Get(copy.entry, copy.role, copy.element,
                                 {copy.bytes(), static_cast<size_t>(copy.size())}));
    const auto* numbers = reinterpret_cast<const float*>(copy.bytes());
    double sum = 0, largest = 0;
    for (int64_t i = 0; i < entries[n].elements; ++i) {
      const double size = std::fabs(numbers[i]);
      sum += size;
      if (!(size <= largest)) largest = size;  // a NaN stays, as nothing is less
      if (std::isnan(largest)) break;
    }
    of.set_sum(std::isnan(largest) ? largest : sum);
    of.set_largest(largest);
  }
  return absl::OkStatus();
}

absl::Status ModuleCalls::GradientStatsOf(ModuleCall& call) {
  v1::GradientStatsRequest request;
  RETURN_IF_ERROR(ReadRequest(call.stream, request));
  ASSIGN_OR_RETURN(const Module module, deps_.table.Find(request.token(), call.caller));
  if (request.by_parameter()) {
    const size_t entries = module->description().table.entries().size();
    RETURN_IF_ERROR(call.stream.HoldRequest(static_cast<int64_t>(entries) * kObjectBytes));
  }
  v1::GradientStatsResponse response;
  call.times.landed = SteadyNow();
  {
    ASSIGN_OR_RETURN(RegisteredModule::Hold hold, module->Take(request.sequence(), call.wait));
    RETURN_IF_ERROR(hold.CheckGradient(request.micro_batches()));
    ASSIGN_OR_RETURN(const auto turns, TakeDevices(call, *module));
    absl::Status found = FillStats(*module, hold.instance(), request, response);
    call.times.computed = SteadyNow();
    if (!found.ok()) return Classified(std::move(found));
  }
  return Reply(call.stream, response);
}

// ---- Sums of replicas. Their exchange waits for other daemons, at most until its deadline. It has
// no turn at the device, which computes other modules' calls meanwhile.

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
  if (absl::Status status = CheckSum(request); !status.ok()) {
    return Classified(std::move(status));
  }
  RETURN_IF_ERROR(CheckConnected(*module));
  v1::SumGradientsResponse response;
  call.times.landed = SteadyNow();
  if (request.group().empty()) {
    ASSIGN_OR_RETURN(*response.mutable_group(), NewGroup(*module, request, call.wait));
    return Reply(call.stream, response);
  }
  CallWait patience = call.wait;
  if (request.timeout_ms() > 0) {
    patience.deadline =
        std::min(patience.deadline, SteadyNow() + absl::Milliseconds(request.timeout_ms()));
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

// ---- Steps.

// Once begun a step is not stopped: its caller learns from the same request what became of it.
absl::StatusOr<v1::StepResponse> ModuleCalls::Apply(RegisteredModule::Hold& hold,
                                                    const v1::StepRequest& request) {
  v1::StepResponse response;
  response.set_finite(true);
  response.set_sequence(request.sequence() + 1);
  if (request.discard()) {
    RETURN_IF_ERROR(hold.instance().ClearGradients());
  } else {
    const std::vector<ParameterStep> parameters = ParametersOf(request);
    const std::vector<StepValues> values =
        ValuesOf(request, hold.instance().description().optimizer);
    std::vector<GroupRates> groups;
    for (const v1::GroupValues& group : request.group()) {
      groups.push_back({group.learning_rate(), group.weight_decay()});
    }
    ASSIGN_OR_RETURN(
        const StepResult result,
        hold.instance().Step({.groups = groups,
                              .multiplier = request.has_multiplier() ? request.multiplier() : 1,
                              .max_norm = request.max_norm(),
                              .skip_unless_finite = request.skip_unless_finite(),
                              .parameters = parameters,
                              .values = values}));
    response.set_applied(result.applied);
    response.set_squared_norm(result.stats.squared_norm);
    response.set_finite(result.stats.is_finite);
  }
  response.set_optimizer_step(static_cast<uint64_t>(hold.instance().optimizer_step()));
  return response;
}

absl::Status ModuleCalls::Step(ModuleCall& call) {
  v1::StepRequest request;
  RETURN_IF_ERROR(ReadRequest(call.stream, request));
  ASSIGN_OR_RETURN(const Module module, deps_.table.Find(request.token(), call.caller));
  if (absl::Status status = CheckRequest(request, module->description()); !status.ok()) {
    return Classified(std::move(status));
  }
  auto refused = [&](absl::Status status) {
    deps_.metrics.Stepped(StepOutcome::kRefused);
    return status;
  };
  v1::StepResponse response;
  call.times.landed = SteadyNow();
  {
    request.clear_token();  // another one after a restart
    std::string digest = DigestOf(request);
    absl::StatusOr<RegisteredModule::ChangeTurn> change =
        module->TakeChange(request.sequence(), digest, call.wait);
    if (!change.ok()) return refused(change.status());
    if (change->hold.has_value()) {
      RegisteredModule::Hold& hold = *change->hold;
      if (!request.discard()) {
        absl::Status complete = hold.CheckGradient(request.micro_batches());
        if (!complete.ok()) return refused(std::move(complete));
        RETURN_IF_ERROR(module->CheckWeights());
      }
      ASSIGN_OR_RETURN(const auto turns,
                       TakeDevices(call, *module, module->pace().SecondsFor(PacedCall::kStep, 1)));
      absl::StatusOr<v1::StepResponse> applied = Apply(hold, request);
      call.compute = turns->computed();
      call.times.computed = SteadyNow();
      module->pace().Took(PacedCall::kStep, 1, absl::ToDoubleSeconds(call.compute));
      if (!applied.ok()) {
        hold.Fail();
        return Classified(applied.status());
      }
      response = *std::move(applied);
      hold.Changed(std::move(digest), response.SerializeAsString());
      hold.Save(deps_.table.clock().Now());
      call.times.saved = SteadyNow();
    } else {
      if (!response.ParseFromString(change->reply)) return StepConflict(request.sequence());
      response.set_replayed(true);
    }
  }
  response.set_durable_sequence(module->durable_sequence());
  deps_.metrics.Stepped(OutcomeOf(response));
  return Reply(call.stream, response);
}

}  // namespace attnd
