// Workers: the DeviceWorkers of all devices, behind what a call needs of them.
// Filled at the start; any thread from then on.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "server/device_worker.h"

namespace attnd {

class Workers {
 public:
  // In the order of Admission's devices.
  void Add(std::unique_ptr<DeviceWorker> worker) { workers_.push_back(std::move(worker)); }
  // Answers what is left. Nothing is submitted or cancelled from then on.
  void Stop() { workers_.clear(); }

  void Submit(AdmittedCall call) {
    DeviceWorker& worker = *workers_[call.device()];
    worker.Submit(std::move(call));
  }
  void Lose(int device, const absl::Status& status) { workers_[device]->Lose(status); }
  // Wherever it is; no effect on a call that has been answered.
  void Cancel(uint64_t id, StopCause cause) {
    for (const auto& worker : workers_) worker->Cancel(id, cause);
  }

 private:
  std::vector<std::unique_ptr<DeviceWorker>> workers_;
};

}  // namespace attnd
