// MessageLimits: the largest message that each address takes, whether it takes streams, and how
// many devices it has, asked for when a call is large enough for it to matter and remembered until
// an error hints at a server that has changed. All unknown addresses are asked at once, by one call
// while others wait for it. One that does not answer is not counted while another does, and is
// asked again by the next large call. Any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace attnd {

struct ServerLimits {
  int64_t max_message_bytes = int64_t{16} << 20;
  bool streams = false;
  bool mask_data = false;  // lists of masks as a payload
  int64_t devices = 1;     // of all addresses that are asked
};

class MessageLimits {
 public:
  static constexpr int64_t kAnyServerTakes = int64_t{1} << 20;

  // Returns what each of these addresses can do. `ask(unknown)` gives the limits of each, in their
  // order.
  template <class Ask>
  ServerLimits OfAll(const std::vector<int>& addresses, const Ask& ask) {
    if (!Unknown(addresses).empty()) {
      absl::MutexLock asking(&asking_);
      const std::vector<int> unknown = Unknown(addresses);
      if (!unknown.empty()) Remember(unknown, ask(unknown));
    }
    absl::MutexLock lock(&mutex_);
    ServerLimits all{
        .max_message_bytes = INT64_MAX, .streams = true, .mask_data = true, .devices = 0};
    bool any = false;
    for (int address : addresses) {
      auto known = known_.find(address);
      if (known == known_.end()) continue;
      any = true;
      all.max_message_bytes = std::min(all.max_message_bytes, known->second.max_message_bytes);
      all.streams = all.streams && known->second.streams;
      all.mask_data = all.mask_data && known->second.mask_data;
      all.devices += known->second.devices;
    }
    return any ? all : ServerLimits();
  }

  // After these the server may be another one, or the limit another.
  void Forget(const absl::Status& failure) {
    if (!absl::IsUnavailable(failure) && !absl::IsResourceExhausted(failure)) return;
    absl::MutexLock lock(&mutex_);
    known_.clear();
  }

 private:
  std::vector<int> Unknown(const std::vector<int>& addresses) {
    absl::MutexLock lock(&mutex_);
    std::vector<int> unknown;
    for (int address : addresses) {
      if (known_.count(address) == 0) unknown.push_back(address);
    }
    return unknown;
  }
  void Remember(const std::vector<int>& addresses,
                const std::vector<absl::StatusOr<ServerLimits>>& answers) {
    absl::MutexLock lock(&mutex_);
    for (size_t n = 0; n < addresses.size(); ++n) {
      const absl::StatusOr<ServerLimits>& answer = answers[n];
      if (answer.ok() && answer->max_message_bytes > 0) known_[addresses[n]] = *answer;
    }
  }

  absl::Mutex asking_;  // before mutex_
  absl::Mutex mutex_;
  std::map<int, ServerLimits> known_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
