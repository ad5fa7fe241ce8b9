#include "kernels/layers/cuda/launch_queue.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

constexpr int64_t kConstantAlignment = 64;
// A multiprocessor without its tensor cores, and with most of its time spent on memory.
constexpr double kPlainShare = 1.0 / 32;

bool Always() { return true; }

}  // namespace

LaunchQueue::LaunchQueue(cuda::KernelDevice& device) : device_(device) {
  for (const KernelRow& row : device.rows()) {
    if (row.kind >= KernelKind::kDenseNumbers) rows_.push_back(row);
  }
}

bool LaunchQueue::HasRoomFor(int64_t bytes) const {
  return static_cast<int64_t>(constants_.size()) + RoundUp(bytes, kConstantAlignment) <=
         kDescriptorBytes;
}

const void* LaunchQueue::Constants(const void* data, int64_t bytes) {
  CHECK(bytes <= kMostConstants) << bytes;
  // The descriptor that names them must still fit.
  if (!HasRoomFor(bytes + kMostConstants)) status_.Update(Launch({}));
  const uint64_t at = own_.address() + constants_.size();
  const auto* from = static_cast<const std::byte*>(data);
  constants_.insert(constants_.end(), from, from + bytes);
  constants_.resize(RoundUp(static_cast<int64_t>(constants_.size()), kConstantAlignment));
  return reinterpret_cast<const void*>(at);
}

const KernelRow* LaunchQueue::RowOf(const LayerKernel& kernel) const {
  const auto row = std::find_if(rows_.begin(), rows_.end(), [&](const KernelRow& r) {
    return r.kind == kernel.kind && r.element == kernel.element && r.small == kernel.small;
  });
  return row == rows_.end() ? nullptr : &*row;
}

void LaunchQueue::AddStep(const LayerKernel& kernel, const void* desc, int64_t bytes,
                          int64_t blocks, double flops) {
  if (!HasRoomFor(bytes)) status_.Update(Launch({}));
  const KernelRow* row = RowOf(kernel);
  CHECK(row != nullptr) << static_cast<int>(kernel.kind);
  CHECK(blocks > 0 && blocks < int64_t{1} << 31) << blocks;
  const uint64_t at = own_.address() + constants_.size();
  const auto* from = static_cast<const std::byte*>(desc);
  constants_.insert(constants_.end(), from, from + bytes);
  constants_.resize(RoundUp(static_cast<int64_t>(constants_.size()), kConstantAlignment));
  LaunchParams params = {};
  params.tile_count = static_cast<int32_t>(blocks);
  params.dense = reinterpret_cast<const void*>(at);
  steps_.push_back({{*row, params}, flops});
}

absl::Status LaunchQueue::FlushAnd(absl::Span<const cuda::HostCopy> downloads) {
  absl::Status status = std::exchange(status_, absl::OkStatus());
  if (status.ok()) return Launch(downloads);
  steps_.clear();
  constants_.clear();
  return status;
}

absl::StatusOr<std::unique_ptr<cuda::DeviceLaunch>> LaunchQueue::Begin(int64_t constants) {
  const cuda::Region regions[] = {
      {"descriptors", 0, constants, cuda::RegionUse::kInput},
      {"staging", kDescriptorBytes, kStagingBytes, cuda::RegionUse::kZeroed},
      {"turns", kDescriptorBytes + kStagingBytes, kTurns * 4, cuda::RegionUse::kZeroed}};
  return device_.BeginIn(own_, regions);
}

absl::Status LaunchQueue::Launch(absl::Span<const cuda::HostCopy> downloads) {
  const std::vector<Step> steps = std::exchange(steps_, {});
  const std::vector<std::byte> constants = std::exchange(constants_, {});
  if (steps.empty() && downloads.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::unique_ptr<cuda::DeviceLaunch> launch,
                   Begin(static_cast<int64_t>(constants.size())));
  if (!steps.empty()) {
    RETURN_IF_ERROR(launch->UploadCopy(own_.address(), constants.data(),
                                       static_cast<int64_t>(constants.size())));
    RETURN_IF_ERROR(Run(steps, *launch));
  }
  for (const cuda::HostCopy& copy : downloads) RETURN_IF_ERROR(launch->Download(copy));
  return launch->Finish().status();
}

// In slices that others' launches may come between.
absl::Status LaunchQueue::Run(absl::Span<const Step> steps, cuda::DeviceLaunch& launch) {
  const double most = device_.max_slice_seconds() * device_.info().flops_per_second * kPlainShare;
  std::vector<cuda::KernelStep> slice;
  double flops = 0;
  for (const Step& step : steps) {
    if (!slice.empty() && flops + step.flops > most) {
      RETURN_IF_ERROR(launch.Run(slice, Always).status());
      slice.clear();
      flops = 0;
    }
    slice.push_back(step.step);
    flops += step.flops;
  }
  return launch.Run(slice, Always).status();
}

absl::Status LaunchQueue::Upload(const cuda::HostCopy& copy) {
  RETURN_IF_ERROR(Flush());
  ASSIGN_OR_RETURN(const std::unique_ptr<cuda::DeviceLaunch> launch, Begin(0));
  RETURN_IF_ERROR(launch->Upload(copy));
  return launch->Finish().status();
}

}  // namespace attnd
