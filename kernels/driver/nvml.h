// Nvml: what NVIDIA's management library (libnvidia-ml.so.1, found at run time) tells beyond the
// driver API: the driver's own version, and a device's temperature, power and uncorrected memory
// errors. It is optional: without it these are simply not known.
// Errors: FAILED_PRECONDITION without the library, INTERNAL with the call's name. Any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attnd {

struct DeviceHealth {
  std::string name;
  std::string uuid;
  // Absent where the device does not tell.
  std::optional<int> temperature_celsius;
  std::optional<double> power_watts;
  std::optional<int64_t> uncorrected_ecc_errors;  // since the driver was loaded
};

class Nvml {
 public:
  static absl::StatusOr<std::unique_ptr<Nvml>> Load(
      const std::string& library = "libnvidia-ml.so.1");
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  absl::StatusOr<std::string> DriverVersion() const;  // "535.183.01"
  // `pci_bus_id` as DeviceIdentity has it.
  absl::StatusOr<DeviceHealth> Health(const std::string& pci_bus_id) const;

 private:
  using Device = struct NvmlDevice*;
  using Result = int;  // nvmlReturn_t; 0 is success
  struct Functions {
    Result (*init)();
    Result (*shutdown)();
    const char* (*error_string)(Result);
    Result (*driver_version)(char*, unsigned);
    Result (*device_by_pci_bus_id)(const char*, Device*);
    Result (*device_name)(Device, char*, unsigned);
    Result (*device_uuid)(Device, char*, unsigned);
    Result (*temperature)(Device, int sensor, unsigned*);
    Result (*power_usage)(Device, unsigned* milliwatts);
    Result (*total_ecc_errors)(Device, int error_type, int counter_type, unsigned long long*);
  };
  Nvml() = default;
  absl::Status Check(Result result, const char* call) const;

  Functions functions_ = {};
  bool initialised_ = false;
};

}  // namespace attnd
