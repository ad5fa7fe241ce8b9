// attnd.v1.Problem ↔ Problem, field by field: of a call, and the options in it that an attention op
// of a layout has too. Decoding refuses what a Problem cannot hold; Validate checks the numbers.
// Errors are InvalidArgument "PATH.field: expected ..., got ...". Any thread.
#pragma once

#include <google/protobuf/repeated_field.h>

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/problem.h"
#include "proto/attnd/v1/attention.pb.h"

namespace attnd {

// Everything but the mask, which a caller may know by its id. Errors name "problem.FIELD".
absl::StatusOr<Problem> DecodeProblemFields(const v1::Problem& wire);

// The same without sizes, element type and layout, which stay those of Problem().
absl::StatusOr<Problem> DecodeProblemOptions(const v1::Problem& wire, absl::string_view path);

// Only what differs from a field's absence is set, so that the header of a plain call is a few
// dozen bytes. `problem` is valid.
enum class MaskForm {
  kWhole,
  kId,  // a mask that the server should know
};
v1::Problem EncodeProblem(const Problem& problem, MaskForm mask = MaskForm::kWhole);
// With `mask` in the place of the problem's own.
v1::Problem EncodeProblem(const Problem& problem, v1::MaskSpec mask);

// Sets what DecodeProblemOptions reads.
void EncodeProblemOptions(const Problem& problem, v1::Problem& wire);

// Parts that other messages have too. Errors name "PATH.FIELD".
absl::StatusOr<BroadcastShape> DecodeShape(absl::string_view path, absl::string_view field,
                                           const google::protobuf::RepeatedField<uint32_t>& shape);
// The dropout threshold of a probability.
absl::StatusOr<uint32_t> DecodeDropoutP(absl::string_view path, absl::string_view field, float p);

}  // namespace attnd
