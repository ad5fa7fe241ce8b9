#include "client/cli/bench/estimate_command.h"

#include <iostream>
#include <memory>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/cli/bench/module_bench.h"
#include "client/cli/bench/step_probe.h"
#include "client/cli/json_text.h"
#include "client/cli/problem_flags.h"
#include "client/cli/table.h"

namespace attnd {
namespace {

// Calls carry this share of a link, measured at 10 Gbit/s (docs/PERFORMANCE.md).
constexpr double kLinkShare = 0.92;

struct EstimateFlags {
  ProblemFlags options;
  SizeFlags sizes;
  ModuleBenchFlags module;
  double link_gbit = 0;  // 0: not given; the daemon is asked
  double round_trip_us = 100, remote_tflops = 70, local_tflops = 0;  // 0: not given
  bool no_leases = false;
  bool is_measured() const { return link_gbit == 0; }
};

// Forward and backward of one step, in seconds. Attention is cut into calls that use both ways of a
// link at a time, so the fuller one counts; a module's calls use them in turn, so both do. Transfer
// and compute are taken not to overlap.
struct EstimatedStep {
  StepWork work;
  StepRates rates;
  double transfer, compute, latency, local;
  double Remote() const { return transfer + compute + latency; }
};

EstimatedStep StepOf(const StepWork& work, const StepRates& rates, const EstimateFlags& flags) {
  EstimatedStep step;
  step.work = work;
  step.rates = rates;
  step.transfer = step.work.bytes * rates.seconds_per_byte;
  step.compute = step.work.flops * rates.seconds_per_flop;
  step.latency = 2 * rates.round_trip;
  step.local = flags.local_tflops > 0 ? step.work.flops / (flags.local_tflops * 1e12) : 0;
  return step;
}

StepRates AssumedRates(const EstimateFlags& flags) {
  return {.round_trip = flags.round_trip_us * 1e-6,
          .seconds_per_byte = 8 / (kLinkShare * flags.link_gbit * 1e9),
          .seconds_per_flop = 1 / (flags.remote_tflops * 1e12)};
}

absl::StatusOr<StepRates> RatesOf(Session& session, const Problem& p, const EstimateFlags& flags) {
  if (!flags.is_measured()) return AssumedRates(flags);
  ASSIGN_OR_RETURN(std::unique_ptr<AttentionClient> client, session.Connect());
  return ProbeStep(*client, p, !flags.no_leases);
}

// The length from which sending pays off: bytes grow with it, work with its square. 0: at no
// length, or not of this form.
double LengthThatPays(const Problem& p, const EstimatedStep& step) {
  const bool is_square = p.q_len == p.kv_len && p.window_left < 0 && p.window_right < 0;
  if (!is_square || step.local <= step.compute) return 0;
  return static_cast<double>(p.MaxQueryLength()) * step.transfer / (step.local - step.compute);
}

// Returns how many are done in a second; 0 where one took no time that could be told.
double PerSecond(double seconds_of_one) { return seconds_of_one > 0 ? 1 / seconds_of_one : 0; }

nlohmann::ordered_json ToJson(const EstimatedStep& step, double length) {
  nlohmann::ordered_json json = {{"bytes", step.work.bytes},
                                 {"flops", step.work.flops},
                                 {"bytes_per_second", PerSecond(step.rates.seconds_per_byte)},
                                 {"flops_per_second", PerSecond(step.rates.seconds_per_flop)},
                                 {"transfer_seconds", step.transfer},
                                 {"compute_seconds", step.compute},
                                 {"latency_seconds", step.latency},
                                 {"remote_seconds", step.Remote()}};
  if (step.work.device_bytes > 0) json["device_bytes"] = step.work.device_bytes;
  if (step.local > 0) {
    json["local_seconds"] = step.local;
    json["gain"] = step.local / step.Remote();
  }
  if (length > 0) json["pays_off_from_length"] = length;
  return json;
}

// Rates are the daemon's and the link's as measured, or those that the flags assume.
void AddRates(const EstimatedStep& step, const EstimateFlags& flags, Table& table) {
  const char* how = flags.is_measured() ? "measured" : "assumed";
  table.Add({absl::StrCat("calls carry, ", how),
             absl::StrCat(BytesText(PerSecond(step.rates.seconds_per_byte)), "/s")});
  table.Add({absl::StrCat("the engine reaches, ", how),
             FlopsText(PerSecond(step.rates.seconds_per_flop))});
  table.Add({absl::StrCat("the smallest call, ", how), SecondsText(step.rates.round_trip)});
  if (flags.local_tflops > 0) {
    table.Add({"this worker reaches, assumed", FlopsText(flags.local_tflops * 1e12)});
  }
}

// "faster: 3.9 times" or "slower: 12 times".
std::string GainText(double gain) {
  return gain >= 1 ? absl::StrCat("faster: ", NumberText(gain), " times")
                   : absl::StrCat("slower: ", NumberText(1 / gain), " times");
}

void Print(const EstimatedStep& step, double length, const EstimateFlags& flags, bool color) {
  Table table({"a training step", ""});
  AddRates(step, flags, table);
  const bool is_module = step.work.device_bytes > 0;
  table.Add({is_module ? "bytes, both ways" : "bytes on the fuller way",
             BytesText(step.work.bytes)});
  if (is_module) table.Add({"memory on the device", BytesText(step.work.device_bytes)});
  table.Add({"transfer", SecondsText(step.transfer)});
  table.Add({"compute", SecondsText(step.compute)});
  table.Add({"round trips", SecondsText(step.latency)});
  table.Add({"remote", SecondsText(step.Remote())});
  if (step.local > 0) {
    const double gain = step.local / step.Remote();
    table.Add({"local", SecondsText(step.local)});
    table.Add({"sending is", Cell(GainText(gain), gain > 1 ? Color::kGreen : Color::kRed)});
  }
  if (length > 0) table.Add({"pays off from length", NumberText(length)});
  table.Print(std::cout, color);
}

void Tell(const EstimatedStep& step, double length, Session& session, const EstimateFlags& flags) {
  if (session.json()) {
    std::cout << JsonText(ToJson(step, length)) << "\n";
  } else {
    Print(step, length, flags, session.color());
  }
}

void EstimateModule(Session& session, const EstimateFlags& flags) {
  const absl::StatusOr<StepWork> work = WorkOfModule(flags.module, ElementType::kFloat16);
  if (!work.ok()) return session.FailUsage(work.status());
  Tell(StepOf(*work, AssumedRates(flags), flags), 0, session, flags);
}

void RunEstimate(Session& session, const EstimateFlags& flags) {
  if (!flags.module.module.empty()) return EstimateModule(session, flags);
  absl::StatusOr<Problem> problem = flags.sizes.MakeProblem(flags.options);
  if (!problem.ok()) return session.FailUsage(problem.status());
  if (!flags.sizes.has_dtype()) problem->element = ElementType::kFloat16;
  const absl::StatusOr<StepRates> rates = RatesOf(session, *problem, flags);
  if (!rates.ok()) return session.Fail(rates.status());
  const EstimatedStep step = StepOf(WorkOf(*problem, !flags.no_leases), *rates, flags);
  Tell(step, LengthThatPays(*problem, step), session, flags);
}

void AddEstimatedModule(CLI::App& command, CLI::Option* link, ModuleBenchFlags& flags) {
  CLI::Option* module =
      command.add_option("--module", flags.module,
                         "a stack of layers on the daemon, in float16, instead of attention");
  module->check(CLI::IsMember(BenchedModules()))->needs(link);
  command.add_option("--rows", flags.rows, "BATCH,LENGTH of a step; the model's if left out")
      ->needs(module);
  command.add_option("--layers", flags.layers, "of the module; the model's if left out")
      ->check(CLI::Range(1, 512))
      ->needs(module);
  for (const char* other : {"--shape", "--no-leases"}) {
    module->excludes(command.get_option(other));
  }
}

}  // namespace

void AddEstimateCommand(CLI::App& app, Session& session) {
  auto flags = std::make_shared<EstimateFlags>();  // shared with the callback, which outlives this
  CLI::App* command =
      app.add_subcommand("estimate", "Whether sending a training step's work pays off");
  flags->sizes.AddTo(*command);
  const CLI::Range rates(1e-6, 1e6);
  CLI::Option* link = command->add_option("--link-gbit", flags->link_gbit,
                                          "the link's rate each way, in Gbit/s; without it the "
                                          "daemon is asked, and link and engine are measured");
  link->check(rates);
  command->add_option("--round-trip-us", flags->round_trip_us, "of the smallest call")
      ->needs(link)
      ->check(CLI::Range(0.0, 1e7))
      ->capture_default_str();
  command->add_option("--remote-tflops", flags->remote_tflops, "what the daemon's engine reaches")
      ->needs(link)
      ->check(rates)
      ->capture_default_str();
  command->add_option("--local-tflops", flags->local_tflops, "what the worker reaches itself")
      ->check(rates);
  command->add_flag("--no-leases", flags->no_leases, "backward sends every tensor again");
  AddEstimatedModule(*command, link, flags->module);
  flags->options.AddTo(*command);
  command->footer(
      "Elements are float16 unless --dtype says otherwise; 70 TFLOP/s is a V100's rate as "
      "simulated.\nA live daemon is measured by steps of a part of the problem, for a few "
      "seconds.\n\nExamples:\n"
      "  attnctl --address gpu7:7070 estimate --shape 8,16,2048,64 --local-tflops 1.4\n"
      "  attnctl estimate --shape 8,16,2048,64 --link-gbit 10 --local-tflops 1.4\n"
      "  attnctl estimate --module bert-base --rows 32,512 --link-gbit 10 --local-tflops 1.4\n"
      "  attnctl estimate --shape 1,8,16384,64 --causal --link-gbit 1 -o json");
  command->callback([&session, flags] { RunEstimate(session, *flags); });
}

}  // namespace attnd
