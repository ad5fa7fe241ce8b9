#include "client/cli/bench_command.h"

#include <iostream>
#include <memory>

#include "CLI/CLI.hpp"
#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "client/cli/bench_report.h"
#include "client/cli/json_text.h"
#include "client/cli/load_generator.h"
#include "client/cli/problem_flags.h"
#include "client/cli/progress_bar.h"

namespace attnd {
namespace {

struct BenchFlags {
  ProblemFlags problem;
  std::string shape = "1,8,1024,64";
  int64_t kv_heads = 0, kv_len = 0, v_head_dim = 0;
  std::string dtype;  // empty: what the daemon has
  std::string direction = "fwd";
  std::string concurrency_range = "1";
  double request_rate = 0;
  std::string distribution = "poisson";
  int max_outstanding = 64;
  double duration_seconds = 5, warmup_seconds = 1;
  std::string export_path;
};

absl::Status ParseNumbers(const std::string& flag, const std::string& text, char separator,
                          std::vector<int64_t>& numbers) {
  for (absl::string_view part : absl::StrSplit(text, separator)) {
    int64_t number;
    if (!absl::SimpleAtoi(part, &number) || number < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag, ": expected numbers above 0, got ", text));
    }
    numbers.push_back(number);
  }
  return absl::OkStatus();
}

absl::StatusOr<Problem> MakeProblem(const BenchFlags& flags) {
  std::vector<int64_t> shape;
  RETURN_IF_ERROR(ParseNumbers("--shape", flags.shape, ',', shape));
  if (shape.size() != 4) {
    return absl::InvalidArgumentError(absl::StrCat("--shape: expected B,H,N,D, got ", flags.shape));
  }
  Problem p;
  p.batch = shape[0];
  p.q_heads = shape[1];
  p.q_len = shape[2];
  p.qk_head_dim = shape[3];
  p.kv_heads = flags.kv_heads == 0 ? p.q_heads : flags.kv_heads;
  p.kv_len = flags.kv_len == 0 ? p.q_len : flags.kv_len;
  p.v_head_dim = flags.v_head_dim == 0 ? p.qk_head_dim : flags.v_head_dim;
  if (!flags.dtype.empty()) {
    ASSIGN_OR_RETURN(p.element, ParseElement(flags.dtype));
  }
  RETURN_IF_ERROR(flags.problem.Apply(p));
  if (IsPacked(p.layout)) {  // the batch's entries end to end
    for (int64_t b = 0; b <= p.batch; ++b) {
      p.cu_seqlens_q.push_back(static_cast<int32_t>(b * p.q_len));
      p.cu_seqlens_k.push_back(static_cast<int32_t>(b * p.kv_len));
    }
    p.q_len *= p.batch;
    p.kv_len *= p.batch;
  }
  RETURN_IF_ERROR(Validate(p));
  return p;
}

// "a", "a:b" or "a:b:step".
absl::StatusOr<std::vector<int>> ParseRange(const std::string& text) {
  std::vector<int64_t> numbers;
  RETURN_IF_ERROR(ParseNumbers("--concurrency-range", text, ':', numbers));
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

absl::StatusOr<BenchReport> Measure(Session& session, const BenchFlags& flags, Problem problem,
                                    const std::vector<Load>& loads) {
  ASSIGN_OR_RETURN(std::unique_ptr<AttentionClient> client, session.Connect());
  ASSIGN_OR_RETURN(ServerInfo server, client->GetServerInfo());
  if (flags.dtype.empty()) problem.element = ElementOf(server);
  BenchReport report(problem, server);
  LoadGenerator generator(*client, problem);
  ProgressBar bar("measuring", static_cast<int64_t>(loads.size()), session.shows_progress());
  for (size_t n = 0; n < loads.size(); ++n) {
    bar.Show(static_cast<int64_t>(n));
    ASSIGN_OR_RETURN(LoadResult result, generator.Run(loads[n]));
    report.Add(loads[n], result);
  }
  if (!flags.export_path.empty()) RETURN_IF_ERROR(report.Write(flags.export_path));
  return report;
}

void RunBench(Session& session, const BenchFlags& flags) {
  absl::StatusOr<Problem> problem = MakeProblem(flags);
  if (!problem.ok()) return session.FailUsage(problem.status());
  absl::StatusOr<std::vector<Load>> loads = MakeLoads(flags);
  if (!loads.ok()) return session.FailUsage(loads.status());
  absl::StatusOr<BenchReport> report = Measure(session, flags, *problem, *loads);
  if (!report.ok()) return session.Fail(report.status());
  if (session.json()) {
    std::cout << JsonText(report->ToJson()) << "\n";
  } else {
    report->PrintTable(std::cout, session.color());
  }
  if (report->has_errors()) session.Exit(kExitFailed);
}

void AddShapeFlags(CLI::App& command, BenchFlags& flags) {
  command.add_option("--shape", flags.shape, "batch, query heads, query length, head dimension")
      ->capture_default_str();
  command.add_option("--kv-heads", flags.kv_heads, "heads of K and V (as many as query heads)")
      ->check(CLI::PositiveNumber);
  command.add_option("--kv-len", flags.kv_len, "length of K and V (the query length)")
      ->check(CLI::PositiveNumber);
  command.add_option("--v-head-dim", flags.v_head_dim, "head dimension of V (that of Q)")
      ->check(CLI::PositiveNumber);
  command
      .add_option("--dtype", flags.dtype,
                  "of q, k and v (float32, or float16 where the daemon has no float32)")
      ->type_name("{float16,bfloat16,float32}");
  command.add_option("--direction", flags.direction, "fwd, bwd or both")
      ->check(CLI::IsMember({"fwd", "bwd", "both"}))
      ->capture_default_str();
}

std::string CheckExportPath(const std::string& path) {
  if (absl::EndsWith(path, ".json") || absl::EndsWith(path, ".csv")) return "";
  return absl::StrCat("expected a name that ends in .json or .csv, got ", path);
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
  AddShapeFlags(*command, *flags);
  AddLoadFlags(*command, *flags);
  flags->problem.AddTo(*command);
  command->footer(
      "Latency is that of whole calls, transfer and queue included. An open loop counts from when "
      "a\n"
      "call was due. Exit code 4 when calls failed.\n\nExamples:\n"
      "  attnctl bench --shape 2,8,2048,64 --causal --direction both\n"
      "  attnctl bench --concurrency-range 1:16:5 --dtype bfloat16 --export bench.csv\n"
      "  attnctl bench --request-rate 200 --duration 30 -o json");
  command->callback([&session, flags] { RunBench(session, *flags); });
}

}  // namespace attnd
