// ConformanceLaunch: places problems and their inputs in an engine's memory, runs them in one
// launch and brings the results back. Outputs and workspace start as NaN, and 64 bytes behind each
// must stay as they were. One thread. Used by backend_conformance.cc and the emulator's own tests.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "tests/conformance/conformance_case.h"

namespace attnd {

using Bytes = std::vector<std::byte>;

// A problem with its inputs; o and lse are what backward is given.
struct LaunchItem {
  const Problem* problem;
  const ProblemInputs* inputs;
  Bytes o, lse;
  bool with_d_lse = true;
  bool keep = false;                         // forward leaves its tensors on the device
  const DeviceResidual* residual = nullptr;  // backward finds them there, and gets no others
};

struct ForwardResults {
  Bytes o, lse;
  friend bool operator==(const ForwardResults&, const ForwardResults&) = default;
};
struct BackwardResults {
  Bytes d_q, d_k, d_v, d_bias, d_sink;
  friend bool operator==(const BackwardResults&, const BackwardResults&) = default;
};

template <class Results>
struct LaunchOutcome {
  std::vector<Results> results;                       // one per item
  std::vector<std::unique_ptr<DeviceResidual>> kept;  // of forward, one per item
  LaunchReport report;
};

// Fails with the launch's own error, or INTERNAL naming what was written behind its end.
absl::StatusOr<LaunchOutcome<ForwardResults>> LaunchForward(Backend& backend, CallMemory& memory,
                                                            const std::vector<LaunchItem>& items);
absl::StatusOr<LaunchOutcome<BackwardResults>> LaunchBackward(Backend& backend, CallMemory& memory,
                                                              const std::vector<LaunchItem>& items);

// Forward, then backward of its o and lse, from the host's memory; without the lse's gradient.
struct BothResults {
  ForwardResults forward;
  BackwardResults backward;
};
absl::StatusOr<BothResults> RunBothWays(Backend& backend, const Problem& problem,
                                        const ProblemInputs& inputs);

}  // namespace attnd
