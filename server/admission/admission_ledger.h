// AdmissionLedger: what is reserved now, in total, by each caller and of each device. Admission
// asks it and every Ticket gives back to it. Any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/admission/admission_limits.h"
#include "server/admission/deadline_order.h"

namespace attnd {

// Memory of leases that would have to be evicted.
struct LeasesInTheWay {
  int place = 0;
  int64_t bytes = 0;
};

// Says what one call takes of a device that can compute it, and of staging memory.
struct DeviceChoice {
  int device;
  int64_t staging_bytes;
  AdmissionDeviceUse part;
  int64_t device_limit;  // bytes of its memory
  double pace;           // of its queue
};

// Says what one call needs.
struct Wanted {
  const CallerFlow& flow;
  absl::Time now, due, deadline;
  absl::Span<const DeviceChoice> choices;  // one at least
};

// Says what a call has got.
struct Taken {
  DeviceChoice choice;
  uint64_t number;  // the call's in its flow
};

// One call's estimate may be wrong by this factor, so a call is refused only if it misses its
// deadline by more. The work ahead counts in full: DeadlineOrder::kQueueMargin.
inline constexpr double kEstimateSlack = 2;

// Tells a call that is refused now when to come back: after half of the queue's time, within
// bounds.
absl::Duration RetryDelay(double seconds_ahead);

class AdmissionLedger {
 public:
  explicit AdmissionLedger(size_t devices) : devices_(devices) {}

  // Reserves on the device estimated to finish the call first; on one without enough memory now
  // only if there is no other. Calls that come together see what each other took. When leases take
  // the missing memory, `in_the_way` says how many of their bytes, and where.
  absl::StatusOr<Taken> Take(const AdmissionLimits& limits, const Wanted& call,
                             LeasesInTheWay* in_the_way);
  void StartWork(const CallerFlow& flow, int device, const DeadlineOrder::Place& place);
  // The device has finished a call.
  void GiveBackWork(const CallerFlow& flow, int device, const AdmissionDeviceUse& part,
                    const DeadlineOrder::Place& place);
  void GiveBack(const std::string& caller, const AdmissionUse& part);
  // Staging memory for others than admitted calls, until GiveBack. Errors and `in_the_way` as
  // Take's.
  absl::Status HoldStaging(const AdmissionLimits& limits, const std::string& caller, int64_t bytes,
                           LeasesInTheWay* in_the_way);
  // Whether the caller has more than half of its share of staging memory, or all callers have more
  // than half of what there is.
  bool HoldsOverHalf(const AdmissionLimits& limits, const std::string& caller) const;
  // `taken` of the device's memory become a lease of `bytes`, which ends with taken 0 and −bytes.
  void LeaseDeviceMemory(int device, int64_t taken, int64_t bytes);
  // For others than calls, until GiveBackHeld. Errors and `in_the_way` as Take's.
  absl::Status HoldDeviceMemory(int device, int64_t bytes, int64_t limit,
                                LeasesInTheWay* in_the_way);
  void GiveBackHeld(int device, int64_t bytes);
  // From the caller's account to the leases'.
  void BecomeLease(const std::string& caller, int64_t bytes);

  AdmissionDeviceUse device_use(int device) const;
  AdmissionUse use() const;
  void Fence(int device);
  bool is_fenced(int device) const;

  std::atomic<bool> draining{false};
  std::atomic<int64_t> last_refused_nanos{std::numeric_limits<int64_t>::min()};

 private:
  const DeviceChoice& FirstToFinish(absl::Span<const DeviceChoice> choices) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckDeadline(const Wanted& call, const DeviceChoice& choice)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Predicts what the call would meet in its flow, of which the batcher serves the share of its
  // weight.
  DeadlineOrder::Outlook OutlookOf(const Wanted& call, const DeviceChoice& choice) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // True with a probability that falls from 1 at half of the pressure to 0 at all of it.
  bool LetsIn(double pressure) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckRoom(const AdmissionLimits& limits, const Wanted& call,
                         const DeviceChoice& choice, LeasesInTheWay* in_the_way) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckStaging(const AdmissionLimits& limits, const std::string& caller, int64_t bytes,
                            double seconds_ahead, LeasesInTheWay* in_the_way) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Add(const std::string& caller, const AdmissionUse& part)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddToDevice(int device, const AdmissionDeviceUse& part)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  struct Device {
    AdmissionDeviceUse use;
    bool fenced = false;
    absl::flat_hash_map<CallerFlow, DeadlineOrder> flows;
    double weights = 0;  // of all flows; whole numbers
  };
  mutable absl::Mutex mutex_;
  std::vector<Device> devices_ ABSL_GUARDED_BY(mutex_);
  AdmissionUse use_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, AdmissionUse> callers_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;
  std::minstd_rand random_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
