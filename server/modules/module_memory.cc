#include "server/modules/module_memory.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

absl::Status Full(absl::string_view limit, const std::string& caller, int64_t bytes, int64_t free) {
  return Failure(absl::StatusCode::kResourceExhausted, reason::kModuleQuota,
                 absl::StrCat(limit, ": ", bytes, " bytes do not fit, ", free, " are free"),
                 {{"limit", limit},
                  {"caller", caller},
                  {"bytes", absl::StrCat(bytes)},
                  {"free", absl::StrCat(free)}});
}

}  // namespace

ModuleMemory::Reservation& ModuleMemory::Reservation::operator=(Reservation&& other) noexcept {
  if (this == &other) return *this;
  Release();
  memory_ = std::exchange(other.memory_, nullptr);
  caller_ = std::move(other.caller_);
  bytes_ = std::exchange(other.bytes_, 0);
  of_devices_ = std::exchange(other.of_devices_, {});
  return *this;
}

void ModuleMemory::Reservation::Join(Reservation other) {
  if (memory_ == nullptr) return (void)(*this = std::move(other));
  bytes_ += std::exchange(other.bytes_, 0);
  if (of_devices_.empty()) of_devices_.resize(other.of_devices_.size());
  for (size_t n = 0; n < other.of_devices_.size(); ++n) of_devices_[n] += other.of_devices_[n];
  other.of_devices_.clear();
}

void ModuleMemory::Reservation::Release() {
  if (memory_ == nullptr) return;
  absl::MutexLock lock(&memory_->mutex_);
  memory_->used_ -= bytes_;
  for (size_t n = 0; n < of_devices_.size(); ++n) memory_->device_free_[n] += of_devices_[n];
  auto of = memory_->by_caller_.find(caller_);
  of->second -= bytes_;
  if (of->second == 0) memory_->by_caller_.erase(of);
  memory_ = nullptr;
}

MemoryBudget ModuleMemory::capacity() const {
  return {std::min(limits_.bytes, limits_.caller_bytes), limits_.device_bytes};
}

MemoryBudget ModuleMemory::FreeFor(const std::string& caller) const {
  absl::MutexLock lock(&mutex_);
  auto of = by_caller_.find(caller);
  const int64_t own = of == by_caller_.end() ? 0 : of->second;
  std::vector<int64_t> of_devices = device_free_;
  for (int64_t& bytes : of_devices) bytes = std::max<int64_t>(bytes, 0);
  return {std::min(limits_.bytes - used_, limits_.caller_bytes - own), std::move(of_devices)};
}

absl::StatusOr<ModuleMemory::Reservation> ModuleMemory::Reserve(const std::string& caller,
                                                                int64_t bytes) {
  if (bytes == 0) return Reservation();
  return Take(caller, bytes, {});
}

absl::StatusOr<ModuleMemory::Reservation> ModuleMemory::Reserve(const std::string& caller,
                                                                const EnginePlan& plan) {
  std::vector<int64_t> of_devices(limits_.device_bytes.size());
  for (const EnginePlan& part : plan.parts()) {
    if (!of_devices.empty()) of_devices[part.device] += part.bytes();
  }
  return Take(caller, plan.bytes(), std::move(of_devices));
}

void ModuleMemory::LoseDevice(int device) {
  absl::MutexLock lock(&mutex_);
  if (!device_free_.empty()) device_free_[device] -= limits_.device_bytes[device];
}

absl::StatusOr<ModuleMemory::Reservation> ModuleMemory::Take(const std::string& caller,
                                                             int64_t bytes,
                                                             std::vector<int64_t> of_devices) {
  absl::MutexLock lock(&mutex_);
  auto of = by_caller_.find(caller);
  const int64_t own = of == by_caller_.end() ? 0 : of->second;
  if (bytes > limits_.caller_bytes - own) {
    return Full("caller_module_mib", caller, bytes, limits_.caller_bytes - own);
  }
  if (bytes > limits_.bytes - used_) {
    return Full("module_memory_mib", caller, bytes, limits_.bytes - used_);
  }
  for (size_t n = 0; n < of_devices.size(); ++n) {
    if (of_devices[n] > std::max<int64_t>(device_free_[n], 0)) {
      return Full(absl::StrCat("module_memory_mib of device ", n), caller, of_devices[n],
                  device_free_[n]);
    }
  }
  used_ += bytes;
  by_caller_[caller] += bytes;
  for (size_t n = 0; n < of_devices.size(); ++n) device_free_[n] -= of_devices[n];
  return Reservation(*this, caller, bytes, std::move(of_devices));
}

int64_t ModuleMemory::used() const {
  absl::MutexLock lock(&mutex_);
  return used_;
}

}  // namespace attnd
