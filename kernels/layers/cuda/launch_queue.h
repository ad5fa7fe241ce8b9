// LaunchQueue: kernels of kernels/dense that wait for a launch, with what they read beside tensors.
// They run in the order in which they were added, all of them at the next Flush. One thread at a
// time.
//
// Memory   kBytes of the device's, zeroed: descriptors, a place for what passes to and from the
//          host, turns of products.
// Errors   of a launch within Add: the next Flush returns it, and what was queued is forgotten.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/cuda/device/kernel_device.h"

namespace attnd {

struct LayerKernel {
  KernelKind kind;
  // Of products on tensor cores.
  ElementType element = ElementType::kFloat16;
  bool small = false;

  LayerKernel(KernelKind of,
              ElementType multiplied = ElementType::kFloat16)  // NOLINT: a kind is one
      : kind(of), element(multiplied) {}
};

class LaunchQueue {
 public:
  static constexpr int64_t kDescriptorBytes = int64_t{1} << 20;
  static constexpr int64_t kStagingBytes = int64_t{4} << 20;
  static constexpr int64_t kTurns = int64_t{1} << 16;
  static constexpr int64_t kBytes = kDescriptorBytes + kStagingBytes + kTurns * 4;
  // What one Constants or Add may take.
  static constexpr int64_t kMostConstants = kDescriptorBytes / 4;

  // The device outlives the queue.
  explicit LaunchQueue(cuda::KernelDevice& device);
  void SetMemory(const cuda::DevicePart& own) { own_ = own; }

  uint64_t staging() const { return own_.address() + kDescriptorBytes; }
  // kTurns words for ProductDesc.turns.
  int32_t* turns() const { return reinterpret_cast<int32_t*>(staging() + kStagingBytes); }

  // A place where the kernel of the next Add finds these bytes.
  const void* Constants(const void* data, int64_t bytes);
  // Whether the device has this kernel: of operations of any element it has all.
  bool Has(const LayerKernel& kernel) const { return RowOf(kernel) != nullptr; }
  // `desc` is the kernel's; `flops` about what it computes, or moves in bytes.
  template <class Desc>
  void Add(const LayerKernel& kernel, const Desc& desc, int64_t blocks, double flops) {
    AddStep(kernel, &desc, sizeof(desc), blocks, flops);
  }

  absl::Status Flush() { return FlushAnd({}); }
  // And then these copies to the host.
  absl::Status FlushAnd(absl::Span<const cuda::HostCopy> downloads);
  // After what is queued: from the host, at once.
  absl::Status Upload(const cuda::HostCopy& copy);

 private:
  struct Step {
    cuda::KernelStep step;
    double flops;
  };
  const KernelRow* RowOf(const LayerKernel& kernel) const;
  void AddStep(const LayerKernel& kernel, const void* desc, int64_t bytes, int64_t blocks,
               double flops);
  bool HasRoomFor(int64_t bytes) const;
  absl::StatusOr<std::unique_ptr<cuda::DeviceLaunch>> Begin(int64_t constants);
  absl::Status Run(absl::Span<const Step> steps, cuda::DeviceLaunch& launch);
  absl::Status Launch(absl::Span<const cuda::HostCopy> downloads);

  cuda::KernelDevice& device_;
  std::vector<KernelRow> rows_;  // of kernels/dense
  cuda::DevicePart own_;
  std::vector<std::byte> constants_;
  std::vector<Step> steps_;
  absl::Status status_;  // of a launch within Add
};

}  // namespace attnd
