// MetricList: name, type, labels and meaning of each series that the daemon exposes. The meaning is
// the series' help text at /metrics, and its row in docs/METRICS.md (./dev docs writes it). A
// series that has no row here cannot be registered. Any thread.
#pragma once

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace attnd {

struct MetricText {
  absl::string_view name;  // its last word but "total" is the unit
  const char* type;        // counter, gauge or histogram
  const char* labels;      // joined by ", "
  const char* help;        // a sentence or two
};

absl::Span<const MetricText> MetricList();

// The help text of that series, which must be in the list.
const char* HelpOf(absl::string_view name);

}  // namespace attnd
