#include "client/cli/bench/bench_command.h"

#include <deque>
#include <iostream>
#include <memory>
#include <optional>

#include "CLI/CLI.hpp"
#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/status_macros.h"
#include "client/cli/bench/interrupt.h"
#include "client/cli/bench/module_bench.h"
#include "client/cli/bench_report.h"
#include "client/cli/json_text.h"
#include "client/cli/load_generator.h"
#include "client/cli/problem_flags.h"
#include "client/cli/progress_bar.h"

namespace attnd {
namespace {

struct BenchFlags {
  ProblemFlags options;
  SizeFlags sizes;
  ModuleBenchFlags module;
  std::string mask;  // empty: none
  std::string direction = "fwd";
  std::string concurrency_range = "1";
  double request_rate = 0;
  std::string distribution = "poisson";
  int max_outstanding = 64;
  double duration_seconds = 5, warmup_seconds = 1;
  std::string export_path;
};

// "a", "a:b" or "a:b:step".
absl::StatusOr<std::vector<int>> ParseRange(const std::string& text) {
  ASSIGN_OR_RETURN(const std::vector<int64_t> numbers,
                   ParseNumbers("--concurrency-range", text, ':'));
  if (numbers.size() > 3 || (numbers.size() > 1 && numbers[1] < numbers[0]) || numbers[0] > 1024 ||
      (numbers.size() > 1 && numbers[1] > 1024)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--concurrency-range: expected START[:END[:STEP]] up to 1024, got ", text));
  }
  int64_t end = numbers.size() > 1 ? numbers[1] : numbers[0];
  int64_t step = numbers.size() > 2 ? numbers[2] : 1;
  std::vector<int> levels;
  for (int64_t n = numbers[0]; n <= end; n += step) levels.push_back(static_cast<int>(n));
  return levels;
}

absl::StatusOr<std::vector<Load>> MakeLoads(const BenchFlags& flags) {
  Load load{.poisson = flags.distribution == "poisson",
            .forward = flags.direction != "bwd",
            .backward = flags.direction != "fwd",
            .warmup = absl::Seconds(flags.warmup_seconds),
            .duration = absl::Seconds(flags.duration_seconds)};
  if (flags.request_rate > 0) {
    load.requests_per_second = flags.request_rate;
    load.callers = flags.max_outstanding;
    return std::vector<Load>{load};
  }
  ASSIGN_OR_RETURN(std::vector<int> levels, ParseRange(flags.concurrency_range));
  std::vector<Load> loads;
  for (int callers : levels) {
    load.callers = callers;
    loads.push_back(load);
  }
  return loads;
}

// An engine of a GPU may lack float32.
ElementType ElementOf(const ServerInfo& server) {
  return absl::c_linear_search(server.features, "float32") ? ElementType::kFloat32
                                                           : ElementType::kFloat16;
}

absl::Status Show(const BenchReport& report, bool json, bool color, const std::string& path) {
  if (!path.empty()) RETURN_IF_ERROR(report.Write(path));
  if (json) {
    std::cout << JsonText(report.ToJson()) << "\n";
  } else {
    report.PrintTable(std::cout, color);
  }
  return absl::OkStatus();
}

// The rows so far. Any thread.
struct SharedReport {
  absl::Mutex mutex;
  std::optional<BenchReport> report ABSL_GUARDED_BY(mutex);
};

// Ctrl-C shows the rows that are finished.
void ShowOnInterrupt(const Session& session, const BenchFlags& flags,
                     const std::shared_ptr<SharedReport>& shared) {
  OnInterrupt([shared, json = session.json(), color = session.color(), path = flags.export_path] {
    absl::MutexLock lock(&shared->mutex);
    if (!shared->report.has_value()) return;
    std::cerr << "\n";
    const absl::Status status = Show(*shared->report, json, color, path);
    if (!status.ok()) std::cerr << "attnctl: " << status.message() << "\n";
  });
}

// Each load with the problem and, beside one with a mask, without it: in turns, so that both see
// the same machine.
absl::Status Measure(Session& session, const BenchFlags& flags, Problem problem,
                     const std::vector<Load>& loads, SharedReport& shared) {
  ASSIGN_OR_RETURN(std::unique_ptr<AttentionClient> client, session.Connect());
  ASSIGN_OR_RETURN(ServerInfo server, client->GetServerInfo());
  if (!flags.sizes.has_dtype()) problem.element = ElementOf(server);
  std::vector<Problem> problems = {problem};
  if (problem.mask != nullptr) {
    problems.insert(problems.begin(), problem);
    problems.front().mask = nullptr;
  }
  {
    absl::MutexLock lock(&shared.mutex);
    shared.report.emplace(problem, flags.mask, server);
  }
  std::deque<LoadGenerator> generators;
  for (const Problem& p : problems) generators.emplace_back(*client, p);
  ProgressBar bar("measuring", static_cast<int64_t>(loads.size()), session.shows_progress());
  for (size_t n = 0; n < loads.size(); ++n) {
    bar.Show(static_cast<int64_t>(n));
    for (size_t k = 0; k < problems.size(); ++k) {
      ASSIGN_OR_RETURN(LoadResult result, generators[k].Run(loads[n]));
      absl::MutexLock lock(&shared.mutex);
      shared.report->Add(loads[n], result, problems[k]);
    }
  }
  return absl::OkStatus();
}

void RunBench(Session& session, const BenchFlags& flags) {
  absl::StatusOr<Problem> problem = flags.sizes.MakeProblem(flags.options);
  if (!problem.ok()) return session.FailUsage(problem.status());
  if (!flags.module.module.empty()) {
    const absl::Status done =
        BenchModule(session, flags.module, problem->element, absl::Seconds(flags.warmup_seconds),
                    absl::Seconds(flags.duration_seconds));
    return done.ok() ? void() : session.Fail(done);
  }
  if (!flags.mask.empty()) {
    const absl::Status status = ApplyMask("--mask", flags.mask, *problem);
    if (!status.ok()) return session.FailUsage(status);
  }
  absl::StatusOr<std::vector<Load>> loads = MakeLoads(flags);
  if (!loads.ok()) return session.FailUsage(loads.status());
  auto shared = std::make_shared<SharedReport>();  // shared with the thread that Ctrl-C wakes
  ShowOnInterrupt(session, flags, shared);
  absl::Status status = Measure(session, flags, *problem, *loads, *shared);
  if (!status.ok()) return session.Fail(status);
  absl::MutexLock lock(&shared->mutex);
  status = Show(*shared->report, session.json(), session.color(), flags.export_path);
  if (!status.ok()) return session.Fail(status);
  if (shared->report->has_errors()) session.Exit(kExitFailed);
}

std::string CheckExportPath(const std::string& path) {
  if (absl::EndsWith(path, ".json") || absl::EndsWith(path, ".csv")) return "";
  return absl::StrCat("expected a name that ends in .json or .csv, got ", path);
}

// Adds the flags of modules, besides --dtype, --duration and --warmup.
void AddModuleFlags(CLI::App& command, ModuleBenchFlags& flags) {
  CLI::Option* module =
      command.add_option("--module", flags.module,
                         "a training step of a stack of layers whose weights stay "
                         "on the daemon, instead of attention");
  module->check(CLI::IsMember(BenchedModules()));
  command.add_option("--rows", flags.rows, "BATCH,LENGTH of a step; the model's if left out")
      ->needs(module);
  command.add_option("--layers", flags.layers, "of the module; the model's if left out")
      ->check(CLI::Range(1, 512))
      ->needs(module);
  for (const char* other :
       {"--shape", "--mask", "--concurrency-range", "--request-rate", "--export"}) {
    module->excludes(command.get_option(other));
  }
}

void AddLoadFlags(CLI::App& command, BenchFlags& flags) {
  command
      .add_option("--concurrency-range", flags.concurrency_range,
                  "callers of a closed loop, START[:END[:STEP]]")
      ->capture_default_str();
  command
      .add_option("--request-rate", flags.request_rate,
                  "calls a second of an open loop, instead of a closed one")
      ->check(CLI::Range(0.001, 1e6));
  command.add_option("--request-distribution", flags.distribution, "poisson or constant arrivals")
      ->check(CLI::IsMember({"poisson", "constant"}))
      ->capture_default_str();
  command
      .add_option("--max-outstanding", flags.max_outstanding,
                  "most calls at a time of an open loop")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command.add_option("--duration", flags.duration_seconds, "seconds to measure, at each load")
      ->check(CLI::Range(0.001, 86400.0))
      ->capture_default_str();
  command.add_option("--warmup", flags.warmup_seconds, "seconds before that")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  command.add_option("--export", flags.export_path, "write a .json or .csv file too")
      ->check(&CheckExportPath, "FILE");
}

}  // namespace

void AddBenchCommand(CLI::App& app, Session& session) {
  auto flags = std::make_shared<BenchFlags>();  // shared with the callback, which outlives this
  CLI::App* command = app.add_subcommand("bench", "Measure latency and throughput");
  flags->sizes.AddTo(*command);
  command->add_option("--direction", flags->direction, "fwd, bwd or both")
      ->check(CLI::IsMember({"fwd", "bwd", "both"}))
      ->capture_default_str();
  command->add_option("--mask", flags->mask,
                      "a mask by description, measured beside no mask; attnctl mask --help lists "
                      "how it is spelled");
  AddLoadFlags(*command, *flags);
  AddModuleFlags(*command, flags->module);
  flags->options.AddTo(*command);
  command->footer(
      "Latency is that of whole calls, transfer and queue included. An open loop counts from when "
      "a\n"
      "call was due. Exit code 4 when calls failed; Ctrl-C prints the finished rows, exit code "
      "130.\n\nExamples:\n"
      "  attnctl bench --shape 2,8,2048,64 --causal --direction both\n"
      "  attnctl bench --shape 1,8,4096,64 --mask 'longformer(64,64)'\n"
      "  attnctl bench --concurrency-range 1:16:5 --dtype bfloat16 --export bench.csv\n"
      "  attnctl bench --module bert-base --rows 4,512\n"
      "  attnctl bench --request-rate 200 --duration 30 -o json");
  command->callback([&session, flags] { RunBench(session, *flags); });
}

}  // namespace attnd
