// LaunchQueue: what a call of a module runs on a GPU, as one launch: uploads, kernels of
// kernels/dense and of attention in the order in which they were added, downloads. Kernels are
// enqueued some at a time while more are added, so that the GPU works meanwhile; nothing waits for
// it but Flush, and an addition for which descriptors have no room. One thread at a time.
// Uploads do not wait for the kernels before them, nor kernels for the downloads before them.
//
// Memory   kBytes of the device's, zeroed: descriptors, a place for what passes to and from the
//          host, turns of products.
// Errors   of a launch within Add, of MapOf: the next Flush returns it, and what was queued is
// forgotten.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/cuda/device/kernel_device.h"

namespace attnd {

struct LayerKernel {
  KernelKind kind;
  // Products on tensor cores have these elements and tiles.
  ElementType element = ElementType::kFloat16;
  bool small = false, wide = false;

  LayerKernel(KernelKind of,
              ElementType multiplied = ElementType::kFloat16)  // NOLINT: a kind is one
      : kind(of), element(multiplied) {}
};

class LaunchQueue {
 public:
  static constexpr int64_t kDescriptorBytes = int64_t{4} << 20;
  static constexpr int64_t kStagingBytes = int64_t{4} << 20;
  static constexpr int64_t kTurns = int64_t{1} << 16;
  static constexpr int64_t kNormSumsBytes = int64_t{4} << 20;
  static constexpr int64_t kBytes = kDescriptorBytes + kStagingBytes + kTurns * 4 + kNormSumsBytes;
  // One Constants or Add may take so many.
  static constexpr int64_t kMostConstants = kDescriptorBytes / 4;

  // The device outlives the queue.
  explicit LaunchQueue(cuda::KernelDevice& device);
  void SetMemory(const cuda::DevicePart& own) { own_ = own; }

  // Kernels may use it too, until another is named; null: none.
  void SetBeside(const cuda::DeviceMemory* memory) { beside_ = memory; }

  uint64_t staging() const { return own_.address() + kDescriptorBytes; }
  // kTurns words for ProductDesc.turns.
  int32_t* turns() const { return reinterpret_cast<int32_t*>(staging() + kStagingBytes); }

  // kNormSumsBytes, for NormSumsDesc.
  float* norm_sums() const { return reinterpret_cast<float*>(turns() + kTurns); }

  // Where the next Constants of at most so many bytes will lie.
  uint64_t PlaceFor(int64_t bytes);
  // A place where the kernel of the next Add finds these bytes.
  const void* Constants(const void* data, int64_t bytes);
  // Tiles of a 16-bit tensor for the kernel of the next Add.
  TensorMap MapOf(const RowsBox& box);
  // Whether the device has this kernel: of operations of any element it has all.
  bool Has(const LayerKernel& kernel) const { return RowOf(kernel) != nullptr; }
  // Whether a kernel that the device has makes sm_70's gradients of weights, some in a launch, with
  // sums of A's columns.
  bool HasListedGradients(const LayerKernel& kernel) const;
  // `desc` is the kernel's; `flops` about what it computes, or moves in bytes.
  template <class Desc>
  void Add(const LayerKernel& kernel, const Desc& desc, int64_t blocks, double flops) {
    AddDense(kernel, &desc, sizeof(desc), blocks, flops);
  }
  // The same of several descriptors, one after the other.
  template <class Desc>
  void AddList(const LayerKernel& kernel, absl::Span<const Desc> descs, int64_t blocks,
               double flops) {
    AddDense(kernel, descs.data(), static_cast<int64_t>(descs.size() * sizeof(Desc)), blocks,
             flops);
  }
  // Kernels of another engine, which take about so long together; what they read beside tensors is
  // among Constants.
  void AddSteps(absl::Span<const cuda::KernelStep> steps, double seconds);

  absl::Status Flush();
  // The host's bytes stay as they are until the next Flush. Kernels that are queued leave the
  // device's alone.
  absl::Status Upload(const cuda::HostCopy& copy);
  // Copies bytes that kernels which are queued have written. The host has them after the next
  // Flush; kernels that are added before that leave the device's as they are.
  absl::Status Download(const cuda::HostCopy& copy);
  // Seconds of all launches so far, as the GPU's own events measure them.
  const cuda::DeviceTimes& times() const { return times_; }

 private:
  const KernelRow* RowOf(const LayerKernel& kernel) const;
  void AddDense(const LayerKernel& kernel, const void* desc, int64_t bytes, int64_t blocks,
                double flops);
  int64_t constants_end() const { return static_cast<int64_t>(constants_.size()); }
  bool HasRoomFor(int64_t bytes) const;
  uint64_t Append(const void* data, int64_t bytes);
  absl::Status Begin();
  // Enqueues the slice.
  absl::Status Send();
  // And waits.
  absl::Status SendAll();
  // A copy behind what is queued.
  absl::Status Pass(absl::Status (cuda::DeviceLaunch::*pass)(const cuda::HostCopy&),
                    const cuda::HostCopy& copy);

  cuda::KernelDevice& device_;
  std::vector<KernelRow> rows_;  // of kernels/dense
  cuda::DevicePart own_;
  const cuda::DeviceMemory* beside_ = nullptr;
  std::unique_ptr<cuda::DeviceLaunch> launch_;  // since the first upload or slice
  std::vector<std::byte> constants_;
  int64_t sent_constants_ = 0;  // so many bytes of them are on the device
  std::vector<cuda::KernelStep> slice_;
  double slice_seconds_ = 0;
  size_t slice_steps_;   // with so many it is sent
  absl::Status status_;  // of a launch within Add, of MapOf
  cuda::DeviceTimes times_;
};

}  // namespace attnd
