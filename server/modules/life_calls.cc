// Register, GetModule, ListModules, Renew and Release.
#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "modules/field_error.h"
#include "proto/attnd/v1/module_codec.h"
#include "server/call/status_details.h"
#include "server/modules/module_calls.h"
#include "server/modules/module_errors.h"

namespace attnd {
namespace {

constexpr size_t kMaxNameBytes = 128;

absl::Status CheckName(const std::string& name) {
  auto good = [](char c) { return absl::ascii_isalnum(c) || c == '_' || c == '.' || c == '-'; };
  if (!name.empty() && name.size() <= kMaxNameBytes &&
      std::all_of(name.begin(), name.end(), good)) {
    return absl::OkStatus();
  }
  return FieldError(reason::kBadField, "name", "1..128 bytes of [A-Za-z0-9_.-]",
                    absl::StrCat(name.size(), " bytes"));
}

absl::StatusOr<absl::Duration> DecodeTtl(uint32_t ttl_ms) {
  const absl::Duration ttl = absl::Milliseconds(ttl_ms);
  if (ttl_ms == 0) return kModuleTtl;
  if (ttl >= kMinModuleTtl) return std::min(ttl, kMaxModuleTtl);
  return FieldError(reason::kBadField, "ttl_ms", "0, or 1000 and more", absl::StrCat(ttl_ms));
}

absl::StatusOr<std::shared_ptr<const ModuleDescription>> Describe(
    const v1::RegisterModuleRequest& request, CallStream& stream) {
  absl::StatusOr<ModuleLayout> layout = DecodeModuleLayout(request.layout());
  if (!layout.ok()) return OfLayout(layout.status());
  absl::StatusOr<ModuleGraph> graph = ModuleGraph::Make(*std::move(layout));
  if (!graph.ok()) return OfLayout(graph.status());
  RETURN_IF_ERROR(stream.HoldRequest(static_cast<int64_t>(request.SpaceUsedLong()) +
                                     WeightTable::BytesOf(*graph)));
  absl::StatusOr<OptimizerSpec> optimizer = DecodeOptimizer(request.optimizer());
  if (!optimizer.ok()) return Classified(optimizer.status());
  auto description =
      std::make_shared<const ModuleDescription>(*std::move(graph), *std::move(optimizer));
  absl::Status status =
      CheckOptimizer(description->optimizer, description->graph, description->table);
  if (!status.ok()) return Classified(std::move(status));
  return description;
}

v1::Plan EncodePlan(const EnginePlan& plan, const ModuleEngine& engine,
                    const ModuleLimits& limits) {
  v1::Plan wire;
  wire.set_weight_bytes(static_cast<uint64_t>(plan.plan.weight_bytes));
  wire.set_optimizer_bytes(static_cast<uint64_t>(plan.plan.optimizer_bytes));
  wire.set_activation_bytes(static_cast<uint64_t>(plan.plan.activation_bytes));
  wire.set_workspace_bytes(static_cast<uint64_t>(plan.plan.workspace_bytes + plan.engine_bytes));
  const auto most = std::max_element(plan.plan.recompute.begin(), plan.plan.recompute.end());
  wire.set_recompute(static_cast<v1::Recompute>(*most));
  for (const EnginePlan& part : plan.parts()) {
    for (size_t n = 0; n < part.plan.recompute.size(); ++n) {
      wire.add_layer_device(static_cast<uint32_t>(part.device));
    }
  }
  wire.set_forward_flops(plan.plan.forward_flops);
  wire.set_backward_flops(plan.plan.backward_flops);
  wire.set_engine(engine.Name());
  if (limits.kept_rows > 0) {
    wire.set_nccl_version(static_cast<uint32_t>(engine.ReplicaVersion(plan)));
  }
  return wire;
}

// Checks that the tensors of the largest call fit into staging memory, bool masks aside.
absl::Status CheckStaging(const ModuleGraph& graph, const ModuleLimits& limits,
                          const AdmissionLimits& staging) {
  const int64_t capacity = std::min(staging.memory_bytes, staging.caller_max_bytes);
  const ModuleLayout& layout = graph.layout();
  const double element = static_cast<double>(ElementBytes(layout.element));
  const double row = 4 * element * static_cast<double>(layout.width);
  const double left =
      static_cast<double>(capacity) - 2 * element * static_cast<double>(limits.max_memory_rows) *
                                          static_cast<double>(layout.memory_width);
  const auto most = static_cast<int64_t>(std::max(0.0, left / row));
  if (limits.max_rows <= most) return absl::OkStatus();
  return OfEngine(absl::OutOfRangeError(absl::StrCat(
      "limits.max_rows: expected at most ", most,
      ", whose x, y and gradients fit --memory_limit_mib and --caller_memory_mib, got ",
      limits.max_rows)));
}

// "1500 are free: gpu0 has 1000, gpu1 has 500".
std::string FreeText(const MemoryBudget& free, const std::vector<std::string>& devices) {
  std::string text = absl::StrCat(free.bytes, " are free");
  for (size_t n = 0; n < free.devices.size(); ++n) {
    absl::StrAppend(&text, n == 0 ? ": " : ", ", devices[n], " has ", free.devices[n]);
  }
  return text;
}

// Counts the bytes of all weights, as their parameters are kept.
int64_t BytesOfPut(const ModuleDescription& module) {
  int64_t elements = 0;
  for (const WeightEntry& entry : module.table.entries()) elements += entry.elements;
  return elements * ElementBytes(module.graph.layout().parameter_element);
}

constexpr absl::string_view kStateCure = "space and rights of --module_state_dir";

void WarnOf(absl::string_view event, const absl::Status& status, absl::string_view cure,
            CallLogLimit& limit, Logger& log) {
  const std::optional<int64_t> left_out = limit.Take(SteadyNow());
  if (!left_out.has_value()) return;
  log.Warning(event,
              {{"message", status.message()}, {"lines_left_out", *left_out}, {"cure", cure}});
}

MemoryBudget Less(MemoryBudget budget, int64_t bytes) {
  budget.bytes = std::max<int64_t>(0, budget.bytes - bytes);
  return budget;
}

}  // namespace

// Within what is free now, with room for a put of the weights; else says whether it would ever fit.
absl::StatusOr<EnginePlan> ModuleCalls::PlanWithin(const ModuleDescription& description,
                                                   const ModuleLimits& limits,
                                                   const std::string& caller) const {
  const ModuleMemory& memory = deps_.table.memory();
  const int64_t of_put = memory.IsShared() ? BytesOfPut(description) : 0;
  const MemoryBudget free = memory.FreeFor(caller);
  absl::StatusOr<EnginePlan> plan = deps_.engine.Plan(description, limits, Less(free, of_put));
  if (plan.status().code() == absl::StatusCode::kOutOfRange) {
    absl::StatusOr<EnginePlan> alone =
        deps_.engine.Plan(description, limits, Less(memory.capacity(), of_put));
    if (!alone.ok()) return OfEngine(alone.status());
    const int64_t bytes = alone->bytes() + of_put;
    return Failure(absl::StatusCode::kResourceExhausted, reason::kModuleQuota,
                   absl::StrCat("module_memory_mib or caller_module_mib: ", bytes,
                                " bytes do not fit beside what is registered, ",
                                FreeText(free, deps_.devices)),
                   {{"caller", caller}, {"bytes", absl::StrCat(bytes)}});
  }
  if (plan.status().code() == absl::StatusCode::kInvalidArgument) return Classified(plan.status());
  if (!plan.ok()) return OfEngine(plan.status());
  return plan;
}

absl::Status ModuleCalls::CheckDurability(v1::Durability durability) const {
  if (durability == v1::DURABILITY_PROCESS) return absl::OkStatus();
  const bool has_place = deps_.states != nullptr;
  if (durability == v1::DURABILITY_HOST && has_place) return absl::OkStatus();
  if (durability == v1::DURABILITY_DISK && has_place && !deps_.states->is_host_memory()) {
    return absl::OkStatus();
  }
  const char* offered =
      has_place ? "DURABILITY_PROCESS or DURABILITY_HOST (--module_state_dir is no disk)"
                : "DURABILITY_PROCESS (--module_state_dir is empty)";
  return Failure(
      absl::StatusCode::kUnimplemented, reason::kModuleUnsupported,
      absl::StrCat("durability: expected ", offered, ", got ", v1::Durability_Name(durability)),
      {{"field", "durability"}});
}

absl::StatusOr<std::unique_ptr<ModuleState>> ModuleCalls::OpenState(
    const ModuleRecord& record, v1::Durability durability,
    const ModuleDescription& description) const {
  const bool is_disk = durability == v1::DURABILITY_DISK;
  const StatePlace place = {deps_.states, is_disk,
                            is_disk ? deps_.save_every : absl::ZeroDuration(),
                            is_disk ? 0 : deps_.shadow_every};
  // The log, its limit and the metrics outlive the modules, these calls do not.
  auto saved = [&log = deps_.log, &limit = deps_.state_lines, &metrics = deps_.metrics](
                   const absl::Status& status, int64_t bytes) {
    metrics.Saved(status.ok(), bytes);
    if (!status.ok()) WarnOf("module_state_not_saved", status, kStateCure, limit, log);
  };
  absl::StatusOr<std::unique_ptr<ModuleState>> state =
      ModuleState::Open(place, {record.caller, record.name, record.state_digest},
                        ModuleState::FileBytesOf(description), saved);
  if (!state.ok()) return StateRefused(state.status());
  return state;
}

void ModuleCalls::WarnOfState(absl::string_view event, const absl::Status& status,
                              absl::string_view cure) const {
  WarnOf(event, status, cure, deps_.state_lines, deps_.log);
}

absl::Status ModuleCalls::StateRefused(const absl::Status& status) const {
  if (ReasonOf(status) == reason::kStateUnavailable) {
    WarnOfState("module_state_unavailable", status, kStateCure);
  }
  return Classified(status);
}

absl::StatusOr<std::unique_ptr<ModuleInstance>> ModuleCalls::MakeInstance(
    ModuleRecord& record, std::shared_ptr<const ModuleDescription> description,
    ModuleMemory::Reservation& reserved) {
  absl::MutexLock lock(&making_);
  ASSIGN_OR_RETURN(const EnginePlan plan, PlanWithin(*description, record.limits, record.caller));
  ASSIGN_OR_RETURN(reserved, deps_.table.memory().Reserve(record.caller, plan));
  absl::StatusOr<std::unique_ptr<ModuleInstance>> instance =
      deps_.engine.Make(std::move(description), record.limits, plan);
  if (!instance.ok()) return OfEngine(instance.status());
  record.plan = EncodePlan(plan, deps_.engine, record.limits);
  record.devices = NamesOf(plan);
  return instance;
}

absl::StatusOr<ModuleCalls::Module> ModuleCalls::MakeModule(
    ModuleRecord record, v1::Durability durability,
    std::shared_ptr<const ModuleDescription> description) {
  const std::string& caller = record.caller;
  ModuleMemory& memory = deps_.table.memory();
  std::unique_ptr<ModuleState> state;
  ModuleMemory::Reservation of_state;
  if (durability == v1::DURABILITY_HOST) {
    ASSIGN_OR_RETURN(of_state, memory.Reserve(caller, ModuleState::BytesOf(*description)));
  }
  if (durability != v1::DURABILITY_PROCESS) {
    ASSIGN_OR_RETURN(state, OpenState(record, durability, *description));
  }
  ModuleMemory::Reservation reserved;
  ASSIGN_OR_RETURN(std::unique_ptr<ModuleInstance> instance,
                   MakeInstance(record, std::move(description), reserved));
  reserved.Join(std::move(of_state));
  std::optional<SavedChange> saved;
  if (state != nullptr) {
    absl::StatusOr<ModuleState::Loaded> loaded = state->Load(*instance);
    if (!loaded.ok()) return StateRefused(loaded.status());
    if (!loaded->damage.ok()) {
      deps_.metrics.Recovered(StateFound::kDamaged);
      WarnOfState("module_state_ignored", loaded->damage, "look at the disk's health");
    }
    saved = std::move(loaded->change);
    if (saved.has_value()) deps_.metrics.Recovered(StateFound::kLoaded);
  }
  if (saved.has_value()) {
    if (record.owner_epoch == 0) record.owner_epoch = saved->owner_epoch;
    if (record.owner_epoch < saved->owner_epoch) {
      return ModuleTaken(record.name, saved->owner_epoch, record.owner_epoch);
    }
    record.history_epoch = saved->history_epoch;
  }
  return std::make_shared<RegisteredModule>(std::move(record), std::move(instance),
                                            std::move(reserved), std::move(state),
                                            std::move(saved));
}

absl::Status ModuleCalls::Register(ModuleCall& call) {
  v1::RegisterModuleRequest request;
  RETURN_IF_ERROR(ReadRequest(call.stream, request));
  RETURN_IF_ERROR(CheckNotDraining());
  RETURN_IF_ERROR(CheckName(request.name()));
  RETURN_IF_ERROR(CheckDurability(request.durability()));
  ASSIGN_OR_RETURN(const absl::Duration ttl, DecodeTtl(request.ttl_ms()));
  ASSIGN_OR_RETURN(std::shared_ptr<const ModuleDescription> description,
                   Describe(request, call.stream));
  const absl::StatusOr<ModuleLimits> limits = DecodeModuleLimits(request.limits());
  if (!limits.ok()) return Classified(limits.status());
  if (absl::Status status = deps_.engine.Supports(description->graph); !status.ok()) {
    return OfEngine(std::move(status));
  }
  ModuleRecord record;
  record.caller = call.caller;
  record.name = request.name();
  record.owner_epoch = record.history_epoch = request.owner_epoch();
  record.limits = *limits;
  v1::RegisterModuleRequest same;  // what a second registration must repeat
  *same.mutable_layout() = EncodeModuleLayout(description->graph.layout());
  record.layout_digest = DigestOf(same.layout());
  *same.mutable_optimizer() = EncodeOptimizer(description->optimizer);
  record.state_digest = DigestOf(same);
  *same.mutable_limits() = request.limits();
  same.set_durability(request.durability());
  record.digest = DigestOf(same);

  v1::RegisterModuleResponse response;
  if (request.dry_run()) {
    ASSIGN_OR_RETURN(const EnginePlan plan, PlanWithin(*description, *limits, call.caller));
    RETURN_IF_ERROR(CheckStaging(description->graph, *limits, deps_.admission.limits()));
    *response.mutable_plan() = EncodePlan(plan, deps_.engine, *limits);
    v1::ModuleStatus& status = *response.mutable_status();
    status.set_name(request.name());
    status.set_layout_digest(record.layout_digest);
    SetBytes(plan, plan.bytes(), deps_.engine.Name(), status);
    for (std::string& device : NamesOf(plan)) status.add_device(std::move(device));
    return Reply(call.stream, response);
  }
  const ModuleTable::Registration wanted = {.caller = call.caller,
                                            .name = request.name(),
                                            .digest = record.digest,
                                            .owner_epoch = request.owner_epoch(),
                                            .ttl = ttl,
                                            .wait = call.wait};
  ASSIGN_OR_RETURN(
      const Module module, deps_.table.Register(wanted, [&](uint64_t id) -> absl::StatusOr<Module> {
        RETURN_IF_ERROR(CheckStaging(description->graph, *limits, deps_.admission.limits()));
        record.id = id;
        return MakeModule(std::move(record), request.durability(), std::move(description));
      }));
  response.set_token(deps_.table.TokenOf(*module));
  *response.mutable_status() = module->Status();
  response.set_carry_streams(kCarryStreams);
  response.set_whole_bytes(kWholeBytes);
  *response.mutable_plan() = module->record().plan;
  return Reply(call.stream, response);
}

absl::Status ModuleCalls::GetModule(ModuleCall& call) {
  v1::GetModuleRequest request;
  RETURN_IF_ERROR(ReadRequest(call.stream, request));
  ASSIGN_OR_RETURN(const Module module, request.name().empty()
                                            ? deps_.table.Find(request.token(), call.caller)
                                            : deps_.table.FindByName(call.caller, request.name()));
  v1::GetModuleResponse response;
  response.set_token(deps_.table.TokenOf(*module));
  *response.mutable_status() = module->Status();
  *response.mutable_layout() = EncodeModuleLayout(module->description().graph.layout());
  *response.mutable_optimizer() = EncodeOptimizer(module->description().optimizer);
  *response.mutable_plan() = module->record().plan;
  return Reply(call.stream, response);
}

absl::Status ModuleCalls::ListModules(ModuleCall& call) {
  v1::ListModulesRequest request;
  RETURN_IF_ERROR(ReadRequest(call.stream, request));
  v1::ListModulesResponse response;
  for (const Module& module : deps_.table.Of(call.caller)) {
    *response.add_module() = module->Status();
  }
  return Reply(call.stream, response);
}

absl::Status ModuleCalls::Renew(ModuleCall& call) {
  v1::RenewModuleRequest request;
  RETURN_IF_ERROR(ReadRequest(call.stream, request));
  ASSIGN_OR_RETURN(const absl::Duration ttl, DecodeTtl(request.ttl_ms()));
  ASSIGN_OR_RETURN(const Module module, deps_.table.Find(request.token(), call.caller));
  if (request.ttl_ms() > 0) module->Touch(deps_.table.clock().Now(), ttl);
  v1::RenewModuleResponse response;
  *response.mutable_status() = module->Status();
  return Reply(call.stream, response);
}

absl::Status ModuleCalls::Release(ModuleCall& call) {
  v1::ReleaseModuleRequest request;
  RETURN_IF_ERROR(ReadRequest(call.stream, request));
  RETURN_IF_ERROR(deps_.table.Release(request.token(), call.caller));
  return Reply(call.stream, v1::ReleaseModuleResponse());
}

}  // namespace attnd
