// attnd.v1.MaskSpec ↔ MaskSpec, field by field. What the numbers may be, ValidateMask checks; here,
// only that there is one spelling of each list and that depth is bounded, which a MaskExpr needs.
// Any thread.
#pragma once

#include "absl/status/statusor.h"
#include "attention/masks/mask_spec.h"
#include "proto/attnd/v1/attention.pb.h"

namespace attnd {

// `wire` brings a mask and no id. InvalidArgument "problem.mask.pattern[3]...: expected ..., got
// ...".
absl::StatusOr<MaskSpec> DecodeMask(const v1::MaskSpec& wire);

MaskOrigin DecodeMaskOrigin(const v1::MaskSpec& wire);

v1::MaskSpec EncodeMaskSpec(const MaskSpec& mask);
// Absent where it is zero.
void EncodeMaskOrigin(const MaskOrigin& origin, v1::MaskSpec& wire);

}  // namespace attnd
