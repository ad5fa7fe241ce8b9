// BusyThread: whether a thread has more to do than it can: it has run for kBusy without a sleep and
// had its core all the time. One that shares its core, with the only caller perhaps, who takes it
// when he is answered, does not sleep either; more threads would be of no use to it.
//
// Threads: one at a time.
#pragma once

#include <cstdint>

namespace attnd {

// What a thread has used by `at`. Nanoseconds.
struct ThreadUse {
  int64_t at = 0;
  int64_t sleeps = 0;  // how often it has waited for something
  int64_t cpu = 0;     // that it has run

  static ThreadUse OfTheCaller();
};

class BusyThread {
 public:
  static constexpr int64_t kBusy = 1'000'000;

  explicit BusyThread(const ThreadUse& now) : slept_(now) {}

  bool IsBusy(const ThreadUse& now);

 private:
  ThreadUse slept_;  // when it last slept or had run for so long
};

}  // namespace attnd
