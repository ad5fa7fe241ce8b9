// ProblemText: one line that describes a Problem, for logs, test names and tables:
//     float16 bhld b2 h8/2 q128 k256 d64 causal bottom_right dropout=26/256
// Only what differs from the plain case is named. Any thread.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "attention/problem.h"

namespace attnd {

absl::string_view LayoutName(Layout layout);  // "bhld", "blhd", "packed_thd", "packed_htd"

std::string ProblemText(const Problem& problem);

}  // namespace attnd
