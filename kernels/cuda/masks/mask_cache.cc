#include "kernels/cuda/masks/mask_cache.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/status_macros.h"

namespace attnd::cuda {

absl::Status HeldMask::Fill(DeviceLaunch& launch, const CompiledMask& compiled,
                            const Problem& problem, const MaskLayout& layout) {
  absl::MutexLock lock(&mutex_);
  if (is_filled_) return absl::OkStatus();
  const std::vector<std::byte> image = MaskImage(compiled, problem, layout);
  RETURN_IF_ERROR(launch.UploadCopy(memory_->address(), image.data(), layout.bytes));
  is_filled_ = true;
  return absl::OkStatus();
}

std::shared_ptr<HeldMask> MaskCache::Find(const std::shared_ptr<const CompiledMask>& compiled,
                                          int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    if (entry->compiled.lock() != compiled) continue;
    entries_.splice(entries_.begin(), entries_, entry);
    return entry->held;
  }
  if (!MakeRoom(bytes)) return nullptr;
  std::unique_ptr<DeviceMemory> memory = device_.Hold(bytes);
  if (memory == nullptr) return nullptr;
  bytes_ += memory->bytes();
  entries_.push_front({compiled, std::make_shared<HeldMask>(std::move(memory))});
  return entries_.front().held;
}

// Drops what nobody uses, from the end.
bool MaskCache::MakeRoom(int64_t bytes) {
  const int64_t most = device_.mask_bytes();
  if (bytes > most) return false;
  for (auto entry = entries_.end(); entry != entries_.begin() && bytes_ + bytes > most;) {
    --entry;
    if (entry->held.use_count() > 1) continue;
    bytes_ -= entry->held->memory().bytes();
    entry = entries_.erase(entry);
  }
  return bytes_ + bytes <= most;
}

int64_t MaskCache::bytes() const {
  absl::MutexLock lock(&mutex_);
  return bytes_;
}

}  // namespace attnd::cuda
