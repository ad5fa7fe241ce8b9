// The conformance table's masks by description: each kind, alone and beside each other option.
#pragma once

#include <vector>

#include "tests/conformance/conformance_case.h"

namespace attnd {

std::vector<ConformanceCase> MaskCases();

}  // namespace attnd
