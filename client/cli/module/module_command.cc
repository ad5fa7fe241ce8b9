#include "client/cli/module/module_command.h"

#include <google/protobuf/util/json_util.h>

#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "attention/element.h"
#include "base/safetensors.h"
#include "base/status_macros.h"
#include "base/whole_file.h"
#include "client/cli/json_text.h"
#include "client/cli/module/segment_plan.h"
#include "client/cli/table.h"
#include "client/modules/module_client.h"
#include "modules/known_layers.h"
#include "proto/attnd/v1/module_codec.h"

namespace attnd {
namespace {

using Json = nlohmann::ordered_json;

std::string Bytes(uint64_t bytes) { return BytesText(static_cast<double>(bytes)); }

std::string TimeLeft(const v1::ModuleStatus& module) {
  const absl::Time end = absl::FromUnixMillis(static_cast<int64_t>(module.expires_unix_ms()));
  return SecondsText(absl::ToDoubleSeconds(end - absl::Now()));
}

std::string DevicesOf(const v1::ModuleStatus& module) {
  return absl::StrJoin(module.device(), "+");
}

Json ToJson(const v1::ModuleStatus& module) {
  return {{"name", module.name()},
          {"sequence", module.sequence()},
          {"durable_sequence", module.durable_sequence()},
          {"optimizer_step", module.optimizer_step()},
          {"weights_complete", module.weights_complete()},
          {"expires_unix_ms", module.expires_unix_ms()},
          {"devices", module.device()},
          {"device_bytes", module.hbm_bytes()},
          {"host_bytes", module.host_bytes()}};
}

// Those of all daemons; one that does not answer is reported, and the others' are listed.
absl::Status List(Session& session) {
  ASSIGN_OR_RETURN(std::unique_ptr<AttentionClient> client, session.Connect());
  Connections& connections = client->core().connections;
  Json all = Json::array();
  Table table({"module", "daemon", "sequence", "durable", "steps", "weights", "on", "device",
               "host", "expires in"});
  for (int address = 0; address < connections.address_count(); ++address) {
    const std::string daemon = connections.target(address);
    absl::StatusOr<v1::ListModulesResponse> found = ModuleClient(*client, address).List();
    if (!found.ok()) {
      session.Fail(found.status(), connections.address_count() > 1 ? daemon : "");
      continue;
    }
    for (const v1::ModuleStatus& module : found->module()) {
      all.push_back(ToJson(module));
      all.back()["address"] = daemon;
      table.Add({module.name(), daemon, absl::StrCat(module.sequence()),
                 absl::StrCat(module.durable_sequence()), absl::StrCat(module.optimizer_step()),
                 module.weights_complete() ? "complete" : "incomplete", DevicesOf(module),
                 Bytes(module.hbm_bytes()), Bytes(module.host_bytes()), TimeLeft(module)});
    }
  }
  if (session.exit_code() != 0 && all.empty()) return absl::OkStatus();
  if (session.json()) {
    std::cout << JsonText(all) << "\n";
  } else {
    table.Print(std::cout, session.color());
  }
  return absl::OkStatus();
}

// A module of this name and the daemon's address that has it.
struct FoundModule {
  ModuleClient daemon;
  v1::GetModuleResponse module;
};

// NOT_FOUND where each daemon says so; else what one says that does not answer.
absl::StatusOr<FoundModule> Find(const AttentionClient& client, const std::string& name) {
  absl::Status why;
  for (int address = 0; address < client.core().connections.address_count(); ++address) {
    ModuleClient daemon(client, address);
    absl::StatusOr<v1::GetModuleResponse> found = daemon.Get(name);
    if (found.ok()) return FoundModule{daemon, *std::move(found)};
    if (why.ok() || !absl::IsFailedPrecondition(found.status())) why = found.status();
  }
  if (!absl::IsFailedPrecondition(why)) return why;
  return absl::NotFoundError(absl::StrCat(
      "expected the name of a module of this caller, which attnctl module list shows, got ", name));
}

// JSON where it begins with a brace, else the message's own encoding.
absl::StatusOr<v1::RegisterModuleRequest> ReadRequest(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string bytes, ReadWholeFile(path));
  v1::RegisterModuleRequest request;
  const bool parsed = !bytes.empty() && bytes.front() == '{'
                          ? google::protobuf::util::JsonStringToMessage(bytes, &request).ok()
                          : request.ParseFromString(bytes);
  if (parsed) return request;
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": expected an attnd.v1.RegisterModuleRequest, serialized or as JSON"));
}

absl::Status Plan(Session& session, v1::RegisterModuleRequest request) {
  request.set_dry_run(true);
  ASSIGN_OR_RETURN(std::unique_ptr<AttentionClient> client, session.Connect());
  ASSIGN_OR_RETURN(ModuleRegistration answer, ModuleClient(*client).Register(request));
  const v1::Plan& plan = answer.reply.plan();
  const std::pair<const char*, uint64_t> parts[] = {{"weights", plan.weight_bytes()},
                                                    {"optimizer", plan.optimizer_bytes()},
                                                    {"activations", plan.activation_bytes()},
                                                    {"workspace", plan.workspace_bytes()}};
  Json json = {{"engine", plan.engine()},
               {"devices", answer.reply.status().device()},
               {"layer_device", plan.layer_device()},
               {"recompute", v1::Recompute_Name(plan.recompute())}};
  Table table({"memory", "bytes"});
  for (const auto& [name, bytes] : parts) {
    json[absl::StrCat(name, "_bytes")] = bytes;
    table.Add({name, Bytes(bytes)});
  }
  if (session.json()) {
    std::cout << JsonText(json) << "\n";
    return absl::OkStatus();
  }
  std::cout << "engine " << plan.engine() << " on " << DevicesOf(answer.reply.status()) << ", "
            << v1::Recompute_Name(plan.recompute())
            << "; a forward of the most rows: " << NumberText(plan.forward_flops()) << " FLOP\n";
  table.Print(std::cout, session.color());
  return absl::OkStatus();
}

const char* KindName(v1::TensorKind kind) {
  switch (kind) {
    case v1::TENSOR_KIND_MOMENT1:
      return "moment1/";
    case v1::TENSOR_KIND_MOMENT2:
      return "moment2/";
    case v1::TENSOR_KIND_MOMENT2_MAX:
      return "moment2_max/";
    default:
      return "weight/";
  }
}

// As the daemon's own files name them.
std::string FileOf(const v1::ModuleStatus& status, const std::vector<SentTensor>& tensors) {
  std::map<std::string, StoredTensor> stored;
  for (const auto& [header, bytes] : tensors) {
    const std::string name = KindName(header.kind()) + header.name();
    stored[name] = {.dtype = std::string(DtypeName(static_cast<ElementType>(header.element()))),
                    .shape = {header.shape().begin(), header.shape().end()},
                    .data = {reinterpret_cast<const std::byte*>(bytes->data()), bytes->size()}};
  }
  return SerializeSafetensors(stored, {{"module", status.name()},
                                       {"sequence", absl::StrCat(status.sequence())},
                                       {"optimizer_step", absl::StrCat(status.optimizer_step())}});
}

// Whole or not at all.
absl::Status WriteFile(const std::string& path, const std::string& bytes) {
  const std::string part = path + ".part";
  absl::Status written = WriteWholeFile(part, bytes);
  std::error_code failed;
  if (written.ok()) std::filesystem::rename(part, path, failed);
  if (failed) {
    written = absl::NotFoundError(absl::StrCat("cannot write ", path, ": ", failed.message()));
  }
  if (!written.ok()) std::filesystem::remove(part, failed);
  return written;
}

absl::Status Save(Session& session, const std::string& name, const std::string& path) {
  ASSIGN_OR_RETURN(std::unique_ptr<AttentionClient> client, session.Connect());
  ASSIGN_OR_RETURN(auto place, Find(*client, name));
  auto& [daemon, found] = place;
  ASSIGN_OR_RETURN(const std::vector<SentTensor> tensors, daemon.Fetch(found.token()));
  const std::string bytes = FileOf(found.status(), tensors);
  RETURN_IF_ERROR(WriteFile(path, bytes));
  if (session.json()) {
    Json json = ToJson(found.status());
    json["out"] = path;
    json["tensors"] = tensors.size();
    json["bytes"] = bytes.size();
    std::cout << JsonText(json) << "\n";
  } else {
    std::cout << tensors.size() << " tensors of sequence " << found.status().sequence() << ", "
              << Bytes(bytes.size()) << ", in " << path << "\n";
  }
  return absl::OkStatus();
}

absl::Status Release(Session& session, const std::string& name) {
  ASSIGN_OR_RETURN(std::unique_ptr<AttentionClient> client, session.Connect());
  ASSIGN_OR_RETURN(auto place, Find(*client, name));
  auto& [daemon, found] = place;
  RETURN_IF_ERROR(daemon.Release(found.token()));
  if (session.json()) {
    std::cout << JsonText(ToJson(found.status())) << "\n";
  } else {
    std::cout << "released " << name << " at sequence " << found.status().sequence() << "\n";
  }
  return absl::OkStatus();
}

struct PlanFlags {
  std::string of;
  SegmentPlanFlags segments;
};

// Segments where rows are told, or a model's name; else memory, as a daemon says it.
absl::Status PlanSegmentsOrMemory(Session& session, PlanFlags flags) {
  if (const KnownModel* model = KnownModelNamed(flags.of)) {
    if (flags.segments.rows.empty()) flags.segments.rows = absl::StrCat(model->length);
    LayerSizes sizes = model->sizes;
    sizes.element = ElementType::kFloat16;
    return PrintSegmentPlan(session, model->layers(sizes), flags.segments);
  }
  ASSIGN_OR_RETURN(v1::RegisterModuleRequest request, ReadRequest(flags.of));
  if (flags.segments.rows.empty()) return Plan(session, std::move(request));
  ASSIGN_OR_RETURN(ModuleLayout layout, DecodeModuleLayout(request.layout()));
  return PrintSegmentPlan(session, std::move(layout), flags.segments);
}

void AddPlan(CLI::App& command, Session& session) {
  CLI::App* plan = command.add_subcommand(
      "plan", "What a module would take, and how its layers would run; registers nothing");
  auto flags = std::make_shared<PlanFlags>();  // shared with the callback, which outlives this
  std::vector<std::string> names;
  for (const KnownModel& model : KnownModels()) names.push_back(model.name);
  plan->add_option("FILE|MODEL", flags->of,
                   "an attnd.v1.RegisterModuleRequest, serialized or as JSON, whose memory the "
                   "daemon plans; or " +
                       absl::StrJoin(names, ", "))
      ->required();
  plan->add_option("--rows", flags->segments.rows,
                   "of calls, as in 512,4096: shows which ops run as one kernel, without a "
                   "daemon. A model's length if left out");
  plan->add_option("--gpu", flags->segments.gpu, "whose data sheet bounds times, with --rows")
      ->capture_default_str();
  plan->callback([&session, flags] {
    absl::Status status = PlanSegmentsOrMemory(session, *flags);
    if (status.ok()) return;
    const bool is_flag = absl::StartsWith(status.message(), "--");
    is_flag ? session.FailUsage(status) : session.Fail(status);
  });
}

void AddSave(CLI::App& command, Session& session) {
  struct Flags {
    std::string name, path;
  };
  auto flags = std::make_shared<Flags>();  // shared with the callback, which outlives this
  CLI::App* save = command.add_subcommand("save", "Weights and moments to a safetensors file");
  save->add_option("NAME", flags->name, "the module's")->required();
  save->add_option("FILE", flags->path, "replaced once it is whole")->required();
  save->callback([&session, flags] {
    absl::Status status = Save(session, flags->name, flags->path);
    if (!status.ok()) session.Fail(status);
  });
}

void AddRelease(CLI::App& command, Session& session) {
  auto name = std::make_shared<std::string>();
  CLI::App* release = command.add_subcommand("release", "Give a module's memory back; it is gone");
  release->add_option("NAME", *name, "the module's")->required();
  release->callback([&session, name] {
    absl::Status status = Release(session, *name);
    if (!status.ok()) session.Fail(status);
  });
}

}  // namespace

void AddModuleCommand(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("module", "Modules whose weights stay on the daemon");
  command->require_subcommand(1);
  CLI::App* list =
      command->add_subcommand("list", "The caller's own at all addresses, and what they hold");
  list->callback([&session] {
    absl::Status status = List(session);
    if (!status.ok()) session.Fail(status);
  });
  AddPlan(*command, session);
  AddSave(*command, session);
  AddRelease(*command, session);
  command->footer(
      "Examples:\n  attnctl module list\n  attnctl module plan bert-base --rows 512,4096\n  "
      "attnctl module save run-17 run-17.safetensors");
}

}  // namespace attnd
