#include "server/rpc/call_log_limit.h"

#include <utility>

namespace attnd {

std::optional<int64_t> CallLogLimit::Take(absl::Time now) {
  int64_t second = absl::ToUnixSeconds(now);
  absl::MutexLock lock(&mutex_);
  if (second != second_) lines_ = 0;
  second_ = second;
  if (++lines_ > kLinesPerSecond) {
    ++left_out_;
    return std::nullopt;
  }
  return std::exchange(left_out_, 0);
}

}  // namespace attnd
