// attnd.v1.Problem → Problem: the field by field part of Decode. INVALID_ARGUMENT names the field.
#pragma once

#include "absl/status/statusor.h"
#include "attention/problem.h"
#include "proto/attnd/v1/attention.pb.h"

namespace attnd {

// Valid in the sense of Validate when OK. `wire` holds no mask pattern.
absl::StatusOr<Problem> DecodeProblem(const v1::Problem& wire);

}  // namespace attnd
