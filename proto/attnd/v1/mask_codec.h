// attnd.v1.MaskSpec ↔ MaskSpec, field by field. What the numbers may be, ValidateMask checks; here,
// only that there is one spelling of each list and that depth is bounded, which a MaskExpr needs.
// Any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/masks/mask_spec.h"
#include "proto/attnd/v1/attention.pb.h"

namespace attnd {

// `wire` brings a mask and no id. InvalidArgument "problem.mask.pattern[3]...: expected ..., got
// ...". `data`: the lists that lie outside, of exactly MaskDataBytes.
absl::StatusOr<MaskSpec> DecodeMask(const v1::MaskSpec& wire, absl::string_view data = "");

MaskOrigin DecodeMaskOrigin(const v1::MaskSpec& wire);

v1::MaskSpec EncodeMaskSpec(const MaskSpec& mask);
// With its long lists outside, as mask_data.
struct SplitMask {
  v1::MaskSpec spec;
  std::string data;
};
SplitMask EncodeSplitMask(const MaskSpec& mask);
// Absent where it is zero.
void EncodeMaskOrigin(const MaskOrigin& origin, v1::MaskSpec& wire);

}  // namespace attnd
