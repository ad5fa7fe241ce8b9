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
// Kernels that are enqueued together: enough that the events around them cost little, and few
// enough that the GPU does not wait for the host to have added them. The first slice has
// kFirstSteps, and each twice those of the one before.
constexpr size_t kSliceSteps = 24, kFirstSteps = 3;

bool Always() { return true; }

}  // namespace

LaunchQueue::LaunchQueue(cuda::KernelDevice& device) : device_(device), slice_steps_(kFirstSteps) {
  for (const KernelRow& row : device.rows()) {
    if (row.kind >= KernelKind::kDenseNumbers) rows_.push_back(row);
  }
}

bool LaunchQueue::HasListedGradients(const LayerKernel& kernel) const {
  return kernel.kind == KernelKind::kProductDepthDepth &&
         RowOf(kernel)->architecture == Architecture::kSm70;
}

bool LaunchQueue::HasRoomFor(int64_t bytes) const {
  return constants_end() + RoundUp(bytes, kConstantAlignment) <= kDescriptorBytes;
}

uint64_t LaunchQueue::PlaceFor(int64_t bytes) {
  CHECK(bytes <= kMostConstants) << bytes;
  // The descriptor that names them must still fit.
  if (!HasRoomFor(bytes + kMostConstants)) status_.Update(Flush());
  return own_.address() + constants_.size();
}

uint64_t LaunchQueue::Append(const void* data, int64_t bytes) {
  const uint64_t at = own_.address() + constants_.size();
  const auto* from = static_cast<const std::byte*>(data);
  constants_.insert(constants_.end(), from, from + bytes);
  constants_.resize(RoundUp(constants_end(), kConstantAlignment));
  return at;
}

const void* LaunchQueue::Constants(const void* data, int64_t bytes) {
  PlaceFor(bytes);
  return reinterpret_cast<const void*>(Append(data, bytes));
}

TensorMap LaunchQueue::MapOf(const RowsBox& box) {
  const absl::StatusOr<TensorMap> map = device_.Encode(box);
  status_.Update(map.status());
  return map.ok() ? *map : TensorMap{};
}

const KernelRow* LaunchQueue::RowOf(const LayerKernel& kernel) const {
  const auto row = std::find_if(rows_.begin(), rows_.end(), [&](const KernelRow& r) {
    return r.kind == kernel.kind && r.element == kernel.element && r.small == kernel.small &&
           r.wide == kernel.wide;
  });
  return row == rows_.end() ? nullptr : &*row;
}

void LaunchQueue::AddDense(const LayerKernel& kernel, const void* desc, int64_t bytes,
                           int64_t blocks, double flops) {
  if (!HasRoomFor(bytes)) status_.Update(Flush());
  const KernelRow* row = RowOf(kernel);
  CHECK(row != nullptr) << static_cast<int>(kernel.kind);
  CHECK(blocks > 0 && blocks < int64_t{1} << 31) << blocks;
  LaunchParams params = {};
  params.tile_count = static_cast<int32_t>(blocks);
  params.dense = reinterpret_cast<const void*>(Append(desc, bytes));
  const cuda::KernelStep step = {*row, params};
  AddSteps({&step, 1}, flops / (device_.info().flops_per_second * kPlainShare));
}

// In slices that others' launches may come between.
void LaunchQueue::AddSteps(absl::Span<const cuda::KernelStep> steps, double seconds) {
  if (!slice_.empty() && slice_seconds_ + seconds > device_.max_slice_seconds()) {
    status_.Update(Send());
  }
  slice_.insert(slice_.end(), steps.begin(), steps.end());
  slice_seconds_ += seconds;
  if (slice_.size() >= slice_steps_) status_.Update(Send());
}

absl::Status LaunchQueue::Begin() {
  if (launch_ != nullptr) return absl::OkStatus();
  const cuda::Region regions[] = {
      {"descriptors", 0, kDescriptorBytes, cuda::RegionUse::kZeroed},
      {"staging", kDescriptorBytes, kStagingBytes, cuda::RegionUse::kZeroed},
      {"turns", kDescriptorBytes + kStagingBytes, kTurns * 4, cuda::RegionUse::kZeroed},
      {"norm sums", kBytes - kNormSumsBytes, kNormSumsBytes, cuda::RegionUse::kZeroed}};
  ASSIGN_OR_RETURN(launch_, device_.BeginIn(own_, regions));
  if (beside_ != nullptr) {
    const cuda::Region whole[] = {{"memory", 0, beside_->bytes(), cuda::RegionUse::kZeroed}};
    launch_->Use(*beside_, whole);
  }
  return absl::OkStatus();
}

absl::Status LaunchQueue::Send() {
  const std::vector<cuda::KernelStep> slice = std::exchange(slice_, {});
  slice_seconds_ = 0;
  slice_steps_ = std::min(2 * slice_steps_, kSliceSteps);
  if (!status_.ok()) return absl::OkStatus();
  RETURN_IF_ERROR(Begin());
  const int64_t begin = std::exchange(sent_constants_, constants_end());
  RETURN_IF_ERROR(launch_->UploadCopy(own_.address() + static_cast<uint64_t>(begin),
                                      constants_.data() + begin, constants_end() - begin));
  return launch_->Run(slice, Always).status();
}

absl::Status LaunchQueue::SendAll() {
  if (!slice_.empty()) RETURN_IF_ERROR(Send());
  if (!status_.ok()) return status_;
  if (launch_ == nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(const cuda::DeviceTimes took, launch_->Finish());
  times_.upload += took.upload;
  times_.kernel += took.kernel;
  times_.download += took.download;
  return absl::OkStatus();
}

absl::Status LaunchQueue::Flush() {
  absl::Status status = SendAll();
  launch_.reset();
  slice_.clear();
  slice_seconds_ = 0;
  slice_steps_ = kFirstSteps;
  constants_.clear();
  sent_constants_ = 0;
  status_ = absl::OkStatus();
  return status;
}

absl::Status LaunchQueue::Pass(absl::Status (cuda::DeviceLaunch::*pass)(const cuda::HostCopy&),
                               const cuda::HostCopy& copy) {
  if (!slice_.empty()) status_.Update(Send());
  if (status_.ok()) status_.Update(Begin());
  if (status_.ok()) status_.Update((*launch_.*pass)(copy));
  return status_.ok() ? absl::OkStatus() : Flush();
}

absl::Status LaunchQueue::Upload(const cuda::HostCopy& copy) {
  return Pass(&cuda::DeviceLaunch::Upload, copy);
}

absl::Status LaunchQueue::Download(const cuda::HostCopy& copy) {
  return Pass(&cuda::DeviceLaunch::Download, copy);
}

}  // namespace attnd
