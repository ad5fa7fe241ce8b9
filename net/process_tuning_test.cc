#include "net/process_tuning.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdlib>
#include <utility>

#include "absl/synchronization/mutex.h"

namespace attnd {
namespace {

// Locks two mutexes in both orders, for which abseil's detector ends the program where it is built
// with one.
void LockInBothOrders() {
  absl::Mutex one, other;
  for (auto [first, second] : {std::pair(&one, &other), std::pair(&other, &one)}) {
    first->Lock();
    second->Lock();
    second->Unlock();
    first->Unlock();
  }
}

// Those of a sanitizer's malloc are all 0.
size_t BytesFromTheSystem() { return mallinfo2().arena + mallinfo2().hblkhd; }

TEST(ProcessTuningDeathTest, TurnsTheDeadlockDetectorOff) {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kAbort);
  EXPECT_DEATH(LockInBothOrders(), "");
  auto lock_when_tuned = [] {
    TuneForTransport();
    LockInBothOrders();
    std::_Exit(0);
  };
  EXPECT_EXIT(lock_when_tuned(), testing::ExitedWithCode(0), "");
}

TEST(ProcessTuning, KeepsFreedMemoryOfLargeMessages) {
  constexpr size_t kBytes = 48 << 20;
  TuneForTransport();
  void* message = std::malloc(kBytes);
  ASSERT_NE(message, nullptr);
  const size_t with_message = BytesFromTheSystem();
  std::free(message);
  EXPECT_EQ(BytesFromTheSystem(), with_message);
}

}  // namespace
}  // namespace attnd
