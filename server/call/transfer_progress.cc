#include "server/call/transfer_progress.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

absl::Status Over(absl::string_view reason, absl::string_view what, absl::string_view metadata,
                  double limit) {
  const std::string value = absl::StrCat(limit);
  return Failure(absl::StatusCode::kDeadlineExceeded, reason, absl::StrCat(what, " ", value),
                 {{metadata, value}});
}

}  // namespace

void TransferProgress::Begin(absl::Time now) {
  bytes_ = 0;
  seen_bytes_ = 0;
  moved_nanos_ = absl::ToUnixNanos(now);
  begin_nanos_ = absl::ToUnixNanos(now);
}

absl::Status TransferProgress::Check(const TransferLimits& limits, absl::Time now) {
  const int64_t begin = begin_nanos_, bytes = bytes_;
  if (begin == kPaused) return absl::OkStatus();
  if (seen_bytes_.exchange(bytes) != bytes) moved_nanos_ = absl::ToUnixNanos(now);
  if (now - call_began_ > limits.longest) {
    return Over(reason::kDeadlineExceededTransfer,
                "the call took longer than the server allows, seconds:", "limit_seconds",
                absl::ToDoubleSeconds(limits.longest));
  }
  if (now - absl::FromUnixNanos(moved_nanos_) > limits.idle) {
    return Over(reason::kStreamIdle,
                "nothing was sent or read for longer than, seconds:", "limit_seconds",
                absl::ToDoubleSeconds(limits.idle));
  }
  const absl::Duration waited = now - absl::FromUnixNanos(begin) - limits.idle;
  const double due =
      absl::ToDoubleSeconds(waited) * static_cast<double>(limits.min_bytes_per_second);
  if (waited <= absl::ZeroDuration() || static_cast<double>(bytes) >= due) return absl::OkStatus();
  return Over(reason::kStreamTooSlow,
              "the peer is too slow; bytes a second expected at least:", "limit_bytes_per_second",
              static_cast<double>(limits.min_bytes_per_second));
}

}  // namespace attnd
