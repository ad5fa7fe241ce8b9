// NcclGroup: a device among those of other processes, by a communicator of NCCL and a stream of its
// own, so that launches go on meanwhile. Each call waits until it has ended, the deadline has come
// or the caller gives up; after an error the group is of no more use.
//
// Errors: DEADLINE_EXCEEDED, CANCELLED; INTERNAL, NCCL's, as where another process has ended.
// One thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/cuda/device/kernel_device.h"
#include "kernels/cuda/driver/nccl.h"

namespace attnd::cuda {

class NcclGroup {
 public:
  struct Patience {
    absl::Time deadline;
    std::stop_token stop;
  };
  // float32 numbers in device memory, to or from another rank.
  struct Part {
    float* data = nullptr;
    int64_t count = 0;
    int rank = 0;
  };

  // Waits for all ranks. `nccl` and the device outlive it.
  static absl::StatusOr<std::unique_ptr<NcclGroup>> Join(const Nccl& nccl, KernelDevice& device,
                                                         const std::string& id, int rank, int ranks,
                                                         const Patience& patience);
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  // All of these; each rank gives what the others expect. Parts of no numbers are left out.
  absl::Status Exchange(absl::Span<const Part> sent, absl::Span<const Part> received,
                        const Patience& patience);
  // all [ranks, count]: this rank's row goes to all others.
  absl::Status Gather(float* all, int64_t count, const Patience& patience);

 private:
  NcclGroup(const Nccl& nccl, std::unique_ptr<DeviceStream> stream, int rank, int ranks)
      : nccl_(nccl), stream_(std::move(stream)), rank_(rank), ranks_(ranks) {}
  absl::Status Enqueue(absl::Span<const Part> sent, absl::Span<const Part> received) const;
  // Until NCCL has done what was called; then until the stream has.
  absl::Status AwaitCalls(const Patience& patience) const;
  absl::Status AwaitStream(const Patience& patience) const;

  const Nccl& nccl_;
  const std::unique_ptr<DeviceStream> stream_;
  const int rank_, ranks_;
  Nccl::Communicator communicator_ = nullptr;
};

}  // namespace attnd::cuda
