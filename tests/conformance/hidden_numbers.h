// Hidden numbers: what a row does not see may be of any size. Each way of hiding keys, with large
// finite numbers in keys and values that the first 64 rows of a sequence do not see, and in the
// output gradients of rows that see nothing. Every result stays within the bounds of its own
// visible numbers, and results of rows that share no tile with a row that sees a large number are
// the same bits as with ordinary numbers there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/error_bounds.h"
#include "kernels/backend.h"
#include "tests/conformance/conformance_case.h"

namespace attnd {

struct HiddenNumberCase {
  std::string name;
  Problem problem;
  float key = 0, value = 0;     // of hidden numbers of K, and of V and dO; either sign
  bool is_seen_by_none = true;  // else later rows see them
};

// `rows`: of each sequence, more than 64.
std::vector<HiddenNumberCase> HiddenNumberCases(ElementType element, int64_t rows,
                                                int64_t head_dim);
// Returns what differs; empty where the engine refuses the problem.
std::vector<std::string> CheckHiddenNumbers(Backend& backend, const HiddenNumberCase& of,
                                            CallMemory& memory, const EnginePrecision& precision);

}  // namespace attnd
