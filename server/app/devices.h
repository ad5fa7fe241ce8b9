// Devices: the engines at work, each with its name, cost model and worker.
//
//   named and metered → checked (staging memory page-locked, a known answer) → workers → watched
//
// Threads: one builds and destroys it; LoseDevice runs on a worker's or the watch's thread; the
// readings any.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/log.h"
#include "kernels/backend.h"
#include "kernels/device.h"
#include "modules/module_engine.h"
#include "server/admission/admission.h"
#include "server/admission/cost_model.h"
#include "server/admission/staging_pool.h"
#include "server/app/gpu_watch.h"
#include "server/keep/lease_table.h"
#include "server/metrics/metrics.h"
#include "server/schedule/device_worker.h"
#include "server/schedule/metered_backend.h"

namespace attnd {

class Devices {
 public:
  struct Served {
    Served(std::string device_name, Device device)
        : name(std::move(device_name)),
          engine(std::move(device.attention)),
          make_modules(std::move(device.make_modules)),
          cost(engine->info().flops_per_second) {}
    bool has_own_memory() const { return engine->Use().memory_total_bytes > 0; }
    const std::string name;  // "gpu0", "cpu"
    std::unique_ptr<Backend> engine;
    const Device::MakeModules make_modules;
    std::unique_ptr<MeteredBackend> backend;
    CostModel cost;
  };

  // At least one. `metrics` and `log` outlive it.
  Devices(std::vector<Device> devices, Metrics& metrics, Logger& log);

  // Page-locks the staging memory once, for all GPUs, and asks each engine for a known answer.
  absl::Status Check(StagingPool& staging);
  // `on_lost(number)` runs once for each device that fails for good, after its calls are fenced
  // off.
  void StartWorkers(const DeviceWorkerOptions& options, const Clock& clock, LeaseTable& leases,
                    MapTable& maps,
                    std::function<void(int device, const absl::Status& status)> on_lost);
  // Hears of GPUs' errors by NVIDIA's management library, where that is installed.
  void StartGpuWatch(const std::string& nvml_library);
  void StopGpuWatch() { gpu_watch_.reset(); }
  // Answers what is left and ends the workers; the watch has stopped.
  void StopWorkers() { workers_.Stop(); }

  int size() const { return static_cast<int>(devices_.size()); }
  const Served& operator[](int number) const { return devices_[number]; }
  Backend& first_engine() { return *devices_.front().engine; }
  std::vector<const Backend*> engines() const;
  std::vector<std::string> names() const;
  // Modules on all devices, by one engine. Null: some device has none.
  std::unique_ptr<ModuleEngine> MakeModuleEngine(
      const std::function<HoldDeviceMemory(int device)>& hold_on) const;
  std::vector<AdmissionDevice> for_admission();
  Workers& workers() { return workers_; }
  const Workers& workers() const { return workers_; }
  bool any_lost() const { return lost_ > 0; }
  bool all_lost() const { return lost_ == size(); }

  // Samples each engine's memory and streams, at each scrape.
  void Sample(SampledMetrics& sampled) const;

 private:
  void PlaceStaging(StagingPool& staging);
  static void SampleMemory(const Served& device, SampledMetrics& sampled);
  static void SampleStreams(const Served& device, SampledMetrics& sampled);

  Metrics& metrics_;
  Logger& log_;
  std::deque<Served> devices_;
  std::atomic<int> lost_{0};
  Workers workers_;
  std::unique_ptr<GpuWatch> gpu_watch_;  // tells the workers
};

}  // namespace attnd
