// attnd.v1.Problem → Problem: the field by field part of Decode. INVALID_ARGUMENT names the field.
#pragma once

#include "absl/status/statusor.h"
#include "attention/problem.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/masks/mask_store.h"

namespace attnd {

// Valid in the sense of Validate when OK. A mask is kept for the caller, or found by its id.
absl::StatusOr<Problem> DecodeProblem(const v1::Problem& wire, const CallersMasks& masks);

}  // namespace attnd
