// LeaseReaper: a thread that gives the memory of leases back soon after their time is over, also
// when nobody calls. (A lease ends for its owner at its time exactly: the table looks at each use.)
#pragma once

#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "server/lease_table.h"

namespace attnd {

class LeaseReaper {
 public:
  static constexpr absl::Duration kPeriod = absl::Seconds(1);

  // `leases` outlives it.
  explicit LeaseReaper(LeaseTable& leases)
      : thread_([this, &leases] {
          while (!stop_.WaitForNotificationWithTimeout(kPeriod)) leases.Expire();
        }) {}
  ~LeaseReaper() {
    stop_.Notify();
    thread_.join();
  }

 private:
  absl::Notification stop_;
  std::thread thread_;
};

}  // namespace attnd
