// GpuWatch: a thread that listens to NVIDIA's management library for errors of the GPUs in use that
// no CUDA call may ever tell: a GPU that fell off its bus or lost its memory while it was idle is
// found at once, and not by the next caller. Optional: without the library it is not started.
// `on_fatal` runs on the thread, once for each device at most.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/driver/nvml.h"

namespace attnd {

class GpuWatch {
 public:
  using OnFatal = std::function<void(int device, const absl::Status& status)>;

  // `pci_bus_ids` by the devices' numbers; empty: no GPU. Errors: those of Nvml.
  static absl::StatusOr<std::unique_ptr<GpuWatch>> Start(
      const std::string& nvml_library, const std::vector<std::string>& pci_bus_ids,
      OnFatal on_fatal);
  ~GpuWatch();

 private:
  GpuWatch() = default;
  void Listen(const std::vector<std::string>& pci_bus_ids, const OnFatal& on_fatal);

  std::unique_ptr<Nvml> nvml_;
  std::unique_ptr<XidEvents> events_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace attnd
