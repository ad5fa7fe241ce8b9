// MaskCache: lists of masks by description in a device's memory, where they stay for later calls.
// Those used last stay, up to KernelDevice::mask_bytes; what does not fit goes with its launch.
//
//   CallMask (a call's plan) → Find → HeldMask, or none → Fill, once the launch has begun
//
// Threads: any. Whoever holds a HeldMask keeps its memory.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "attention/residue_classes.h"
#include "kernels/cuda/device/kernel_device.h"
#include "kernels/cuda/masks/list_cuts.h"
#include "kernels/cuda/masks/mask_layout.h"

namespace attnd::cuda {

class HeldMask {
 public:
  explicit HeldMask(std::unique_ptr<DeviceMemory> memory) : memory_(std::move(memory)) {}
  const DeviceMemory& memory() const { return *memory_; }
  // Uploads, with this launch, what no launch has uploaded before. Launches upload in the order in
  // which they ask for it, so that later ones find it there.
  absl::Status Fill(DeviceLaunch& launch, const CompiledMask& compiled, const Problem& problem,
                    const MaskLayout& layout);

 private:
  const std::unique_ptr<DeviceMemory> memory_;
  absl::Mutex mutex_;
  bool is_filled_ ABSL_GUARDED_BY(mutex_) = false;
};

// A call's mask by description as its kernels read it: lists of their tiles, or classes of rows and
// keys in which nothing is hidden but by a window.
struct CallMask {
  std::optional<ResidueClasses> classes;
  std::shared_ptr<const CompiledMask> compiled;  // null: no lists
  MaskLayout layout;
  ListCuts cuts;
  std::shared_ptr<HeldMask> held;  // null: in the launch's arena
};

class MaskCache {
 public:
  explicit MaskCache(KernelDevice& device) : device_(device) {}
  // Null when there is no room.
  std::shared_ptr<HeldMask> Find(const std::shared_ptr<const CompiledMask>& compiled,
                                 int64_t bytes);
  int64_t bytes() const;

 private:
  struct Entry {
    std::weak_ptr<const CompiledMask> compiled;  // a plan serves one direction
    std::shared_ptr<HeldMask> held;
  };
  bool MakeRoom(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  KernelDevice& device_;
  mutable absl::Mutex mutex_;
  std::list<Entry> entries_ ABSL_GUARDED_BY(mutex_);  // the latest used first
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd::cuda
