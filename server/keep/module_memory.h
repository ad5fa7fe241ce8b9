// ModuleMemory: what modules may take, of all callers, of one and of each device: bytes reserved at
// Register, and copies: of tensors on their way in and out, of states in a tmpfs. Where devices
// have memory of their own, copies are the host's and may take as much again; else both share one
// memory. A Reservation gives its bytes back when it goes. Any thread; outlives its reservations.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "modules/module_engine.h"
#include "server/keep/caller_bytes.h"

namespace attnd {

struct ModuleMemoryLimits {
  int64_t bytes = 0;         // of all modules; 0: none are served
  int64_t caller_bytes = 0;  // of one caller's
  // The limit on each device; empty: the one device's memory is the host's.
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
    int64_t bytes() const { return bytes_[0] + bytes_[1]; }
    void Join(Reservation other);  // of the same caller

   private:
    friend class ModuleMemory;
    Reservation(ModuleMemory& memory, std::string caller)
        : memory_(&memory), caller_(std::move(caller)) {}
    void Release();

    ModuleMemory* memory_ = nullptr;
    std::string caller_;
    std::array<int64_t, 2> bytes_ = {};  // of accounts_
    std::vector<int64_t> of_devices_;    // of the limits' devices; empty: none
  };

  explicit ModuleMemory(const ModuleMemoryLimits& limits)
      : limits_(limits), device_free_(limits.device_bytes) {}

  // The most that one caller's modules may ever have.
  MemoryBudget capacity() const;
  // That they may have now.
  MemoryBudget FreeFor(const std::string& caller) const;
  // Copies are taken out of the modules' memory.
  bool IsShared() const { return limits_.device_bytes.empty(); }
  // Reserves memory for copies. RESOURCE_EXHAUSTED MODULE_QUOTA naming the limit.
  absl::StatusOr<Reservation> Reserve(const std::string& caller, int64_t bytes);
  // Reserves memory for a module, on the devices of its plan.
  absl::StatusOr<Reservation> Reserve(const std::string& caller, const EnginePlan& plan);
  // From now on the device has room for nothing.
  void LoseDevice(int device);
  int64_t used() const;  // of modules and copies

 private:
  static constexpr int kModules = 0;
  int copies() const { return IsShared() ? kModules : 1; }
  absl::Status Check(int account, const std::string& caller, int64_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Add(int account, int64_t bytes, Reservation& to) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ModuleMemoryLimits limits_;
  mutable absl::Mutex mutex_;
  std::vector<int64_t> device_free_ ABSL_GUARDED_BY(mutex_);  // below 0: of a lost device
  std::array<CallerBytes, 2> accounts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
