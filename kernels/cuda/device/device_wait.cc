#include "kernels/cuda/device/device_wait.h"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "kernels/backend.h"

namespace attnd::cuda {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kSpin(100);
constexpr std::chrono::nanoseconds kMinSleep(20'000), kMaxSleep(200'000);

// The kernel's own slack of 50 us would be the larger part of a short sleep.
void SleepPrecisely() {
  static thread_local bool done = (prctl(PR_SET_TIMERSLACK, 1000), true);
  (void)done;
}

// Each question takes a lock of the driver that other launches need to enqueue: about one a
// microsecond is enough.
void Pause() {
  for (int n = 0; n < 20; ++n) __builtin_ia32_pause();
}

}  // namespace

absl::Status WaitFor(const Event& event) {
  const Clock::time_point begin = Clock::now();
  while (true) {
    ASSIGN_OR_RETURN(const bool passed, event.HasPassed());
    if (passed) return absl::OkStatus();
    const std::chrono::nanoseconds waited = Clock::now() - begin;
    if (waited < kSpin) {
      Pause();
      continue;
    }
    if (waited > std::chrono::duration<double>(kHungSeconds)) {
      return DeviceLost(
          absl::InternalError(absl::StrCat("the GPU hung: no progress for ", kHungSeconds, " s")));
    }
    SleepPrecisely();
    std::this_thread::sleep_for(std::clamp(waited / 64, kMinSleep, kMaxSleep));
  }
}

}  // namespace attnd::cuda
