// attnctl bench --module: a training step of a well-known stack of layers whose weights stay on the
// daemon.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "attention/element.h"
#include "client/cli/bench/step_probe.h"
#include "client/cli/session.h"

namespace attnd {

struct ModuleBenchFlags {
  std::string module;  // empty: attention is measured
  std::string rows;    // BATCH,LENGTH; empty: 1 and the model's
  int64_t layers = 0;  // 0: the model's
};

std::vector<std::string> BenchedModules();

// Counts what a training step of the module moves and computes. INVALID_ARGUMENT naming the flag.
absl::StatusOr<StepWork> WorkOfModule(const ModuleBenchFlags& flags, ElementType element);

// Registers the module under a name of its own, trains it with random numbers and releases it.
// INVALID_ARGUMENT naming the flag, or what the daemon says.
absl::Status BenchModule(Session& session, const ModuleBenchFlags& flags, ElementType element,
                         absl::Duration warmup, absl::Duration duration);

}  // namespace attnd
