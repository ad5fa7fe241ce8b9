#include "server/keep/mask_arrivals.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

constexpr absl::Duration kRetryAfter = absl::Milliseconds(100);

absl::Status NoRoom(absl::StatusCode code, absl::string_view reason, absl::string_view whose,
                    int64_t most, int64_t wanted) {
  return WithRetryAfter(Failure(code, reason,
                                absl::StrCat("mask_data: at most ", most, " bytes of ", whose,
                                             " may arrive at a time, with this call ", wanted),
                                {{"limit", absl::StrCat(most)}, {"wanted", absl::StrCat(wanted)}}),
                        kRetryAfter);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MaskArrivals::Room>> MaskArrivals::Take(absl::string_view caller,
                                                                       int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const int64_t of_caller = arriving_.Of(caller) + bytes;
  if (of_caller > caller_max_bytes_) {
    return NoRoom(absl::StatusCode::kResourceExhausted, reason::kTenantQuota, "one caller",
                  caller_max_bytes_, of_caller);
  }
  const int64_t of_all = arriving_.all() + bytes;
  if (of_all > max_bytes_) {
    return NoRoom(absl::StatusCode::kUnavailable, reason::kMemoryPressure, "all callers",
                  max_bytes_, of_all);
  }
  arriving_.Add(caller, bytes);
  return std::make_unique<Room>(*this, caller, bytes);
}

int64_t MaskArrivals::bytes() const {
  absl::MutexLock lock(&mutex_);
  return arriving_.all();
}

void MaskArrivals::Give(const std::string& caller, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  arriving_.Add(caller, -bytes);
}

}  // namespace attnd
