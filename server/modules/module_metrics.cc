#include "server/modules/module_metrics.h"

#include <string>

namespace attnd {
namespace {

constexpr std::array<absl::string_view, kModuleMethods> kMethodNames = {
    "Register", "GetModule",     "ListModules", "Renew",      "Release",   "Forward",
    "Backward", "GradientStats", "Step",        "PutTensors", "GetTensors"};
constexpr std::array<const char*, 2> kDirections = {"forward", "backward"};
constexpr std::array<const char*, kModuleStages> kStages = {"queue", "compute"};
constexpr std::array<const char*, kStepOutcomes> kOutcomes = {"applied", "skipped", "replayed",
                                                              "refused"};

const prometheus::Histogram::BucketBoundaries& Buckets() {
  static const prometheus::Histogram::BucketBoundaries buckets = {
      1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10, 30, 100};
  return buckets;
}

prometheus::Labels CallLabels(int method, absl::StatusCode code) {
  const std::string name = absl::StatusCodeToString(code);
  return {{"method", std::string(kMethodNames[method])}, {"code", name.empty() ? "UNKNOWN" : name}};
}

}  // namespace

absl::string_view ModuleMethodName(ModuleMethod method) {
  return kMethodNames[static_cast<size_t>(method)];
}

ModuleMetrics::ModuleMetrics(prometheus::Registry& registry, const std::string& device)
    : calls_(prometheus::BuildCounter()
                 .Name("attnd_module_calls_total")
                 .Help("Calls of the service Modules that ended.")
                 .Register(registry)) {
  auto counters = [&](const char* name, const char* help) -> auto& {
    return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
  };
  for (int method = 0; method < kModuleMethods; ++method) {
    good_calls_[method] = &calls_.Add(CallLabels(method, absl::StatusCode::kOk));
  }
  auto& durations = prometheus::BuildHistogram()
                        .Name("attnd_module_duration_seconds")
                        .Help("Time of Forward and Backward of modules, by stage.")
                        .Register(registry);
  auto& rows = counters("attnd_module_rows_total", "Rows that went through modules.");
  for (int direction = 0; direction < 2; ++direction) {
    rows_[direction] = &rows.Add({{"direction", kDirections[direction]}});
    for (int stage = 0; stage < kModuleStages; ++stage) {
      durations_[direction][stage] = &durations.Add(
          {{"device", device}, {"direction", kDirections[direction]}, {"stage", kStages[stage]}},
          Buckets());
    }
  }
  auto& steps = counters("attnd_steps_total", "Steps of modules, by what became of them.");
  for (int outcome = 0; outcome < kStepOutcomes; ++outcome) {
    steps_[outcome] = &steps.Add({{"result", kOutcomes[outcome]}});
  }
  auto& flops = counters("attnd_module_flops_total", "Work of modules' linear ops, in FLOP.");
  for (int direction = 0; direction < 2; ++direction) {
    flops_[direction] = &flops.Add({{"device", device}, {"direction", kDirections[direction]}});
  }
  auto& saves = counters("attnd_module_saves_total", "Saves of what outlives the process.");
  saves_ = {&saves.Add({{"result", "ok"}}), &saves.Add({{"result", "failed"}})};
  saved_bytes_ =
      &counters("attnd_module_saved_bytes_total", "Bytes of saves that succeeded.").Add({});
  auto& recoveries = counters("attnd_state_recoveries_total",
                              "States that registrations found, by what became of them.");
  recoveries_ = {&recoveries.Add({{"result", "loaded"}}), &recoveries.Add({{"result", "damaged"}})};
  replays_ = &counters("attnd_backward_replays_total",
                       "Backwards of micro-batches that had been added before.")
                  .Add({});
  recomputed_layers_ = &counters("attnd_recomputed_layers_total",
                                 "Layers whose activations a Backward computed again.")
                            .Add({{"device", device}});
}

// Errors have a series from their first on: 176 that nobody reads would be a seventh of a scrape.
void ModuleMetrics::CallFinished(ModuleMethod method, const absl::Status& status) {
  const int number = static_cast<int>(method);
  if (status.ok()) {
    good_calls_[number]->Increment();
  } else {
    calls_.Add(CallLabels(number, status.code())).Increment();
  }
}

void ModuleMetrics::Computed(bool is_forward, int64_t rows, absl::Duration queued,
                             absl::Duration took) {
  const int direction = is_forward ? 0 : 1;
  rows_[direction]->Increment(static_cast<double>(rows));
  durations_[direction][static_cast<size_t>(ModuleStage::kQueue)]->Observe(
      absl::ToDoubleSeconds(queued));
  durations_[direction][static_cast<size_t>(ModuleStage::kCompute)]->Observe(
      absl::ToDoubleSeconds(took));
}

void ModuleMetrics::Saved(bool ok, int64_t bytes) {
  saves_[ok ? 0 : 1]->Increment();
  if (ok) saved_bytes_->Increment(static_cast<double>(bytes));
}

void ModuleMetrics::Stepped(StepOutcome outcome) {
  steps_[static_cast<size_t>(outcome)]->Increment();
}

}  // namespace attnd
