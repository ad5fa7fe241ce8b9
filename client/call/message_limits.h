// MessageLimits: the largest message that each address takes and whether it takes streams, asked
// for when a call is large enough for it to matter and remembered until an error hints at a server
// that has changed. An address that does not answer counts with the default, and is asked again by
// the next large call. Any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

struct ServerLimits {
  int64_t max_message_bytes = int64_t{16} << 20;
  bool streams = false;
  bool mask_data = false;  // lists of masks as a payload
};

class MessageLimits {
 public:
  static constexpr int64_t kAnyServerTakes = int64_t{1} << 20;

  // What each of so many addresses can do. `ask(address)` gives an unknown one's limits.
  template <class Ask>
  ServerLimits OfAll(int addresses, const Ask& ask) {
    ServerLimits all{.max_message_bytes = INT64_MAX, .streams = true, .mask_data = true};
    for (int address = 0; address < addresses; ++address) {
      std::optional<ServerLimits> limits = Known(address);
      if (!limits.has_value()) {
        absl::StatusOr<ServerLimits> answer = ask(address);
        if (answer.ok() && answer->max_message_bytes > 0) Remember(address, *(limits = *answer));
      }
      ServerLimits one = limits.value_or(ServerLimits());
      all.max_message_bytes = std::min(all.max_message_bytes, one.max_message_bytes);
      all.streams = all.streams && one.streams;
      all.mask_data = all.mask_data && one.mask_data;
    }
    return all;
  }

  // After these the server may be another one, or the limit another.
  void Forget(const absl::Status& failure) {
    if (!absl::IsUnavailable(failure) && !absl::IsResourceExhausted(failure)) return;
    absl::MutexLock lock(&mutex_);
    known_.clear();
  }

 private:
  std::optional<ServerLimits> Known(int address) {
    absl::MutexLock lock(&mutex_);
    auto known = known_.find(address);
    if (known == known_.end()) return std::nullopt;
    return known->second;
  }
  void Remember(int address, const ServerLimits& limits) {
    absl::MutexLock lock(&mutex_);
    known_[address] = limits;
  }

  absl::Mutex mutex_;
  std::map<int, ServerLimits> known_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
