#include "server/schedule/deadline_timer.h"

#include <gtest/gtest.h>

#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

namespace attnd {
namespace {

// Collects what expired, in order.
class Expired {
 public:
  void Add(uint64_t id) {
    absl::MutexLock lock(&mutex_);
    ids_.push_back(id);
  }
  std::vector<uint64_t> WaitFor(size_t count) {
    absl::MutexLock lock(&mutex_);
    auto enough = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return ids_.size() >= count; };
    mutex_.Await(absl::Condition(&enough));
    return ids_;
  }

 private:
  absl::Mutex mutex_;
  std::vector<uint64_t> ids_ ABSL_GUARDED_BY(mutex_);
};

TEST(DeadlineTimer, CallsInTheOrderOfDeadlines) {
  Expired expired;
  DeadlineTimer timer([&](uint64_t id) { expired.Add(id); });
  absl::Time now = absl::Now();
  timer.Add(3, now + absl::Milliseconds(30));
  timer.Add(1, now + absl::Milliseconds(10));
  timer.Add(2, now + absl::Milliseconds(20));
  EXPECT_EQ(expired.WaitFor(3), (std::vector<uint64_t>{1, 2, 3}));
}

TEST(DeadlineTimer, ForgetsWhatIsRemoved) {
  Expired expired;
  DeadlineTimer timer([&](uint64_t id) { expired.Add(id); });
  absl::Time soon = absl::Now() + absl::Milliseconds(20);
  timer.Add(1, soon);
  timer.Add(2, soon);
  timer.Remove(1, soon);
  EXPECT_EQ(expired.WaitFor(1), (std::vector<uint64_t>{2}));
}

TEST(DeadlineTimer, WakesForADeadlineBeforeTheOneItWaitsFor) {
  Expired expired;
  DeadlineTimer timer([&](uint64_t id) { expired.Add(id); });
  timer.Add(1, absl::Now() + absl::Hours(1));
  timer.Add(2, absl::Now() + absl::Milliseconds(5));
  EXPECT_EQ(expired.WaitFor(1), (std::vector<uint64_t>{2}));
}

TEST(DeadlineTimer, StopsWithDeadlinesPending) {
  Expired expired;
  DeadlineTimer timer([&](uint64_t id) { expired.Add(id); });
  timer.Add(1, absl::Now() + absl::Hours(1));
}

}  // namespace
}  // namespace attnd
