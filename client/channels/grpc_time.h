// GrpcTime: a steady time as gRPC counts it. A std::chrono one would be the system's clock, which
// may be set before gRPC has looked. Pure but for the clocks; any thread.
#pragma once

#include <grpc/support/time.h>

#include <cstdint>

#include "absl/time/time.h"
#include "base/clock.h"

namespace attnd {

inline gpr_timespec GrpcTime(absl::Time steady) {
  if (steady == absl::InfiniteFuture()) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
  const int64_t left = absl::ToInt64Nanoseconds(steady - SteadyNow());
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_nanos(left, GPR_TIMESPAN));
}

}  // namespace attnd
