#include "client/cli/info_command.h"

#include <iostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/json_text.h"
#include "client/cli/printable.h"
#include "client/cli/table.h"

namespace attnd {
namespace {

using Json = nlohmann::ordered_json;

Json InfoToJson(const ServerInfo& info, Health health) {
  Json devices = Json::array();
  for (const DeviceInfo& d : info.devices) {
    devices.push_back({{"name", d.name},
                       {"uuid", d.uuid},
                       {"backend", d.backend},
                       {"architecture", d.architecture},
                       {"memory_bytes", d.memory_bytes},
                       {"serving", d.serving},
                       {"threads", d.threads}});
  }
  return {{"address", info.address},
          {"serving", health == Health::kServing},
          {"version", info.version},
          {"boot_epoch", info.boot_epoch},
          {"max_message_bytes", info.max_message_bytes},
          {"features", info.features},
          {"devices", devices}};
}

void PrintText(const ServerInfo& info, Health health, bool color) {
  bool serving = health == Health::kServing;
  std::cout << Colored(info.address, Color::kBold, color) << "  attnd " << Printable(info.version)
            << "  "
            << Colored(serving ? "SERVING" : "NOT SERVING", serving ? Color::kGreen : Color::kRed,
                       color)
            << "\n  largest message " << BytesText(static_cast<double>(info.max_message_bytes))
            << ", features: " << Printable(absl::StrJoin(info.features, " ")) << "\n\n";
  Table table({"backend", "device", "architecture", "threads", "memory", "state"});
  for (const DeviceInfo& d : info.devices) {
    table.Add({d.backend, d.name, d.architecture, absl::StrCat(d.threads),
               BytesText(static_cast<double>(d.memory_bytes)),
               d.serving ? Cell("serving", Color::kGreen) : Cell("not serving", Color::kRed)});
  }
  table.Print(std::cout, color);
}

void RunInfo(Session& session) {
  auto client = session.Connect();
  if (!client.ok()) return session.Fail(client.status());
  Json all = Json::array();
  for (int n = 0; n < static_cast<int>((*client)->options().addresses.size()); ++n) {
    absl::StatusOr<ServerInfo> info = (*client)->GetServerInfo(n);
    if (!info.ok()) {
      session.Fail(info.status(), (*client)->options().addresses[n]);
      continue;
    }
    // A server without the health service would not be attnd: not serving.
    Health health = (*client)->CheckHealth(n).value_or(Health::kNotServing);
    if (health != Health::kServing && session.exit_code() == 0) session.Exit(kExitNo);
    if (session.json()) {
      all.push_back(InfoToJson(*info, health));
    } else {
      PrintText(*info, health, session.color());
    }
  }
  if (session.json()) std::cout << JsonText(all) << "\n";
}

void RunHealth(Session& session) {
  auto client = session.Connect();
  if (!client.ok()) return session.Fail(client.status());
  Json all = Json::array();
  for (int n = 0; n < static_cast<int>((*client)->options().addresses.size()); ++n) {
    const std::string& address = (*client)->options().addresses[n];
    absl::StatusOr<Health> health = (*client)->CheckHealth(n);
    if (!health.ok()) {
      session.Fail(health.status(), address);
      continue;
    }
    bool serving = *health == Health::kServing;
    if (!serving && session.exit_code() == 0) session.Exit(kExitNo);
    all.push_back({{"address", address}, {"serving", serving}});
    if (!session.json()) std::cout << address << (serving ? " SERVING\n" : " NOT_SERVING\n");
  }
  if (session.json()) std::cout << JsonText(all) << "\n";
}

}  // namespace

void AddInfoCommand(CLI::App& app, Session& session) {
  CLI::App* command = app.add_subcommand("info", "What the daemon is, can do and refuses");
  command->footer(
      "Exit code 1 when it is reachable but not serving.\n\nExample:\n"
      "  attnctl --address unix:/run/attnd.sock info");
  command->callback([&session] { RunInfo(session); });
}

void AddHealthCommand(CLI::App& app, Session& session) {
  CLI::App* command =
      app.add_subcommand("health", "Whether the daemon takes calls: exit code 0 or 1, for probes");
  command->callback([&session] { RunHealth(session); });
}

}  // namespace attnd
