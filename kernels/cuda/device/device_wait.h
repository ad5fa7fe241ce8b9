// DeviceWait: waiting for an event without the driver's synchronising calls: a short spin, so that
// a small call's answer is not late by a sleep, then sleeps that grow with the time waited (1/64 of
// it, 20 us to 0.2 ms). A device that has not moved for kHungSeconds counts as lost.
// Errors: the driver's; INTERNAL "hung". One thread at a time per event.
#pragma once

#include "absl/status/status.h"
#include "kernels/cuda/driver/handles.h"

namespace attnd::cuda {

inline constexpr double kHungSeconds = 120;

absl::Status WaitFor(const Event& event);

}  // namespace attnd::cuda
