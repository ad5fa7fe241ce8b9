#include "server/keep/module_memory.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

absl::Status Full(absl::string_view limit, const std::string& caller, int64_t bytes, int64_t free) {
  return Failure(absl::StatusCode::kResourceExhausted, reason::kModuleQuota,
                 absl::StrCat(limit, ": ", bytes, " bytes do not fit, ", free,
                              " are free; release modules that nobody uses, or raise the limit"),
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
  bytes_ = std::exchange(other.bytes_, {});
  of_devices_ = std::exchange(other.of_devices_, {});
  return *this;
}

void ModuleMemory::Reservation::Join(Reservation other) {
  if (memory_ == nullptr) return (void)(*this = std::move(other));
  for (size_t n = 0; n < bytes_.size(); ++n) bytes_[n] += std::exchange(other.bytes_[n], 0);
  if (of_devices_.empty()) of_devices_.resize(other.of_devices_.size());
  for (size_t n = 0; n < other.of_devices_.size(); ++n) of_devices_[n] += other.of_devices_[n];
  other.of_devices_.clear();
}

void ModuleMemory::Reservation::Release() {
  if (memory_ == nullptr) return;
  absl::MutexLock lock(&memory_->mutex_);
  for (size_t n = 0; n < bytes_.size(); ++n) memory_->accounts_[n].Add(caller_, -bytes_[n]);
  for (size_t n = 0; n < of_devices_.size(); ++n) memory_->device_free_[n] += of_devices_[n];
  memory_ = nullptr;
}

MemoryBudget ModuleMemory::capacity() const {
  return {std::min(limits_.bytes, limits_.caller_bytes), limits_.device_bytes};
}

MemoryBudget ModuleMemory::FreeFor(const std::string& caller) const {
  absl::MutexLock lock(&mutex_);
  std::vector<int64_t> of_devices = device_free_;
  for (int64_t& bytes : of_devices) bytes = std::max<int64_t>(bytes, 0);
  const CallerBytes& modules = accounts_[kModules];
  return {std::min(limits_.bytes - modules.all(), limits_.caller_bytes - modules.Of(caller)),
          std::move(of_devices)};
}

absl::StatusOr<ModuleMemory::Reservation> ModuleMemory::Reserve(const std::string& caller,
                                                                int64_t bytes) {
  if (bytes == 0) return Reservation();
  absl::MutexLock lock(&mutex_);
  RETURN_IF_ERROR(Check(copies(), caller, bytes));
  Reservation reserved(*this, caller);
  Add(copies(), bytes, reserved);
  return reserved;
}

absl::StatusOr<ModuleMemory::Reservation> ModuleMemory::Reserve(const std::string& caller,
                                                                const EnginePlan& plan) {
  std::vector<int64_t> of_devices(limits_.device_bytes.size());
  for (const EnginePlan& part : plan.parts()) {
    if (!of_devices.empty()) of_devices[part.device] += part.bytes();
  }
  absl::MutexLock lock(&mutex_);
  RETURN_IF_ERROR(Check(kModules, caller, plan.bytes()));
  for (size_t n = 0; n < of_devices.size(); ++n) {
    if (of_devices[n] > std::max<int64_t>(device_free_[n], 0)) {
      return Full(absl::StrCat("module_memory_mib of device ", n), caller, of_devices[n],
                  device_free_[n]);
    }
  }
  Reservation reserved(*this, caller);
  Add(kModules, plan.bytes(), reserved);
  for (size_t n = 0; n < of_devices.size(); ++n) device_free_[n] -= of_devices[n];
  reserved.of_devices_ = std::move(of_devices);
  return reserved;
}

void ModuleMemory::LoseDevice(int device) {
  absl::MutexLock lock(&mutex_);
  if (!device_free_.empty()) device_free_[device] -= limits_.device_bytes[device];
}

absl::Status ModuleMemory::Check(int account, const std::string& caller, int64_t bytes) const {
  const int64_t of_caller = limits_.caller_bytes - accounts_[account].Of(caller);
  if (bytes > of_caller) return Full("caller_module_mib", caller, bytes, of_caller);
  const int64_t of_all = limits_.bytes - accounts_[account].all();
  if (bytes > of_all) return Full("module_memory_mib", caller, bytes, of_all);
  return absl::OkStatus();
}

void ModuleMemory::Add(int account, int64_t bytes, Reservation& to) {
  accounts_[account].Add(to.caller_, bytes);
  to.bytes_[account] += bytes;
}

int64_t ModuleMemory::used() const {
  absl::MutexLock lock(&mutex_);
  return accounts_[0].all() + accounts_[1].all();
}

}  // namespace attnd
