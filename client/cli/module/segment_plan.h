// attnctl module plan --rows: which ops of a module's layers run as one kernel on a GPU, and what
// that saves, from the layout alone: no daemon is asked.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "client/cli/session.h"
#include "modules/layout.h"

namespace attnd {

struct SegmentPlanFlags {
  std::string rows;          // numbers of rows, separated by commas
  std::string gpu = "h100";  // modules/segments/bound.h
};

// INVALID_ARGUMENT naming the flag or the layout's field.
absl::Status PrintSegmentPlan(const Session& session, ModuleLayout layout,
                              const SegmentPlanFlags& flags);

}  // namespace attnd
