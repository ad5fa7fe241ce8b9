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

// Cuts a bucket of `count` numbers into one share for each replica; the last ones may be shorter,
// or empty.
struct Shares {
  Shares(int64_t numbers, int replicas)
      : count(numbers), stride(RoundUp(DivideUp(numbers, replicas), kShareNumbers)) {}
  int64_t Begin(int replica) const { return replica * stride; }
  int64_t Size(int replica) const { return std::clamp<int64_t>(count - Begin(replica), 0, stride); }
  const int64_t count, stride;
};

int64_t BucketOf(int64_t count) { return std::min(count, NcclSums::kBucketNumbers); }

// Gather writes whole shares, which may reach beyond the numbers.
int64_t SumsLength(int64_t count, int replicas) { return count + replicas * kShareNumbers; }

}  // namespace

int64_t NcclSums::Bytes(int64_t count, int replicas) const {
  const int64_t received = replicas * Shares(BucketOf(count), replicas).stride;
  return RoundUp((RoundUp(SumsLength(count, replicas), kShareNumbers) + received) * kNumberBytes,
                 kArenaAlignment);
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
  received_at_ = RoundUp(SumsLength(count, replicas), kShareNumbers);
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
  for (int64_t first = 0; first < count; first += kBucketNumbers) {
    RETURN_IF_ERROR(
        SumBucket(numbers + first, At(first), std::min(kBucketNumbers, count - first), patience));
  }
  return absl::OkStatus();
}

absl::Status NcclSums::SumBucket(const float* numbers, float* sums, int64_t count,
                                 const cuda::NcclGroup::Patience& patience) {
  const int own = group_->rank(), replicas = group_->ranks();
  const Shares shares(count, replicas);
  const int64_t size = shares.Size(own);
  float* const received = At(received_at_);
  std::vector<cuda::NcclGroup::Part> sent, to_receive;
  for (int replica = 0; replica < replicas; ++replica) {
    if (replica == own) continue;
    // NCCL sends from memory that it does not write.
    sent.push_back(
        {const_cast<float*>(numbers) + shares.Begin(replica), shares.Size(replica), replica});
    to_receive.push_back({received + shares.Begin(replica), size, replica});
  }
  RETURN_IF_ERROR(group_->Exchange(sent, to_receive, patience));
  const auto part_of = [&](int replica) {
    return ConstTensor{replica == own ? numbers + shares.Begin(own)
                                      : received + shares.Begin(replica)};
  };
  const Tensor sum = {sums + shares.Begin(own)};
  for (int replica = 1; replica < replicas && size > 0; ++replica) {
    const ConstTensor before = replica == 1 ? part_of(0) : ConstTensor(sum);
    arithmetic_.Combine(Combination::kSum, before, 1, part_of(replica), sum, false, size);
  }
  RETURN_IF_ERROR(arithmetic_.Finish());
  return group_->Gather(sums, shares.stride, patience);
}

}  // namespace attnd
