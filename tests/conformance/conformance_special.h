// The conformance table's special values: NaN, infinities and the largest float16 in every input,
// crossed with everything that hides keys from rows.
#pragma once

#include <vector>

#include "tests/conformance/conformance_case.h"

namespace attnd {

std::vector<ConformanceCase> SpecialValueCases();

}  // namespace attnd
