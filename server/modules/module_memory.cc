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
  return *this;
}

void ModuleMemory::Reservation::Join(Reservation other) {
  if (memory_ == nullptr) return (void)(*this = std::move(other));
  bytes_ += std::exchange(other.bytes_, 0);
}

void ModuleMemory::Reservation::Release() {
  if (memory_ == nullptr) return;
  absl::MutexLock lock(&memory_->mutex_);
  memory_->used_ -= bytes_;
  auto of = memory_->by_caller_.find(caller_);
  of->second -= bytes_;
  if (of->second == 0) memory_->by_caller_.erase(of);
  memory_ = nullptr;
}

int64_t ModuleMemory::capacity() const { return std::min(limits_.bytes, limits_.caller_bytes); }

int64_t ModuleMemory::FreeFor(const std::string& caller) const {
  absl::MutexLock lock(&mutex_);
  auto of = by_caller_.find(caller);
  const int64_t own = of == by_caller_.end() ? 0 : of->second;
  return std::min(limits_.bytes - used_, limits_.caller_bytes - own);
}

absl::StatusOr<ModuleMemory::Reservation> ModuleMemory::Reserve(const std::string& caller,
                                                                int64_t bytes) {
  if (bytes == 0) return Reservation();
  absl::MutexLock lock(&mutex_);
  auto of = by_caller_.find(caller);
  const int64_t own = of == by_caller_.end() ? 0 : of->second;
  if (bytes > limits_.caller_bytes - own) {
    return Full("caller_module_mib", caller, bytes, limits_.caller_bytes - own);
  }
  if (bytes > limits_.bytes - used_) {
    return Full("module_memory_mib", caller, bytes, limits_.bytes - used_);
  }
  used_ += bytes;
  by_caller_[caller] += bytes;
  return Reservation(*this, caller, bytes);
}

int64_t ModuleMemory::used() const {
  absl::MutexLock lock(&mutex_);
  return used_;
}

}  // namespace attnd
