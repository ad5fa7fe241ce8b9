// wire_bench: what the wire between here and a daemon gives, as a table or JSON, one row for each
// traffic, mode and number of connections. The flags that say whom to call are those of attnctl.
//
//     bazel build //tools/wire_bench //tools/benchmarks:null_attnd
//     bazel-bin/tools/wire_bench/wire_bench --traffic echo --connections 4,8,12
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "client/cli/json_text.h"
#include "client/cli/load_generator.h"
#include "client/cli/metrics_text.h"
#include "client/cli/progress_bar.h"
#include "client/cli/session.h"
#include "client/cli/table.h"
#include "net/process_tuning.h"
#include "tools/wire_bench/wire_bench.h"

namespace attnd {
namespace {

struct WireFlags {
  std::vector<std::string> patterns = {"echo", "forward", "backward"};
  std::vector<std::string> modes = {"unary", "stream"};
  std::vector<int> channels = {1, 4, 8, 12};
  double tensor_mib = 8;
  int depth = 2;
  bool small_calls = false;
  double duration_seconds = 2, warmup_seconds = 0.5;
  std::string metrics_url;
};

const std::map<std::string, WirePattern> kPatterns = {{"echo", WirePattern::kEcho},
                                                      {"forward", WirePattern::kForward},
                                                      {"backward", WirePattern::kBackward}};
const std::map<std::string, WireMode> kModes = {
    {"unary", WireMode::kUnary}, {"stream", WireMode::kStream}, {"memfd", WireMode::kMemfd}};

std::vector<WireLoad> LoadsOf(const WireFlags& flags) {
  std::vector<WireLoad> loads;
  for (const std::string& pattern : flags.patterns) {
    for (int channels : flags.channels) {
      for (const std::string& mode : flags.modes) {
        loads.push_back({.pattern = kPatterns.at(pattern),
                         .mode = kModes.at(mode),
                         .channels = channels,
                         .depth = flags.depth,
                         .tensor_bytes = static_cast<int64_t>(flags.tensor_mib * (1 << 20)),
                         .small_calls = flags.small_calls,
                         .warmup = absl::Seconds(flags.warmup_seconds),
                         .duration = absl::Seconds(flags.duration_seconds)});
      }
    }
  }
  return loads;
}

std::string Fixed(double value, int digits) { return absl::StrFormat("%.*f", digits, value); }

std::string Latency(const WireLatency& latency) {
  return absl::StrFormat("%.2f / %.2f", latency.p50 * 1e3, latency.p99 * 1e3);
}

void Print(const std::vector<WireRow>& rows, std::ostream& out, bool color) {
  Table table({"traffic", "mode", "channels", "up GB/s", "down GB/s", "client CPU-s/GB",
               "daemon CPU-s/GB", "copies/byte", "p50 / p99 ms", "small p50 / p99 ms", "errors"});
  for (const WireRow& row : rows) {
    auto optional = [](const std::optional<double>& value, int digits) {
      return value.has_value() ? Fixed(*value, digits) : std::string("-");
    };
    table.Add({NameOf(row.load.pattern), NameOf(row.load.mode), std::to_string(row.load.channels),
               Fixed(row.up_bytes_per_second * 1e-9, 2), Fixed(row.down_bytes_per_second * 1e-9, 2),
               Fixed(row.client_cpu_per_gb, 3), optional(row.daemon_cpu_per_gb, 3),
               optional(row.copies_per_received_byte, 3), Latency(row.bulk),
               row.small.has_value() ? Latency(*row.small) : std::string("-"),
               Cell(std::to_string(ErrorCount(row.errors)),
                    row.errors.empty() ? Color::kNone : Color::kRed)});
  }
  table.Print(out, color);
  for (const WireRow& row : rows) {
    if (row.errors.empty()) continue;
    out << NameOf(row.load.pattern) << ", " << NameOf(row.load.mode) << ", " << row.load.channels
        << ": " << absl::StrJoin(row.errors, ", ", absl::PairFormatter(" ")) << "\n";
  }
}

nlohmann::ordered_json ToJson(const WireRow& row) {
  nlohmann::ordered_json json = {{"traffic", NameOf(row.load.pattern)},
                                 {"mode", NameOf(row.load.mode)},
                                 {"channels", row.load.channels},
                                 {"depth", row.load.depth},
                                 {"tensor_bytes", row.load.tensor_bytes},
                                 {"up_bytes_per_second", row.up_bytes_per_second},
                                 {"down_bytes_per_second", row.down_bytes_per_second},
                                 {"client_cpu_seconds_per_gb", row.client_cpu_per_gb},
                                 {"p50_seconds", row.bulk.p50},
                                 {"p99_seconds", row.bulk.p99},
                                 {"errors", ErrorCount(row.errors)},
                                 {"errors_by_code", row.errors}};
  if (row.daemon_cpu_per_gb) json["daemon_cpu_seconds_per_gb"] = *row.daemon_cpu_per_gb;
  if (row.copies_per_received_byte) {
    json["copies_per_received_byte"] = *row.copies_per_received_byte;
  }
  if (row.small.has_value()) {
    json["small_p50_seconds"] = row.small->p50;
    json["small_p99_seconds"] = row.small->p99;
  }
  return json;
}

absl::Status RunWire(Session& session, const WireFlags& flags) {
  ASSIGN_OR_RETURN(ClientOptions options, session.MakeClientOptions());
  std::vector<WireLoad> loads = LoadsOf(flags);
  std::vector<WireRow> rows;
  ProgressBar bar("measuring", static_cast<int64_t>(loads.size()), session.shows_progress());
  int errors = 0;
  for (const WireLoad& load : loads) {
    bar.Show(static_cast<int64_t>(rows.size()));
    ASSIGN_OR_RETURN(WireRow row, RunWireBench(options, load, flags.metrics_url));
    errors += ErrorCount(row.errors);
    rows.push_back(std::move(row));
  }
  if (session.json()) {
    nlohmann::ordered_json json = {{"rows", nlohmann::ordered_json::array()}};
    for (const WireRow& row : rows) json["rows"].push_back(ToJson(row));
    std::cout << JsonText(json) << "\n";
  } else {
    Print(rows, std::cout, session.color());
  }
  if (errors > 0) session.Exit(kExitFailed);
  return absl::OkStatus();
}

void AddFlags(CLI::App& app, WireFlags& flags) {
  app.add_option("--traffic", flags.patterns, "echo, forward (3:1) and backward (5:3)")
      ->delimiter(',')
      ->check(CLI::IsMember({"echo", "forward", "backward"}))
      ->capture_default_str();
  app.add_option("--mode", flags.modes,
                 "unary, stream, and memfd (one copy through shared memory, over a unix socket)")
      ->delimiter(',')
      ->check(CLI::IsMember({"unary", "stream", "memfd"}))
      ->capture_default_str();
  app.add_option("--connections", flags.channels, "connections, one row for each number")
      ->delimiter(',')
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--mib", flags.tensor_mib, "MiB of one tensor")
      ->check(CLI::Range(0.001, 1024.0))
      ->capture_default_str();
  app.add_option("--depth", flags.depth, "calls in flight on each connection")
      ->check(CLI::Range(1, 16))
      ->capture_default_str();
  app.add_flag("--small-calls", flags.small_calls,
               "4 KiB calls beside it, one at a time, by the same client");
  app.add_option("--duration", flags.duration_seconds, "seconds to measure, for each row")
      ->check(CLI::Range(0.001, 86400.0))
      ->capture_default_str();
  app.add_option("--warmup", flags.warmup_seconds, "seconds before that")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  app.add_option("--metrics", flags.metrics_url,
                 "the daemon's metrics, for its CPU time and copies")
      ->envname("ATTND_METRICS")
      ->check(&CheckMetricsUrl);
}

int Main(int argc, char** argv) {
  TuneForTransport();
  CLI::App app("wire_bench: measure the wire to an attnd daemon, with next to no attention");
  app.footer(
      "CPU seconds are for 1e9 bytes up and down together, at each end. echo needs one key and "
      "hardly\nany attention; forward and backward count the engine, unless the daemon has none "
      "(null_attnd).\n\nExamples:\n"
      "  wire_bench --traffic echo --connections 4,8,12 --metrics http://127.0.0.1:9464/metrics\n"
      "  wire_bench --small-calls -o json");
  Session session(app);
  WireFlags flags;
  AddFlags(app, flags);
  CLI11_PARSE(app, argc, argv);
  absl::Status status = RunWire(session, flags);
  if (!status.ok()) session.Fail(status);
  return session.exit_code();
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) { return attnd::Main(argc, argv); }
