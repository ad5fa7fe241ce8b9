#include "client/cli/module/module_command.h"

#include <google/protobuf/util/json_util.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "client/cli/json_text.h"
#include "client/cli/table.h"
#include "client/modules/module_client.h"

namespace attnd {
namespace {

using Json = nlohmann::ordered_json;

std::string Bytes(uint64_t bytes) { return BytesText(static_cast<double>(bytes)); }

std::string TimeLeft(const v1::ModuleStatus& module) {
  const absl::Time end = absl::FromUnixMillis(static_cast<int64_t>(module.expires_unix_ms()));
  return SecondsText(absl::ToDoubleSeconds(end - absl::Now()));
}

Json ToJson(const v1::ModuleStatus& module) {
  return {{"name", module.name()},
          {"sequence", module.sequence()},
          {"durable_sequence", module.durable_sequence()},
          {"optimizer_step", module.optimizer_step()},
          {"weights_complete", module.weights_complete()},
          {"expires_unix_ms", module.expires_unix_ms()},
          {"device_bytes", module.hbm_bytes()},
          {"host_bytes", module.host_bytes()}};
}

absl::Status List(Session& session) {
  ASSIGN_OR_RETURN(std::unique_ptr<AttentionClient> client, session.Connect());
  ASSIGN_OR_RETURN(v1::ListModulesResponse found, ModuleClient(*client).List());
  Json all = Json::array();
  Table table(
      {"module", "sequence", "durable", "steps", "weights", "device", "host", "expires in"});
  for (const v1::ModuleStatus& module : found.module()) {
    all.push_back(ToJson(module));
    table.Add({module.name(), absl::StrCat(module.sequence()),
               absl::StrCat(module.durable_sequence()), absl::StrCat(module.optimizer_step()),
               module.weights_complete() ? "complete" : "incomplete", Bytes(module.hbm_bytes()),
               Bytes(module.host_bytes()), TimeLeft(module)});
  }
  if (session.json()) {
    std::cout << JsonText(all) << "\n";
  } else {
    table.Print(std::cout, session.color());
  }
  return absl::OkStatus();
}

// JSON where it begins with a brace, else the message's own encoding.
absl::StatusOr<v1::RegisterModuleRequest> ReadRequest(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  v1::RegisterModuleRequest request;
  const bool parsed = !bytes.empty() && bytes.front() == '{'
                          ? google::protobuf::util::JsonStringToMessage(bytes, &request).ok()
                          : request.ParseFromString(bytes);
  if (parsed) return request;
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": expected an attnd.v1.RegisterModuleRequest, serialized or as JSON"));
}

absl::Status Plan(Session& session, const std::string& path) {
  ASSIGN_OR_RETURN(v1::RegisterModuleRequest request, ReadRequest(path));
  request.set_dry_run(true);
  ASSIGN_OR_RETURN(std::unique_ptr<AttentionClient> client, session.Connect());
  ASSIGN_OR_RETURN(RegisteredModule answer, ModuleClient(*client).Register(request));
  const v1::Plan& plan = answer.reply.plan();
  const std::pair<const char*, uint64_t> parts[] = {{"weights", plan.weight_bytes()},
                                                    {"optimizer", plan.optimizer_bytes()},
                                                    {"activations", plan.activation_bytes()},
                                                    {"workspace", plan.workspace_bytes()}};
  Json json = {{"engine", plan.engine()}, {"recompute", v1::Recompute_Name(plan.recompute())}};
  Table table({"memory", "bytes"});
  for (const auto& [name, bytes] : parts) {
    json[absl::StrCat(name, "_bytes")] = bytes;
    table.Add({name, Bytes(bytes)});
  }
  if (session.json()) {
    std::cout << JsonText(json) << "\n";
    return absl::OkStatus();
  }
  std::cout << "engine " << plan.engine() << ", " << v1::Recompute_Name(plan.recompute())
            << "; a forward of the most rows: " << NumberText(plan.forward_flops()) << " FLOP\n";
  table.Print(std::cout, session.color());
  return absl::OkStatus();
}

}  // namespace

void AddModuleCommand(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("module", "Modules whose weights stay on the daemon");
  command->require_subcommand(1);
  CLI::App* list = command->add_subcommand("list", "The caller's own, and what they hold");
  list->callback([&session] {
    absl::Status status = List(session);
    if (!status.ok()) session.Fail(status);
  });
  CLI::App* plan = command->add_subcommand("plan", "What a module would take; registers nothing");
  auto path = std::make_shared<std::string>();
  plan->add_option("FILE", *path, "an attnd.v1.RegisterModuleRequest, serialized or as JSON")
      ->required();
  plan->callback([&session, path] {
    absl::Status status = Plan(session, *path);
    if (!status.ok()) session.Fail(status);
  });
  command->footer("Example:\n  attnctl module list");
}

}  // namespace attnd
