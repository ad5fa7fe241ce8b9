// Under ThreadSanitizer, each of these reports a race unless tsan_absl.cc tells it of the lock.
#include <gtest/gtest.h>

#include <thread>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace attnd {
namespace {

TEST(TsanAbsl, SeesMutexAndConditions) {
  absl::Mutex mutex;
  int value = 0;
  std::thread other([&] {
    for (int i = 0; i < 1000; ++i) {
      absl::MutexLock lock(&mutex);
      ++value;
    }
  });
  mutex.LockWhen(absl::Condition(
      +[](int* v) { return *v >= 10; }, &value));
  value += 1000000;
  mutex.Await(absl::Condition(
      +[](int* v) { return *v >= 1001000; }, &value));
  mutex.Unlock();
  other.join();
  EXPECT_EQ(value, 1001000);
}

TEST(TsanAbsl, SeesCondVar) {
  absl::Mutex mutex;
  absl::CondVar changed;
  int value = 0;
  std::thread other([&] {
    absl::MutexLock lock(&mutex);
    value = 1;
    changed.Signal();
  });
  {
    absl::MutexLock lock(&mutex);
    while (value == 0) changed.WaitWithTimeout(&mutex, absl::Seconds(1));
    value = 2;
  }
  other.join();
  EXPECT_EQ(value, 2);
}

TEST(TsanAbsl, SeesNotificationHoweverItIsReceived) {
  int value = 0;
  absl::Notification first, second;
  std::thread other([&] {
    value = 1;
    first.Notify();
    while (!second.HasBeenNotified()) std::this_thread::yield();
    EXPECT_EQ(value, 2);
  });
  first.WaitForNotification();
  value = 2;
  second.Notify();
  other.join();
}

TEST(TsanAbsl, SeesBlockingCounter) {
  int values[2] = {0, 0};
  absl::BlockingCounter counter(2);
  std::thread a([&] { values[0] = 1, counter.DecrementCount(); });
  std::thread b([&] { values[1] = 2, counter.DecrementCount(); });
  counter.Wait();
  EXPECT_EQ(values[0] + values[1], 3);
  a.join();
  b.join();
}

}  // namespace
}  // namespace attnd
