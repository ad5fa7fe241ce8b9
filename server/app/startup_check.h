// StartupCheck: readiness means that the engine gave a known answer. One small causal, grouped-head
// problem, forward and backward, compared with the float64 reference; then a larger one, timed, so
// that admission starts from a rate that this machine has shown. Takes some milliseconds.
#pragma once

#include "absl/status/status.h"
#include "kernels/backend.h"
#include "server/admission/cost_model.h"

namespace attnd {

// INTERNAL naming the tensor and the error when an answer is wrong.
absl::Status StartupCheck(Backend& backend, CostModel& cost);

}  // namespace attnd
