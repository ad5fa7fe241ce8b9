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

void TransferProgress::Begin() {
  const int64_t now = absl::ToUnixNanos(clock_.Now());
  bytes_ = 0;
  moved_nanos_ = now;
  begin_nanos_ = now;
}

void TransferProgress::Moved(int64_t bytes) {
  bytes_.fetch_add(bytes, std::memory_order_relaxed);
  moved_nanos_.store(absl::ToUnixNanos(clock_.Now()), std::memory_order_relaxed);
}

absl::Status TransferProgress::Check(const TransferLimits& limits) const {
  const int64_t begin = begin_nanos_;
  if (begin == kPaused) return absl::OkStatus();
  const absl::Time now = clock_.Now();
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
  if (waited <= absl::ZeroDuration() || static_cast<double>(bytes_) >= due) return absl::OkStatus();
  return Over(reason::kStreamTooSlow,
              "the peer is too slow; bytes a second expected at least:", "limit_bytes_per_second",
              static_cast<double>(limits.min_bytes_per_second));
}

}  // namespace attnd
