// Nvml: what NVIDIA's management library (libnvidia-ml.so.1, found at run time) tells beyond the
// driver API: who uses a device, and the errors that the kernel driver logs as XIDs. It is
// optional: without it these are not known. Errors: FAILED_PRECONDITION without the library,
// INTERNAL with the call's name. Any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace attnd {

// Tells who uses a device now.
struct GpuUse {
  int utilisation_percent = 0;        // of the last second or less, by any process
  std::vector<unsigned> process_ids;  // of programs that compute, as the host numbers them
};

// An error of a device as the kernel driver logs it ("NVRM: Xid ...").
struct XidEvent {
  std::string pci_bus_id;  // as it was asked for
  uint64_t xid = 0;
};

// Whether the device is of no use after this XID, whatever caused it: what a program does wrong
// (13, 31, 43, 45, 68, 109) comes to that program as a CUDA error, and 92 and 94 are dealt with by
// the device. (NVIDIA, "XID Errors"; its Kubernetes device plugin leaves the same ones out.)
bool IsFatalXid(uint64_t xid);

class XidEvents;

class Nvml {
 public:
  static absl::StatusOr<std::unique_ptr<Nvml>> Load(
      const std::string& library = "libnvidia-ml.so.1");
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  // UUIDs of all devices, in the order of their PCI addresses.
  absl::StatusOr<std::vector<std::string>> Uuids() const;
  absl::StatusOr<GpuUse> Use(const std::string& uuid) const;
  // Listens to these devices; this outlives the result.
  absl::StatusOr<std::unique_ptr<XidEvents>> ListenForXids(
      const std::vector<std::string>& pci_bus_ids) const;

 private:
  friend class XidEvents;
  using Device = struct NvmlDevice*;
  using Result = int;  // nvmlReturn_t; 0 is success
  using EventSet = struct NvmlEventSet*;
  struct Utilisation {  // nvmlUtilization_t
    unsigned gpu, memory;
  };
  struct ProcessInfo {  // nvmlProcessInfo_v2_t
    unsigned process_id;
    unsigned long long used_bytes;
    unsigned gpu_instance, compute_instance;
  };
  struct EventData {  // nvmlEventData_t
    Device device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
  };
  struct Functions {
    Result (*init)();
    Result (*shutdown)();
    const char* (*error_string)(Result);
    Result (*device_by_pci_bus_id)(const char*, Device*);
    Result (*device_count)(unsigned*);
    Result (*device_by_index)(unsigned, Device*);
    Result (*device_by_uuid)(const char*, Device*);
    Result (*device_uuid)(Device, char*, unsigned);
    Result (*utilisation)(Device, Utilisation*);
    Result (*compute_processes)(Device, unsigned* count, ProcessInfo*);
    Result (*event_set_create)(EventSet*);
    Result (*event_set_free)(EventSet);
    Result (*register_events)(Device, unsigned long long types, EventSet);
    Result (*event_set_wait)(EventSet, EventData*, unsigned milliseconds);
  };
  Nvml() = default;
  absl::Status Check(Result result, const char* call) const;

  Functions functions_ = {};
  bool initialised_ = false;
};

// ListenForXids listens to this. One thread.
class XidEvents {
 public:
  ~XidEvents();
  XidEvents(const XidEvents&) = delete;
  XidEvents& operator=(const XidEvents&) = delete;

  // Nothing when none came within `time`.
  absl::StatusOr<std::optional<XidEvent>> Wait(absl::Duration time);

 private:
  friend class Nvml;
  explicit XidEvents(const Nvml& nvml) : nvml_(nvml) {}
  const Nvml& nvml_;
  Nvml::EventSet set_ = nullptr;
  std::map<Nvml::Device, std::string> devices_;
};

}  // namespace attnd
