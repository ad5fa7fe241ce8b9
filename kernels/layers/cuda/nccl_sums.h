// NcclSums: ReplicaSums by NCCL. Of R replicas the nth adds up the nth share of the numbers, in the
// order of replicas, and sends it to all:
//
//   numbers ─Exchange→ others' numbers of its share ─additions→ its share of sums ─Gather→ sums
//
// A replica so sends and receives 2 (R − 1) / R times the numbers' bytes. Until Gather, what comes
// from a replica lies where that replica's share of sums will.
//
// Memory   sums, as long as the numbers: held from Prepare to End.
// Threads  one at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "kernels/cuda/device/kernel_device.h"
#include "kernels/cuda/device/nccl_group.h"
#include "kernels/device.h"
#include "kernels/layers/executor/module_device.h"

namespace attnd {

class NcclSums final : public ReplicaSums {
 public:
  // Additions are enqueued on `arithmetic`, which tells its kernels of memory by `use`: null: of
  // none any more.
  using UseMemory = std::function<void(const cuda::DeviceMemory*)>;
  NcclSums(const Nccl& nccl, cuda::KernelDevice& device, ModuleDevice& arithmetic,
           HoldDeviceMemory hold, UseMemory use)
      : nccl_(nccl),
        device_(device),
        arithmetic_(arithmetic),
        hold_(std::move(hold)),
        use_(std::move(use)) {}
  ~NcclSums() override { End(); }

  int64_t Bytes(int64_t count, int replicas) const override;
  absl::Status Prepare(int64_t count, int replicas) override;
  absl::StatusOr<std::string> NewGroup() override { return nccl_.NewId(); }
  absl::Status Sum(const ReplicaCall& call, const float* numbers, int64_t count) override;
  const float* sums() const override { return At(0); }
  void End() override;

 private:
  struct Shares;

  float* At(int64_t number) const;
  absl::Status Join(const ReplicaCall& call, const cuda::NcclGroup::Patience& patience);
  absl::Status Exchange(const float* numbers, const Shares& shares,
                        const cuda::NcclGroup::Patience& patience);
  absl::Status AddUp(const float* numbers, const Shares& shares);

  const Nccl& nccl_;
  cuda::KernelDevice& device_;
  ModuleDevice& arithmetic_;
  const HoldDeviceMemory hold_;
  const UseMemory use_;
  std::shared_ptr<void> held_;  // what hold_ gave
  std::unique_ptr<cuda::DeviceMemory> memory_;
  std::unique_ptr<cuda::NcclGroup> group_;
  std::string group_id_;  // of group_, or of the last one
};

}  // namespace attnd
