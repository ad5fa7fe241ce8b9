// CopyMerger: makes few copies of many. Pieces that are neighbours in both memories become one
// block; blocks of one size that follow each other at one distance in either memory, as the tensors
// of like calls do, become the rows of one copy, also when blocks of a few other sizes stand
// between them. A copy costs 3 us beside its bytes, a row nothing. What lies in different
// allocations of the device is never one copy: the driver refuses that. The order in which copies
// are made is free. Pure; one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "kernels/cuda/device/kernel_device.h"

namespace attnd::cuda {

class CopyMerger {
 public:
  // Perhaps a copy to make, to which nothing will be added any more. `allocation` is a number of
  // that in which the device's bytes lie.
  std::optional<HostCopy> Add(uint64_t device, std::byte* host, int64_t bytes, int allocation) {
    HostCopy& last = block_.copy;
    if (allocation == block_.allocation && host == last.host + last.bytes &&
        device == last.device + static_cast<uint64_t>(last.bytes)) {
      last.bytes += bytes;
      return std::nullopt;
    }
    CloseBlock();
    block_ = {{.device = device, .host = host, .bytes = bytes}, allocation};
    return open_.size() > kMaxOpen ? TakeFirst() : std::nullopt;
  }
  // Returns the copies that are left, one after the other until there is none.
  std::optional<HostCopy> Next() {
    CloseBlock();
    return TakeFirst();
  }

 private:
  // The driver's limit for the distance of rows.
  static constexpr int64_t kMaxPitch = (int64_t{1} << 31) - 1;
  static constexpr size_t kMaxOpen = 4;

  struct Rows {
    HostCopy copy;
    int allocation = 0;
  };

  static bool Fits(int64_t pitch, int64_t bytes) { return pitch >= bytes && pitch <= kMaxPitch; }
  static bool Join(const Rows& added, Rows& open) {
    const HostCopy& block = added.copy;
    HostCopy& rows = open.copy;
    const int64_t last = rows.rows - 1;
    const auto device_pitch = static_cast<int64_t>(
        block.device - (rows.device + static_cast<uint64_t>(last * rows.device_pitch)));
    const int64_t host_pitch = block.host - (rows.host + last * rows.host_pitch);
    const bool like_before =
        rows.rows == 1 || (device_pitch == rows.device_pitch && host_pitch == rows.host_pitch);
    if (added.allocation != open.allocation || block.bytes != rows.bytes || !like_before ||
        !Fits(device_pitch, block.bytes) || !Fits(host_pitch, block.bytes)) {
      return false;
    }
    ++rows.rows;
    rows.device_pitch = device_pitch;
    rows.host_pitch = host_pitch;
    return true;
  }
  void CloseBlock() {
    if (block_.copy.bytes == 0) return;
    const Rows block = std::exchange(block_, Rows());
    for (Rows& rows : open_) {
      if (Join(block, rows)) return;
    }
    open_.push_back(block);
  }
  std::optional<HostCopy> TakeFirst() {
    if (open_.empty()) return std::nullopt;
    const HostCopy first = open_.front().copy;
    open_.erase(open_.begin());
    return first;
  }

  absl::InlinedVector<Rows, kMaxOpen + 1> open_;  // that may still get more
  Rows block_;                                    // that still grows; one row
};

}  // namespace attnd::cuda
