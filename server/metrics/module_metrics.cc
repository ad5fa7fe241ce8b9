#include "server/metrics/module_metrics.h"

#include <string>

#include "server/metrics/metric_list.h"

namespace attnd {
namespace {

constexpr std::array<absl::string_view, kModuleMethods> kMethodNames = {
    "Register",   "GetModule",  "ListModules",   "Renew",        "Release",
    "Forward",    "Backward",   "GradientStats", "SumGradients", "Step",
    "PutTensors", "GetTensors", "Carry"};
constexpr std::array<const char*, 2> kPasses = {"forward", "backward"};
constexpr std::array<const char*, kModuleStages> kStages = {"queue", "compute"};
constexpr std::array<const char*, kStepOutcomes> kOutcomes = {"applied", "skipped", "replayed",
                                                              "refused"};

const prometheus::Histogram::BucketBoundaries& ModuleBuckets() {
  static const prometheus::Histogram::BucketBoundaries buckets = {
      1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10, 30, 100};
  return buckets;
}

prometheus::Labels CallLabels(int method, absl::StatusCode code) {
  const std::string name = absl::StatusCodeToString(code);
  return {{"method", std::string(kMethodNames[method])}, {"code", name.empty() ? "UNKNOWN" : name}};
}

auto& Counters(prometheus::Registry& registry, const char* name) {
  return prometheus::BuildCounter().Name(name).Help(HelpOf(name)).Register(registry);
}

prometheus::Labels DeviceLabels(const std::string& device, int direction) {
  return {{"device", device}, {"direction", kPasses[direction]}};
}

prometheus::Labels StageLabels(const std::string& device, int direction, int stage) {
  return {{"device", device}, {"direction", kPasses[direction]}, {"stage", kStages[stage]}};
}

}  // namespace

absl::string_view ModuleMethodName(ModuleMethod method) {
  return kMethodNames[static_cast<size_t>(method)];
}

// Durations have series since their first: an idle daemon's would be a seventh of its scrape.
ModuleMetrics::ModuleMetrics(prometheus::Registry& registry,
                             const std::vector<std::string>& devices)
    : calls_(Counters(registry, "attnd_module_calls_total")),
      durations_(prometheus::BuildHistogram()
                     .Name("attnd_module_duration_seconds")
                     .Help(HelpOf("attnd_module_duration_seconds"))
                     .Register(registry)),
      flops_(Counters(registry, "attnd_module_flops_total")),
      recomputed_layers_(Counters(registry, "attnd_recomputed_layers_total")) {
  auto counters = [&](const char* name) -> auto& { return Counters(registry, name); };
  for (int method = 0; method < kModuleMethods; ++method) {
    good_calls_[method] = &calls_.Add(CallLabels(method, absl::StatusCode::kOk));
  }
  auto& rows = counters("attnd_module_rows_total");
  for (int direction = 0; direction < 2; ++direction) {
    rows_[direction] = &rows.Add({{"direction", kPasses[direction]}});
    for (const std::string& device : devices) {
      flops_.Add(DeviceLabels(device, direction));
    }
  }
  for (const std::string& device : devices) recomputed_layers_.Add({{"device", device}});
  auto& steps = counters("attnd_steps_total");
  for (int outcome = 0; outcome < kStepOutcomes; ++outcome) {
    steps_[outcome] = &steps.Add({{"result", kOutcomes[outcome]}});
  }
  auto& saves = counters("attnd_module_saves_total");
  saves_ = {&saves.Add({{"result", "ok"}}), &saves.Add({{"result", "failed"}})};
  saved_bytes_ = &counters("attnd_module_saved_bytes_total").Add({});
  auto& recoveries = counters("attnd_state_recoveries_total");
  recoveries_ = {&recoveries.Add({{"result", "loaded"}}), &recoveries.Add({{"result", "damaged"}})};
  replays_ = &counters("attnd_backward_replays_total").Add({});
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

void ModuleMetrics::Computed(const std::string& devices, bool is_forward, int64_t rows,
                             absl::Duration queued, absl::Duration took) {
  const int direction = is_forward ? 0 : 1;
  rows_[direction]->Increment(static_cast<double>(rows));
  const auto observe = [&](ModuleStage stage, absl::Duration time) {
    durations_.Add(StageLabels(devices, direction, static_cast<int>(stage)), ModuleBuckets())
        .Observe(absl::ToDoubleSeconds(time));
  };
  observe(ModuleStage::kQueue, queued);
  observe(ModuleStage::kCompute, took);
}

void ModuleMetrics::Worked(const std::string& device, bool is_forward, double flops) {
  flops_.Add(DeviceLabels(device, is_forward ? 0 : 1)).Increment(flops);
}

void ModuleMetrics::Recomputed(const std::string& device, int64_t layers) {
  recomputed_layers_.Add({{"device", device}}).Increment(static_cast<double>(layers));
}

void ModuleMetrics::Saved(bool ok, int64_t bytes) {
  saves_[ok ? 0 : 1]->Increment();
  if (ok) saved_bytes_->Increment(static_cast<double>(bytes));
}

void ModuleMetrics::Stepped(StepOutcome outcome) {
  steps_[static_cast<size_t>(outcome)]->Increment();
}

}  // namespace attnd
