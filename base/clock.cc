#include "base/clock.h"

#include <chrono>

namespace attnd {

absl::Time SteadyNow() {
  using Steady = std::chrono::steady_clock;
  static const absl::Time began_at = absl::Now();
  static const Steady::time_point began = Steady::now();
  return began_at + absl::FromChrono(Steady::now() - began);
}

}  // namespace attnd
