// ModuleMemory: what modules may take, of all callers and of one: bytes reserved at Register, and
// copies of tensors on their way in and out. A Reservation gives its bytes back when it goes. Any
// thread; outlives its reservations.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

struct ModuleMemoryLimits {
  int64_t bytes = 0;         // of all modules; 0: none are served
  int64_t caller_bytes = 0;  // of one caller's
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
    Reservation(ModuleMemory& memory, std::string caller, int64_t bytes)
        : memory_(&memory), caller_(std::move(caller)), bytes_(bytes) {}
    void Release();

    ModuleMemory* memory_ = nullptr;
    std::string caller_;
    int64_t bytes_ = 0;
  };

  explicit ModuleMemory(const ModuleMemoryLimits& limits) : limits_(limits) {}

  // The most that one caller may ever have.
  int64_t capacity() const;
  // That it may have now.
  int64_t FreeFor(const std::string& caller) const;
  // RESOURCE_EXHAUSTED MODULE_QUOTA naming the limit.
  absl::StatusOr<Reservation> Reserve(const std::string& caller, int64_t bytes);
  int64_t used() const;

 private:
  const ModuleMemoryLimits limits_;
  mutable absl::Mutex mutex_;
  int64_t used_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, int64_t> by_caller_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
