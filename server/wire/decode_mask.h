// attnd.v1.MaskSpec → MaskSpec, field by field. What the numbers may be, ValidateMask checks; here,
// only that there is one spelling of each list and that depth is bounded, which a MaskExpr needs.
#pragma once

#include "absl/status/statusor.h"
#include "attention/masks/mask_spec.h"
#include "proto/attnd/v1/mask.pb.h"

namespace attnd {

// `wire` brings a mask and no id. INVALID_ARGUMENT names the field.
absl::StatusOr<MaskSpec> DecodeMask(const v1::MaskSpec& wire);

MaskOrigin DecodeMaskOrigin(const v1::MaskSpec& wire);

}  // namespace attnd
