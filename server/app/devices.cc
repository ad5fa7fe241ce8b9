#include "server/app/devices.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "kernels/layers/pipeline/pipeline_engine.h"
#include "server/app/numa.h"
#include "server/app/startup_check.h"

namespace attnd {
namespace {

std::string NameOf(const BackendInfo& info, size_t number, size_t engines) {
  if (info.backend == "cuda") return absl::StrCat("gpu", info.ordinal);
  return engines > 1 ? absl::StrCat(info.backend, number) : info.backend;
}

double Fragmentation(const DeviceUse& use) {
  if (use.memory_free_bytes <= 0) return 0;
  return 1 - static_cast<double>(use.memory_largest_free_bytes) /
                 static_cast<double>(use.memory_free_bytes);
}

}  // namespace

Devices::Devices(std::vector<Device> devices, Metrics& metrics, Logger& log)
    : metrics_(metrics), log_(log) {
  for (Device& made : devices) {
    std::string name = NameOf(made.attention->info(), devices_.size(), devices.size());
    Served& device = devices_.emplace_back(std::move(name), std::move(made));
    const int number = metrics_.AddDevice(device.name, device.engine->info());
    device.backend = std::make_unique<MeteredBackend>(*device.engine, number, metrics_);
  }
}

absl::Status Devices::Check(StagingPool& staging) {
  PlaceStaging(staging);
  RETURN_IF_ERROR(first_engine().RegisterHost(staging.memory()));
  for (Served& device : devices_) RETURN_IF_ERROR(StartupCheck(*device.engine, device.cost));
  return absl::OkStatus();
}

// The staging memory on the memory nodes of the GPUs that read it, before its first page is
// touched.
void Devices::PlaceStaging(StagingPool& staging) {
  std::set<int> nodes;
  for (const Served& device : devices_) {
    const std::optional<int> node = NumaNodeOfPciDevice(device.engine->info().pci_bus_id);
    if (node.has_value()) nodes.insert(*node);
  }
  if (nodes.empty() || NumaNodes().size() == 1) return;
  const std::vector<int> list(nodes.begin(), nodes.end());
  const absl::Status status = PreferNumaNodes(staging.memory(), list);
  log_.Log(status.ok() ? Severity::kInfo : Severity::kWarning, "staging_numa_nodes",
           {{"nodes", absl::StrJoin(list, ",")}, {"status", status.ToString()}});
}

void Devices::StartWorkers(const DeviceWorkerOptions& options, const Clock& clock,
                           LeaseTable& leases, MapTable& maps,
                           std::function<void(int device, const absl::Status& status)> on_lost) {
  for (int n = 0; n < size(); ++n) {
    auto lost = [this, n, on_lost](const absl::Status& status) {
      on_lost(n, status);
      ++lost_;
    };
    DeviceWorkerDeps deps{*devices_[n].backend,
                          devices_[n].cost,
                          metrics_,
                          clock,
                          n,
                          &leases,
                          std::move(lost),
                          &maps};
    workers_.Add(std::make_unique<DeviceWorker>(deps, options));
  }
}

// Without the library only CUDA's own errors tell of a GPU's end.
void Devices::StartGpuWatch(const std::string& nvml_library) {
  std::vector<std::string> gpus;
  for (const Served& device : devices_) gpus.push_back(device.engine->info().pci_bus_id);
  if (std::all_of(gpus.begin(), gpus.end(), [](const auto& id) { return id.empty(); })) return;
  auto watch = GpuWatch::Start(nvml_library, gpus, [this](int device, const absl::Status& status) {
    workers_.Lose(device, status);
  });
  if (!watch.ok()) {
    return log_.Log(Severity::kInfo, "no_gpu_watch", {{"message", watch.status().message()}});
  }
  gpu_watch_ = *std::move(watch);
}

std::vector<const Backend*> Devices::engines() const {
  std::vector<const Backend*> engines;
  for (const Served& device : devices_) engines.push_back(device.engine.get());
  return engines;
}

std::vector<std::string> Devices::names() const {
  std::vector<std::string> names;
  for (const Served& device : devices_) names.push_back(device.name);
  return names;
}

std::unique_ptr<ModuleEngine> Devices::MakeModuleEngine(
    const std::function<HoldDeviceMemory(int device)>& hold_on) const {
  std::vector<PipelineDevice> parts;
  for (int n = 0; n < size(); ++n) {
    const Served& device = devices_[n];
    if (device.make_modules == nullptr) return nullptr;
    parts.push_back(
        {device.name, device.engine->info().architecture, device.make_modules(hold_on(n))});
  }
  return std::make_unique<PipelineEngine>(std::move(parts));
}

std::vector<AdmissionDevice> Devices::for_admission() {
  std::vector<AdmissionDevice> list;
  for (Served& device : devices_) list.push_back({device.backend.get(), &device.cost});
  return list;
}

void Devices::Sample(SampledMetrics& sampled) const {
  for (const Served& device : devices_) {
    if (!device.has_own_memory()) continue;
    SampleMemory(device, sampled);
    SampleStreams(device, sampled);
  }
}

// Samples what the device itself tells, for engines that have memory of their own.
void Devices::SampleMemory(const Served& device, SampledMetrics& sampled) {
  const SampledMetrics::Labels labels = {{"device", device.name}};
  const Backend& engine = *device.engine;
  auto gauge = [&](const char* name, auto field) {
    sampled.AddGauge(name, labels,
                     [&engine, field] { return static_cast<double>(engine.Use().*field); });
  };
  gauge("attnd_hbm_device_total_bytes", &DeviceUse::memory_total_bytes);
  gauge("attnd_hbm_device_used_bytes", &DeviceUse::memory_used_bytes);
  gauge("attnd_hbm_pool_reserved_bytes", &DeviceUse::memory_reserved_bytes);
  gauge("attnd_hbm_pool_largest_free_block_bytes", &DeviceUse::memory_largest_free_bytes);
  sampled.AddGauge("attnd_hbm_pool_fragmentation_ratio", labels,
                   [&engine] { return Fragmentation(engine.Use()); });
  gauge("attnd_hbm_pool_peak_used_bytes", &DeviceUse::memory_peak_bytes);
  auto part = [&](const char* purpose, int64_t DeviceUse::*field) {
    SampledMetrics::Labels with = labels;
    with["purpose"] = purpose;
    sampled.AddGauge("attnd_hbm_pool_used_bytes", with,
                     [&engine, field] { return static_cast<double>(engine.Use().*field); });
  };
  part("input", &DeviceUse::input_bytes);
  part("output", &DeviceUse::output_bytes);
  part("workspace", &DeviceUse::workspace_bytes);
  part("lease", &DeviceUse::lease_bytes);
}

void Devices::SampleStreams(const Served& device, SampledMetrics& sampled) {
  const SampledMetrics::Labels labels = {{"device", device.name}};
  const Backend& engine = *device.engine;
  auto counter = [&](const char* name, auto field) {
    sampled.AddCounter(name, labels,
                       [&engine, field] { return static_cast<double>(engine.Use().*field); });
  };
  counter("attnd_hbm_pool_allocations_total", &DeviceUse::allocations);
  counter("attnd_hbm_pool_allocation_failures_total", &DeviceUse::allocation_failures);
  counter("attnd_h2d_bytes_total", &DeviceUse::uploaded_bytes);
  counter("attnd_d2h_bytes_total", &DeviceUse::downloaded_bytes);
  auto busy = [&](const char* role, double DeviceUse::*field) {
    SampledMetrics::Labels with = labels;
    with["role"] = role;
    sampled.AddCounter("attnd_stream_busy_seconds_total", with,
                       [&engine, field] { return engine.Use().*field; });
  };
  busy("h2d", &DeviceUse::upload_seconds);
  busy("compute", &DeviceUse::kernel_seconds);
  busy("d2h", &DeviceUse::download_seconds);
}

}  // namespace attnd
