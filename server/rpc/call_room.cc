#include "server/rpc/call_room.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

constexpr absl::Duration kRoomRetryDelay = absl::Milliseconds(100);

}  // namespace

absl::Status CallRoom::Take(const FairShares::Holder& holder) {
  const int64_t bytes = kCallBytes + reply_bytes_;
  return Refused(shares_.Take(holder, bytes, share_), bytes);
}

absl::Status CallRoom::HoldReply(int64_t bytes) { return Hold(bytes, reply_bytes_); }
absl::Status CallRoom::HoldRequest(int64_t bytes) { return Hold(bytes, request_bytes_); }

absl::Status CallRoom::Hold(int64_t bytes, int64_t& held) {
  const int64_t more = bytes - held;
  if (more <= 0) return absl::OkStatus();
  absl::Status status = Refused(shares_.Grow(share_, more), more);
  if (status.ok()) held = bytes;
  return status;
}

absl::Status CallRoom::Refused(FairShares::Outcome outcome, int64_t bytes) const {
  if (outcome == FairShares::Outcome::kTaken) return absl::OkStatus();
  const bool own = outcome == FairShares::Outcome::kOwnIsFull;
  const std::string limit = absl::StrCat(own ? shares_.most_of_caller() : shares_.all());
  return WithRetryAfter(
      Failure(own ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kUnavailable,
              own ? reason::kTenantQuota : reason::kMemoryPressure,
              absl::StrCat(own ? "this caller's" : "all",
                           " calls, their requests and unread replies hold ", limit,
                           " bytes, as many as they may; this call needs ", bytes, " more"),
              {{"limit", "call_bytes"}, {"value", limit}, {"bytes", absl::StrCat(bytes)}}),
      kRoomRetryDelay);
}

}  // namespace attnd
