// CallRoom: the memory that one call holds beside its tensors: gRPC's objects and ours, those that
// its request becomes, and the messages of its reply that its peer has not read. It is taken once
// the first message is whole, before any work, and comes back when the last byte of the reply has
// left or the call is cut. Every method of every service takes it. One thread at a time; `shares`
// outlives it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/status/status.h"
#include "server/rpc/fair_shares.h"

namespace attnd {

// A call without a reply, with a request whose objects have no more than kSmallRequestBytes.
inline constexpr int64_t kCallBytes = int64_t{8} << 10;
inline constexpr int64_t kSmallRequestBytes = int64_t{4} << 10;

// Says what the calls of a method cost; no method is registered without.
struct CallCost {
  // Bytes of the reply's messages that a call holds at a time, as far as they are known beforehand.
  explicit constexpr CallCost(int64_t reply) : reply_bytes(reply) {}
  int64_t reply_bytes;
};
inline constexpr CallCost kSmallReply{int64_t{4} << 10};
inline constexpr CallCost kAdmittedReply{0};  // admission has counted it

class CallRoom {
 public:
  CallRoom(FairShares& shares, CallCost cost) : shares_(shares), reply_bytes_(cost.reply_bytes) {}

  // UNAVAILABLE MEMORY_PRESSURE, RESOURCE_EXHAUSTED TENANT_QUOTA.
  absl::Status Take(const FairShares::Holder& holder);
  // Takes what messages of so many bytes need beyond that. The same errors.
  absl::Status HoldReply(int64_t bytes);
  // Takes what a request needs beyond that whose objects have so many bytes. The same errors.
  absl::Status HoldRequest(int64_t bytes);

 private:
  absl::Status Hold(int64_t bytes, int64_t& held);
  absl::Status Refused(FairShares::Outcome outcome, int64_t bytes) const;

  FairShares& shares_;
  FairShares::Share share_;
  int64_t reply_bytes_, request_bytes_ = kSmallRequestBytes;
};

}  // namespace attnd
