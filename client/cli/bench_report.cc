#include "client/cli/bench_report.h"

#include <sys/utsname.h>

#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "attention/cost.h"
#include "attention/mask_plans.h"
#include "attention/problem_text.h"
#include "base/cpu_quota.h"
#include "base/version.h"
#include "base/whole_file.h"
#include "client/cli/json_text.h"
#include "client/cli/table.h"

namespace attnd {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kPercentiles[] = {50, 90, 95, 99, 99.9};

const char* NameOf(Direction direction) {
  return direction == Direction::kForward ? "forward" : "backward";
}

std::string LoadText(const Load& load) {
  if (load.requests_per_second > 0) {
    return absl::StrCat(load.requests_per_second, "/s ", load.poisson ? "poisson" : "constant");
  }
  return absl::StrCat(load.callers, load.callers == 1 ? " caller" : " callers");
}

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    size_t colon = line.find(": ");
    if (absl::StartsWith(line, "model name") && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

Json Environment(const ServerInfo& server) {
  utsname system = {};
  uname(&system);
  Json devices = Json::array();
  for (const DeviceInfo& d : server.devices) {
    devices.push_back(absl::StrCat(d.backend, " ", d.name, " ", d.architecture));
  }
  return {{"attnctl", VersionString()},
          {"server", server.version},
          {"address", server.address},
          {"devices", devices},
          {"cpu", CpuName()},
          {"cpus", AvailableCpus()},
          {"system", absl::StrCat(system.sysname, " ", system.release)},
          {"time", absl::FormatTime(absl::RFC3339_sec, absl::Now(), absl::UTCTimeZone())}};
}

}  // namespace

void BenchReport::Add(const Load& load, const LoadResult& result, const Problem& problem) {
  const auto add = [&](Direction direction, const Measured& measured) {
    rows_.push_back(
        {direction, load, measured, problem.mask != nullptr, Flops(problem, direction)});
  };
  if (load.forward) add(Direction::kForward, result.forward);
  if (load.backward) add(Direction::kBackward, result.backward);
}

bool BenchReport::has_errors() const {
  for (const BenchRow& row : rows_) {
    if (!row.measured.errors.empty() || row.measured.latencies.empty()) return true;
  }
  return false;
}

double BenchReport::SentPerSecond(const BenchRow& row) const {
  return row.measured.RequestsPerSecond() *
         static_cast<double>(row.measured.last_receipt.bytes_sent);
}
double BenchReport::ReceivedPerSecond(const BenchRow& row) const {
  return row.measured.RequestsPerSecond() *
         static_cast<double>(row.measured.last_receipt.bytes_received);
}
double BenchReport::FlopsPerSecond(const BenchRow& row) const {
  return row.measured.RequestsPerSecond() * row.flops;
}

double BenchReport::VisibleShare() const {
  MaskPlans plans;
  const auto plan = plans.Get(p_, HostMaskOptions());
  if (!plan.ok()) return 1;
  return static_cast<double>(TotalsOf(**plan, p_).visible) /
         (static_cast<double>(p_.batch * p_.q_heads) *
          static_cast<double>(p_.MaxQueryLength() * p_.MaxKeyLength()));
}

// Each row with the mask beside the one without.
void BenchReport::PrintGains(std::ostream& out) const {
  for (const BenchRow& dense : rows_) {
    for (const BenchRow& row : rows_) {
      if (dense.has_mask || !row.has_mask || row.direction != dense.direction ||
          row.load.callers != dense.load.callers || row.measured.latencies.empty()) {
        continue;
      }
      out << NameOf(row.direction) << ", " << LoadText(row.load) << ": "
          << NumberText(dense.measured.Percentile(50) / row.measured.Percentile(50))
          << " times as fast as without the mask, by p50\n";
    }
  }
}

void BenchReport::PrintTable(std::ostream& out, bool color) const {
  out << ProblemText(p_) << "\n";
  if (!mask_.empty()) {
    out << "mask " << mask_ << ": " << NumberText(100 * VisibleShare())
        << " % of the scores are visible, " << NumberText(100 * p_.mask_share)
        << " % lie in tiles of " << kHostMaskTile.rows << " x " << kHostMaskTile.keys
        << " that hold one\n";
  }
  out << "\n";
  Table table({"direction", "mask", "load", "calls/s", "p50", "p90", "p95", "p99", "p99.9",
               "sent/s", "received/s", "compute", "errors"});
  for (const BenchRow& row : rows_) {
    std::vector<Cell> cells = {NameOf(row.direction), row.has_mask ? "yes" : "no",
                               LoadText(row.load), NumberText(row.measured.RequestsPerSecond())};
    for (double percent : kPercentiles) {
      cells.push_back(SecondsText(row.measured.Percentile(percent)));
    }
    cells.push_back(BytesText(SentPerSecond(row)));
    cells.push_back(BytesText(ReceivedPerSecond(row)));
    cells.push_back(FlopsText(FlopsPerSecond(row)));
    int errors = ErrorCount(row.measured.errors);
    cells.push_back(Cell(absl::StrCat(errors), errors == 0 ? Color::kNone : Color::kRed));
    table.Add(std::move(cells));
  }
  table.Print(out, color);
  PrintGains(out);
  for (const BenchRow& row : rows_) {
    if (row.measured.errors.empty()) continue;
    out << NameOf(row.direction) << ", " << LoadText(row.load) << ": "
        << absl::StrJoin(row.measured.errors, ", ", absl::PairFormatter(" ")) << "\n";
  }
}

Json BenchReport::RowJson(const BenchRow& row) const {
  const Measured& m = row.measured;
  Json latency;
  for (double percent : kPercentiles) {
    latency[absl::StrCat("p", percent)] = m.Percentile(percent);
  }
  latency["max"] = m.latencies.empty() ? 0 : m.latencies.back();
  Json stages = Json::object();
  for (const CallReceipt::Stage& stage : m.last_receipt.stages) {
    stages[stage.name] = absl::ToDoubleSeconds(stage.total);
  }
  return {{"direction", NameOf(row.direction)},
          {"mask", row.has_mask},
          {"callers", row.load.callers},
          {"requests_per_second_offered", row.load.requests_per_second},
          {"arrivals", row.load.requests_per_second == 0 ? "closed"
                       : row.load.poisson                ? "poisson"
                                                         : "constant"},
          {"calls", m.latencies.size()},
          {"seconds", m.seconds},
          {"calls_per_second", m.RequestsPerSecond()},
          {"latency_seconds", latency},
          {"sent_bytes_per_second", SentPerSecond(row)},
          {"received_bytes_per_second", ReceivedPerSecond(row)},
          {"flops_per_second", FlopsPerSecond(row)},
          {"errors", m.errors},
          {"last_receipt",
           {{"backend", m.last_receipt.backend},
            {"kernel", m.last_receipt.kernel},
            {"shards", m.last_receipt.shards},
            {"retries", m.last_receipt.retries},
            {"bytes_sent", m.last_receipt.bytes_sent},
            {"bytes_received", m.last_receipt.bytes_received},
            {"bytes_copied_before_sending", m.last_receipt.bytes_copied},
            {"stage_seconds", stages}}}};
}

Json BenchReport::ToJson() const {
  Json rows = Json::array();
  for (const BenchRow& row : rows_) rows.push_back(RowJson(row));
  Json report = {{"environment", Environment(server_)}, {"problem", ProblemText(p_)}};
  if (!mask_.empty()) {
    report["mask"] = {
        {"spelling", mask_}, {"visible_share", VisibleShare()}, {"visited_share", p_.mask_share}};
  }
  report["rows"] = rows;
  return report;
}

std::string BenchReport::ToCsv() const {
  std::string csv =
      "direction,mask,callers,offered_per_second,calls,calls_per_second,p50_s,p90_s,p95_s,p99_s,"
      "p99.9_s,"
      "sent_bytes_per_second,received_bytes_per_second,flops_per_second,errors\n";
  for (const BenchRow& row : rows_) {
    absl::StrAppend(&csv, NameOf(row.direction), ",", row.has_mask, ",", row.load.callers, ",",
                    row.load.requests_per_second, ",", row.measured.latencies.size(), ",",
                    row.measured.RequestsPerSecond());
    for (double percent : kPercentiles) {
      absl::StrAppend(&csv, ",", row.measured.Percentile(percent));
    }
    absl::StrAppend(&csv, ",", SentPerSecond(row), ",", ReceivedPerSecond(row), ",",
                    FlopsPerSecond(row), ",", ErrorCount(row.measured.errors), "\n");
  }
  return csv;
}

absl::Status BenchReport::Write(const std::string& path) const {
  return WriteWholeFile(path, absl::EndsWith(path, ".csv") ? ToCsv() : JsonText(ToJson()) + "\n",
                        "--export");
}

}  // namespace attnd
