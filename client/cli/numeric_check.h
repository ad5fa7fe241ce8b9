// CheckCase: one problem computed by the daemon and by the float64 reference, forward and backward,
// and how far they lie apart. An error is measured in bounds (attention/error_bounds.h): at most 1
// is what rounding explains. Any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "attention/problem.h"
#include "client/attention_client.h"

namespace attnd {

// One direction of one case.
struct CheckOutcome {
  bool unsupported = false;  // the daemon answered UNIMPLEMENTED
  absl::Status status;       // of the call, other than that
  double error_in_bounds = 0;
  double absolute_error = 0;
  std::string worst_tensor;  // "o", "d_k", ...
};

struct CheckedCase {
  uint64_t seed = 0;
  Problem problem;
  CheckOutcome forward, backward;
};

CheckedCase CheckCase(AttentionClient& client, const Problem& problem, uint64_t seed);

// The options that a problem has, by name: the groups of the report ("float16", "causal", ...).
std::vector<std::string> FeaturesOf(const Problem& problem);

// All names that FeaturesOf may give, in the report's order.
std::vector<std::string> AllFeatures();

}  // namespace attnd
