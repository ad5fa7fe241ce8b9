// CheckRows: whether a call's rows make sense, and fit a module's attention. Any thread.
#pragma once

#include "absl/status/status.h"
#include "modules/call_rows.h"
#include "modules/graph.h"

namespace attnd {

// OK, or InvalidArgument "rows.length: expected ..., got ...". Then ProblemOf of any attention op
// gives a valid problem.
absl::Status CheckRows(const ModuleGraph& graph, const CallRows& rows);

}  // namespace attnd
