// HelpOf: from the list of name, type, labels and meaning of each series that the daemon exposes.
// The meaning is the series' help text at /metrics, and its row in docs/METRICS.md (./dev docs
// writes it). A series that has no row there cannot be registered. Any thread.
#pragma once

#include "absl/strings/string_view.h"

namespace attnd {

// The help text of that series, which must have a row.
const char* HelpOf(absl::string_view name);

}  // namespace attnd
