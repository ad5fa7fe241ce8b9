#include "server/rpc/call_log_limit.h"

#include <utility>

namespace attnd {

std::optional<int64_t> CallLogLimit::Take(absl::Time now) {
  const int64_t number = (now - absl::UnixEpoch()) / period_;
  absl::MutexLock lock(&mutex_);
  if (number != number_) lines_ = 0;
  number_ = number;
  if (++lines_ > most_) {
    ++left_out_;
    return std::nullopt;
  }
  return std::exchange(left_out_, 0);
}

}  // namespace attnd
