// attnd.v1.Problem → Problem of a call, valid, with its mask kept or found and compiled: the part
// of Decode that concerns the problem. INVALID_ARGUMENT names the field.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "attention/masks/compiled_mask.h"
#include "attention/problem.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/keep/mask_table.h"

namespace attnd {

struct DecodedProblem {
  Problem problem;  // valid in the sense of Validate
  // Its mask's tiles, which are found (MaskPlans) as long as this lives. Null: no mask.
  std::shared_ptr<const CompiledMask> plan;
  int64_t mask_data_bytes = 0;  // of the mask's lists outside of it
};

// Brings so many bytes, the lists of a mask outside of it, or says why not.
using ReadMaskData = absl::FunctionRef<absl::StatusOr<std::string>(int64_t bytes)>;

// A mask is kept for the caller, or found by its id; and compiled.
absl::StatusOr<DecodedProblem> DecodeProblem(const v1::Problem& wire, const CallersMasks& masks,
                                             ReadMaskData read_mask_data);

// Refuses a call that has brought so many bytes of mask_data although no list lies there.
absl::Status RefuseMaskData(int64_t bytes);

// Before any tensor is read: that the mask of a problem, if it has one, can be compiled, what it
// costs, and that no row is empty where that is an error.
absl::Status PlanMask(const CallersMasks& masks, DecodedProblem& decoded);

}  // namespace attnd
