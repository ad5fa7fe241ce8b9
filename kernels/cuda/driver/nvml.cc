#include "kernels/cuda/driver/nvml.h"

#include <dlfcn.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/cuda/driver/symbols.h"

namespace attnd {
namespace {

// Values of nvml.h.
constexpr unsigned long long kXidCriticalError = 8;  // nvmlEventTypeXidCriticalError
constexpr int kInsufficientSize = 7;                 // NVML_ERROR_INSUFFICIENT_SIZE
constexpr int kTimeout = 10;                         // NVML_ERROR_TIMEOUT

}  // namespace

absl::StatusOr<std::unique_ptr<Nvml>> Nvml::Load(const std::string& name) {
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("no NVML: ", dlerror()));
  }
  auto nvml = std::unique_ptr<Nvml>(new Nvml());
  Symbols symbols(library);
  // The function has the same form in each.
  auto find_newest = [&](auto& function, std::initializer_list<const char*> names) {
    for (const char* symbol : names) {
      if (symbols.Has(symbol)) return symbols.Find(function, symbol);
    }
    symbols.Find(function, *names.begin());
  };
  Functions& f = nvml->functions_;
  symbols.Find(f.init, "nvmlInit_v2");
  symbols.Find(f.shutdown, "nvmlShutdown");
  symbols.Find(f.error_string, "nvmlErrorString");
  symbols.Find(f.device_by_pci_bus_id, "nvmlDeviceGetHandleByPciBusId_v2");
  symbols.Find(f.device_count, "nvmlDeviceGetCount_v2");
  symbols.Find(f.device_by_index, "nvmlDeviceGetHandleByIndex_v2");
  symbols.Find(f.device_by_uuid, "nvmlDeviceGetHandleByUUID");
  symbols.Find(f.device_uuid, "nvmlDeviceGetUUID");
  symbols.Find(f.utilisation, "nvmlDeviceGetUtilizationRates");
  find_newest(f.compute_processes, {"nvmlDeviceGetComputeRunningProcesses_v3",
                                    "nvmlDeviceGetComputeRunningProcesses_v2"});
  symbols.Find(f.event_set_create, "nvmlEventSetCreate");
  symbols.Find(f.event_set_free, "nvmlEventSetFree");
  symbols.Find(f.register_events, "nvmlDeviceRegisterEvents");
  symbols.Find(f.event_set_wait, "nvmlEventSetWait_v2");
  if (!symbols.missing().empty()) {
    return absl::FailedPreconditionError(absl::StrCat(name, " lacks ", symbols.missing()));
  }
  RETURN_IF_ERROR(nvml->Check(f.init(), "nvmlInit"));
  nvml->initialised_ = true;
  return nvml;
}

Nvml::~Nvml() {
  if (initialised_) functions_.shutdown();
}

absl::Status Nvml::Check(Result result, const char* call) const {
  if (result == 0) return absl::OkStatus();
  const char* text = functions_.error_string(result);
  return absl::InternalError(
      absl::StrCat(call, ": nvmlReturn ", result, text ? absl::StrCat(" (", text, ")") : ""));
}

absl::StatusOr<std::vector<std::string>> Nvml::Uuids() const {
  const Functions& f = functions_;
  unsigned count = 0;
  RETURN_IF_ERROR(Check(f.device_count(&count), "nvmlDeviceGetCount"));
  std::vector<std::string> uuids;
  for (unsigned index = 0; index < count; ++index) {
    Device device = nullptr;
    char text[128] = {};
    RETURN_IF_ERROR(Check(f.device_by_index(index, &device), "nvmlDeviceGetHandleByIndex"));
    RETURN_IF_ERROR(Check(f.device_uuid(device, text, sizeof(text)), "nvmlDeviceGetUUID"));
    uuids.push_back(text);
  }
  return uuids;
}

absl::StatusOr<GpuUse> Nvml::Use(const std::string& uuid) const {
  const Functions& f = functions_;
  Device device = nullptr;
  RETURN_IF_ERROR(Check(f.device_by_uuid(uuid.c_str(), &device), "nvmlDeviceGetHandleByUUID"));
  Utilisation utilisation = {};
  RETURN_IF_ERROR(Check(f.utilisation(device, &utilisation), "nvmlDeviceGetUtilizationRates"));
  GpuUse use = {.utilisation_percent = static_cast<int>(utilisation.gpu), .process_ids = {}};
  // Between two calls there may be more of them.
  std::vector<ProcessInfo> processes(64);
  auto count = static_cast<unsigned>(processes.size());
  Result result = f.compute_processes(device, &count, processes.data());
  while (result == kInsufficientSize) {
    processes.resize(count + 16);
    count = static_cast<unsigned>(processes.size());
    result = f.compute_processes(device, &count, processes.data());
  }
  RETURN_IF_ERROR(Check(result, "nvmlDeviceGetComputeRunningProcesses"));
  for (unsigned n = 0; n < count; ++n) use.process_ids.push_back(processes[n].process_id);
  return use;
}

bool IsFatalXid(uint64_t xid) {
  constexpr uint64_t kOfPrograms[] = {13, 31, 43, 45, 68, 92, 94, 109};
  return std::find(std::begin(kOfPrograms), std::end(kOfPrograms), xid) == std::end(kOfPrograms);
}

absl::StatusOr<std::unique_ptr<XidEvents>> Nvml::ListenForXids(
    const std::vector<std::string>& pci_bus_ids) const {
  auto events = std::unique_ptr<XidEvents>(new XidEvents(*this));
  RETURN_IF_ERROR(Check(functions_.event_set_create(&events->set_), "nvmlEventSetCreate"));
  for (const std::string& id : pci_bus_ids) {
    Device device = nullptr;
    RETURN_IF_ERROR(Check(functions_.device_by_pci_bus_id(id.c_str(), &device),
                          "nvmlDeviceGetHandleByPciBusId"));
    RETURN_IF_ERROR(Check(functions_.register_events(device, kXidCriticalError, events->set_),
                          "nvmlDeviceRegisterEvents"));
    events->devices_[device] = id;
  }
  return events;
}

XidEvents::~XidEvents() {
  if (set_ != nullptr) nvml_.functions_.event_set_free(set_);
}

absl::StatusOr<std::optional<XidEvent>> XidEvents::Wait(absl::Duration time) {
  Nvml::EventData data = {};
  const Nvml::Result result = nvml_.functions_.event_set_wait(
      set_, &data, static_cast<unsigned>(absl::ToInt64Milliseconds(time)));
  if (result == kTimeout) return std::nullopt;
  RETURN_IF_ERROR(nvml_.Check(result, "nvmlEventSetWait"));
  auto device = devices_.find(data.device);
  if (data.type != kXidCriticalError || device == devices_.end()) return std::nullopt;
  return XidEvent{device->second, data.data};
}

}  // namespace attnd
