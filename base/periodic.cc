#include "base/periodic.h"

#include <utility>

namespace attnd {

Periodic::Periodic(absl::Duration period, std::function<void()> work)
    : thread_([this, period, work = std::move(work)] {
        while (!stop_.WaitForNotificationWithTimeout(period)) work();
      }) {}

Periodic::~Periodic() {
  stop_.Notify();
  thread_.join();
}

}  // namespace attnd
