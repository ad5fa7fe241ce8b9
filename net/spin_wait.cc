#include "net/spin_wait.h"

#include <algorithm>
#include <thread>

#include "base/cpu_quota.h"

namespace attnd {
namespace {

const Clock& TheRealClock() {
  static const auto* clock = new RealClock;
  return *clock;
}

}  // namespace

SpinWait::SpinWait() : SpinWait(AvailableCpus(), TheRealClock()) {}

bool SpinWait::Wait(bool alone, absl::FunctionRef<bool()> look, absl::FunctionRef<bool()> sleep) {
  if (!looks_ || !alone) return sleep();
  const bool looks = in_a_row_ >= wanted_;
  const absl::Time long_at = clock_.Now() + kShort;
  const bool came = (looks && Look(look, long_at)) || sleep();
  if (came && clock_.Now() < long_at) {
    in_a_row_ = std::min(in_a_row_ + 1, kMaxWanted);
    if (looks) wanted_ = std::max(wanted_ / 2, 1);
  } else {
    in_a_row_ = 0;
    if (looks) wanted_ = std::min(wanted_ * 2, kMaxWanted);
  }
  return came;
}

bool SpinWait::Look(absl::FunctionRef<bool()> look, absl::Time until) {
  do {
    if (look()) return true;
    std::this_thread::yield();  // what is to come may need this core
  } while (clock_.Now() < until);
  return false;
}

}  // namespace attnd
