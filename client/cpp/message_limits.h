// MessageLimits: the largest message that each address takes, asked for when a call is large enough
// for it to matter and remembered until an error hints at a server that has changed. An address
// that does not answer counts with the default, and is asked again by the next large call. Any
// thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

class MessageLimits {
 public:
  static constexpr int64_t kAnyServerTakes = int64_t{1} << 20;
  static constexpr int64_t kDefault = int64_t{16} << 20;

  explicit MessageLimits(int addresses) : known_(addresses, 0) {}

  // The smallest limit of all addresses. `ask(address)` gives an unknown one.
  template <class Ask>
  int64_t Smallest(const Ask& ask) {
    int64_t smallest = INT64_MAX;
    for (size_t address = 0; address < known_.size(); ++address) {
      int64_t limit = Known(address);
      if (limit == 0) {
        absl::StatusOr<int64_t> answer = ask(static_cast<int>(address));
        if (answer.ok() && *answer > 0) Remember(address, limit = *answer);
      }
      smallest = std::min(smallest, limit == 0 ? kDefault : limit);
    }
    return smallest;
  }

  // After these the server may be another one, or the limit another.
  void Forget(const absl::Status& failure) {
    if (!absl::IsUnavailable(failure) && !absl::IsResourceExhausted(failure)) return;
    absl::MutexLock lock(&mutex_);
    std::fill(known_.begin(), known_.end(), 0);
  }

 private:
  int64_t Known(size_t address) {
    absl::MutexLock lock(&mutex_);
    return known_[address];
  }
  void Remember(size_t address, int64_t limit) {
    absl::MutexLock lock(&mutex_);
    known_[address] = limit;
  }

  absl::Mutex mutex_;
  std::vector<int64_t> known_;  // 0: unknown; its size never changes
};

}  // namespace attnd
