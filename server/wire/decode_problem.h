// attnd.v1.Problem → Problem: the field by field part of Decode. INVALID_ARGUMENT names the field.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "attention/masks/compiled_mask.h"
#include "attention/problem.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/masks/mask_store.h"

namespace attnd {

struct DecodedProblem {
  Problem problem;  // valid in the sense of Validate
  // Its mask's tiles, which are found (MaskPlans) as long as this lives. Null: no mask.
  std::shared_ptr<const CompiledMask> plan;
};

// A mask is kept for the caller, or found by its id; and compiled.
absl::StatusOr<DecodedProblem> DecodeProblem(const v1::Problem& wire, const CallersMasks& masks);

// Before any tensor is read: that the mask of a problem, if it has one, can be compiled, what it
// costs, and that no row is empty where that is an error.
absl::Status PlanMask(const CallersMasks& masks, DecodedProblem& decoded);

}  // namespace attnd
