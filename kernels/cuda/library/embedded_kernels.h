// The kernel archives inside this program, one a target.
#pragma once

#include <vector>

#include "absl/strings/string_view.h"

namespace attnd {

std::vector<absl::string_view> EmbeddedKernelArchives();

}  // namespace attnd
