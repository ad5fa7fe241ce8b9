#include "kernels/layers/cuda/nccl_sums.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/round_up.h"
#include "base/status_macros.h"
#include "modules/arena.h"

namespace attnd {
namespace {

constexpr int64_t kNumberBytes = 4;
constexpr int64_t kShareNumbers = 64;  // shares begin where a tensor may

}  // namespace

// Cuts the numbers into one share for each replica; the last ones may be shorter, or empty. The
// memory of a share is never empty.
struct NcclSums::Shares {
  Shares(int64_t numbers, int replicas)
      : count(numbers),
        stride(RoundUp(DivideUp(std::max<int64_t>(numbers, 1), replicas), kShareNumbers)) {}
  int64_t Begin(int replica) const { return replica * stride; }
  int64_t Size(int replica) const { return std::clamp<int64_t>(count - Begin(replica), 0, stride); }
  const int64_t count, stride;
};

// Gather writes whole shares, which may reach beyond the numbers.
int64_t NcclSums::Bytes(int64_t count, int replicas) const {
  return RoundUp(replicas * Shares(count, replicas).stride * kNumberBytes, kArenaAlignment);
}

float* NcclSums::At(int64_t number) const {
  if (memory_ == nullptr) return nullptr;
  return reinterpret_cast<float*>(memory_->address()) + number;
}

absl::Status NcclSums::Prepare(int64_t count, int replicas) {
  const int64_t bytes = Bytes(count, replicas);
  if (memory_ != nullptr && memory_->bytes() == bytes) return absl::OkStatus();
  End();
  if (hold_ != nullptr) {
    ASSIGN_OR_RETURN(held_, hold_(bytes));
  }
  memory_ = device_.Hold(bytes);
  if (memory_ == nullptr) {
    held_.reset();
    return absl::ResourceExhaustedError(absl::StrCat(
        "memory: the GPU has no ", bytes, " bytes in one piece for sums of gradients just now"));
  }
  use_(memory_.get());
  return absl::OkStatus();
}

void NcclSums::End() {
  group_.reset();
  if (memory_ == nullptr) return;
  use_(nullptr);
  memory_.reset();
  held_.reset();
}

absl::Status NcclSums::Join(const ReplicaCall& call, const cuda::NcclGroup::Patience& patience) {
  if (group_id_ == call.group) {
    const bool is_same =
        group_ != nullptr && group_->rank() == call.replica && group_->ranks() == call.replicas;
    return is_same ? absl::OkStatus()
                   : absl::FailedPreconditionError("this group has ended: a new one is needed");
  }
  group_.reset();
  group_id_ = call.group;  // nobody joins it twice
  ASSIGN_OR_RETURN(group_, cuda::NcclGroup::Join(nccl_, device_, call.group, call.replica,
                                                 call.replicas, patience));
  return absl::OkStatus();
}

absl::Status NcclSums::Sum(const ReplicaCall& call, const float* numbers, int64_t count) {
  CHECK(memory_ != nullptr && memory_->bytes() == Bytes(count, call.replicas));
  const cuda::NcclGroup::Patience patience = {call.deadline, call.stop};
  RETURN_IF_ERROR(Join(call, patience));
  const Shares shares(count, call.replicas);
  RETURN_IF_ERROR(Exchange(numbers, shares, patience));
  RETURN_IF_ERROR(AddUp(numbers, shares));
  return group_->Gather(At(0), shares.stride, patience);
}

absl::Status NcclSums::Exchange(const float* numbers, const Shares& shares,
                                const cuda::NcclGroup::Patience& patience) {
  std::vector<cuda::NcclGroup::Part> sent, received;
  for (int replica = 0; replica < group_->ranks(); ++replica) {
    if (replica == group_->rank()) continue;
    // NCCL sends from memory that it does not write.
    sent.push_back(
        {const_cast<float*>(numbers) + shares.Begin(replica), shares.Size(replica), replica});
    received.push_back({At(shares.Begin(replica)), shares.Size(group_->rank()), replica});
  }
  return group_->Exchange(sent, received, patience);
}

absl::Status NcclSums::AddUp(const float* numbers, const Shares& shares) {
  const int own = group_->rank();
  const auto part_of = [&](int replica) {
    return ConstTensor{replica == own ? numbers + shares.Begin(own) : At(shares.Begin(replica))};
  };
  const Tensor sum = {At(shares.Begin(own))};
  for (int replica = 1; replica < group_->ranks() && shares.Size(own) > 0; ++replica) {
    const ConstTensor before = replica == 1 ? part_of(0) : ConstTensor(sum);
    arithmetic_.Combine(Combination::kSum, before, 1, part_of(replica), sum, false,
                        shares.Size(own));
  }
  return arithmetic_.Finish();
}

}  // namespace attnd
