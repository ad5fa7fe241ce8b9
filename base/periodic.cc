#include "base/periodic.h"

#include <utility>

#include "base/clock.h"

namespace attnd {

Periodic::Periodic(absl::Duration period, std::function<void()> work)
    : thread_([this, period, work = std::move(work)] {
        while (true) {
          {
            absl::MutexLock lock(&mutex_);
            const absl::Time due = SteadyNow() + period;
            while (!stopping_ && changed_.WaitUntil(mutex_, due)) {
            }
            if (stopping_) return;
          }
          work();
        }
      }) {}

Periodic::~Periodic() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.Signal();
  }
  thread_.join();
}

}  // namespace attnd
