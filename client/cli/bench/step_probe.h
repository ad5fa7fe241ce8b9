// ProbeStep: what a live daemon and the link to it reach, measured by training steps of a part of a
// problem that is large enough to tell.
//
// A step is one forward and one backward, as a caller without other calls makes it. Its time with
// every key cut off, so that nothing is to be computed, is the transfer's; what the keys add is the
// engine's.
#pragma once

#include "absl/status/statusor.h"
#include "attention/problem.h"
#include "client/attention_client.h"

namespace attnd {

// Counts the bytes that a step moves, of ways that are used at a time those of the fuller one, and
// its work.
struct StepWork {
  double bytes = 0, flops = 0;
  double device_bytes = 0;  // memory that a module holds; 0: no module
};
StepWork WorkOf(const Problem& problem, bool leases);

struct StepRates {
  double round_trip = 0;  // seconds of the smallest call
  double seconds_per_byte = 0, seconds_per_flop = 0;
};

// Errors: the first call's.
absl::StatusOr<StepRates> ProbeStep(AttentionClient& client, const Problem& problem, bool leases);

}  // namespace attnd
