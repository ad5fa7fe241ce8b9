// CallRoom: the memory that one call holds beside its tensors: gRPC's objects and ours, and the
// messages of its reply that its peer has not read. It is taken once the first message is whole,
// before any work, and comes back when the last byte of the reply has left or the call is cut.
// Every method of every service takes it. One thread at a time; `shares` outlives it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "server/rpc/fair_shares.h"

namespace attnd {

// A call without a reply.
inline constexpr int64_t kCallBytes = int64_t{8} << 10;
// Replies of most methods without tensors.
inline constexpr int64_t kSmallReplyBytes = int64_t{4} << 10;

class CallRoom {
 public:
  explicit CallRoom(FairShares& shares) : shares_(shares) {}

  // `reply_bytes`: those of the reply's messages that it may hold at a time, as far as they are
  // known. UNAVAILABLE MEMORY_PRESSURE, RESOURCE_EXHAUSTED TENANT_QUOTA.
  absl::Status Take(const FairShares::Holder& holder, int64_t reply_bytes);
  // Takes what messages of so many bytes need beyond that. The same errors.
  absl::Status HoldReply(int64_t bytes);

 private:
  absl::Status Refused(FairShares::Outcome outcome, int64_t bytes) const;

  FairShares& shares_;
  FairShares::Share share_;
  int64_t reply_bytes_ = 0;
};

}  // namespace attnd
