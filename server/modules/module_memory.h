// ModuleMemory: what modules may take, of all callers, of one and of each device: bytes reserved at
// Register, and copies of tensors on their way in and out, which no device counts. A Reservation
// gives its bytes back when it goes. Any thread; outlives its reservations.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "modules/module_engine.h"

namespace attnd {

struct ModuleMemoryLimits {
  int64_t bytes = 0;         // of all modules; 0: none are served
  int64_t caller_bytes = 0;  // of one caller's
  // Of those on each device; empty: a device may have them all.
  std::vector<int64_t> device_bytes;
};

class ModuleMemory {
 public:
  class Reservation {
   public:
    Reservation() = default;
    Reservation(Reservation&& other) noexcept { *this = std::move(other); }
    Reservation& operator=(Reservation&& other) noexcept;
    ~Reservation() { Release(); }
    int64_t bytes() const { return bytes_; }
    void Join(Reservation other);  // of the same caller

   private:
    friend class ModuleMemory;
    Reservation(ModuleMemory& memory, std::string caller, int64_t bytes,
                std::vector<int64_t> of_devices)
        : memory_(&memory),
          caller_(std::move(caller)),
          bytes_(bytes),
          of_devices_(std::move(of_devices)) {}
    void Release();

    ModuleMemory* memory_ = nullptr;
    std::string caller_;
    int64_t bytes_ = 0;
    std::vector<int64_t> of_devices_;  // of the limits' devices; empty: none
  };

  explicit ModuleMemory(const ModuleMemoryLimits& limits)
      : limits_(limits), device_free_(limits.device_bytes) {}

  // The most that one caller may ever have.
  MemoryBudget capacity() const;
  // That it may have now.
  MemoryBudget FreeFor(const std::string& caller) const;
  // RESOURCE_EXHAUSTED MODULE_QUOTA naming the limit.
  absl::StatusOr<Reservation> Reserve(const std::string& caller, int64_t bytes);
  // Of a module, on the devices of its plan.
  absl::StatusOr<Reservation> Reserve(const std::string& caller, const EnginePlan& plan);
  // From now on the device has room for nothing.
  void LoseDevice(int device);
  int64_t used() const;

 private:
  absl::StatusOr<Reservation> Take(const std::string& caller, int64_t bytes,
                                   std::vector<int64_t> of_devices);

  const ModuleMemoryLimits limits_;
  mutable absl::Mutex mutex_;
  std::vector<int64_t> device_free_ ABSL_GUARDED_BY(mutex_);  // below 0: of a lost device
  int64_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, int64_t> by_caller_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
