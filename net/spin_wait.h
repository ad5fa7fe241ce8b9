// SpinWait: waits for what mostly comes at once.
//
// A thread that goes to sleep is 5 to 50 us late on a VM, at each end of a call: more than a small
// call's work. So one that waits alone, and has lately waited less than kShort, looks for what is
// to come for up to kShort before it sleeps. Waits that last longer are slept through: after each
// look in vain twice as many short waits have to pass before the next. So looking costs no more
// processor time than the short waits themselves last, and next to nothing where they are long.
//
// Threads: any.
#pragma once

#include <atomic>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace attnd {

class SpinWait {
 public:
  static constexpr absl::Duration kShort = absl::Microseconds(100);
  static constexpr int kMaxWanted = 1024;

  // With one processor whoever looks is in the way of what it looks for: it never does.
  SpinWait();  // with those of this process
  SpinWait(int processors, const Clock& clock) : looks_(processors > 1), clock_(clock) {}

  // `look` does not wait, `sleep` does; each tells whether something has come, as this does.
  // `alone`: no other thread waits for such events, or would have to be woken for them.
  bool Wait(bool alone, absl::FunctionRef<bool()> look, absl::FunctionRef<bool()> sleep);

 private:
  bool Look(absl::FunctionRef<bool()> look, absl::Time until);

  const bool looks_;
  const Clock& clock_;
  // Only the thread that waits uses these; a value that another has just replaced does no harm.
  std::atomic<int> in_a_row_{0};  // short waits so far
  std::atomic<int> wanted_{1};    // short waits before a look
};

}  // namespace attnd
