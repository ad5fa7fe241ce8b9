#include "kernels/cuda/device/nccl_group.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/clock.h"
#include "base/status_macros.h"

namespace attnd::cuda {
namespace {

constexpr absl::Duration kShortestPause = absl::Microseconds(20),
                         kLongestPause = absl::Microseconds(500);

// Asks until it is so; sleeps grow with the time waited.
template <class Ask>
absl::Status Await(const NcclGroup::Patience& patience, const Ask& ask) {
  const absl::Time begin = SteadyNow();
  while (true) {
    ASSIGN_OR_RETURN(const bool is_so, ask());
    if (is_so) return absl::OkStatus();
    const absl::Time now = SteadyNow();
    if (patience.stop.stop_requested()) return absl::CancelledError("stopped");
    if (now >= patience.deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("the GPUs of the other replicas did not answer within ",
                       absl::FormatDuration(absl::Ceil(now - begin, absl::Milliseconds(1)))));
    }
    absl::SleepFor(std::clamp((now - begin) / 16, kShortestPause, kLongestPause));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<NcclGroup>> NcclGroup::Join(const Nccl& nccl, KernelDevice& device,
                                                           const std::string& id, int rank,
                                                           int ranks, const Patience& patience) {
  ASSIGN_OR_RETURN(std::unique_ptr<DeviceStream> stream, device.MakeStream());
  RETURN_IF_ERROR(stream->Enter());
  std::unique_ptr<NcclGroup> group(new NcclGroup(nccl, std::move(stream), rank, ranks));
  ASSIGN_OR_RETURN(group->communicator_, nccl.Join(id, rank, ranks));
  RETURN_IF_ERROR(group->AwaitCalls(patience));
  return group;
}

// Its kernels end by that, so that the stream can go.
NcclGroup::~NcclGroup() {
  if (communicator_ == nullptr) return;
  stream_->Enter().IgnoreError();
  nccl_.Abort(communicator_);
}

absl::Status NcclGroup::AwaitCalls(const Patience& patience) const {
  return Await(patience, [this] { return nccl_.IsDone(communicator_); });
}

absl::Status NcclGroup::AwaitStream(const Patience& patience) const {
  RETURN_IF_ERROR(stream_->Mark());
  return Await(patience, [this]() -> absl::StatusOr<bool> {
    RETURN_IF_ERROR(nccl_.IsDone(communicator_).status());
    return stream_->HasPassedMark();
  });
}

absl::Status NcclGroup::Enqueue(absl::Span<const Part> sent,
                                absl::Span<const Part> received) const {
  for (const Part& part : sent) {
    if (part.count == 0) continue;
    RETURN_IF_ERROR(nccl_.Send(communicator_, stream_->raw(), part.data, part.count, part.rank));
  }
  for (const Part& part : received) {
    if (part.count == 0) continue;
    RETURN_IF_ERROR(nccl_.Receive(communicator_, stream_->raw(), part.data, part.count, part.rank));
  }
  return absl::OkStatus();
}

absl::Status NcclGroup::Exchange(absl::Span<const Part> sent, absl::Span<const Part> received,
                                 const Patience& patience) {
  RETURN_IF_ERROR(stream_->Enter());
  RETURN_IF_ERROR(nccl_.BeginGroup());
  absl::Status enqueued = Enqueue(sent, received);
  enqueued.Update(nccl_.EndGroup());  // the thread's, even where a call has failed
  RETURN_IF_ERROR(enqueued);
  RETURN_IF_ERROR(AwaitCalls(patience));
  return AwaitStream(patience);
}

absl::Status NcclGroup::Gather(float* all, int64_t count, const Patience& patience) {
  RETURN_IF_ERROR(stream_->Enter());
  RETURN_IF_ERROR(nccl_.AllGather(communicator_, stream_->raw(), all + rank_ * count, all, count));
  RETURN_IF_ERROR(AwaitCalls(patience));
  return AwaitStream(patience);
}

}  // namespace attnd::cuda
