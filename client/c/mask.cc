#include "client/c/mask.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "attention/problem.h"
#include "base/status_macros.h"
#include "proto/attnd/v1/mask_codec.h"

namespace attnd {
namespace {

absl::Status CheckRange(absl::string_view field, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, ": expected 1..", most, ", got ", value));
}

}  // namespace

absl::Status MakeMask(const void* spec, int64_t spec_bytes, const MaskCall& sizes,
                      attnd_mask& out) {
  RETURN_IF_ERROR(CheckRange("spec_bytes", spec_bytes, std::numeric_limits<int32_t>::max()));
  RETURN_IF_ERROR(CheckRange("batch", sizes.batch, kMaxBatch));
  RETURN_IF_ERROR(CheckRange("q_heads", sizes.q_heads, kMaxHeads));
  RETURN_IF_ERROR(CheckRange("rows", sizes.rows, kMaxLength));
  RETURN_IF_ERROR(CheckRange("keys", sizes.keys, kMaxLength));
  v1::MaskSpec wire;
  if (!wire.ParseFromArray(spec, static_cast<int>(spec_bytes)) || !wire.id().empty()) {
    return absl::InvalidArgumentError("spec: expected an attnd.v1.MaskSpec without id, got others");
  }
  ASSIGN_OR_RETURN(MaskSpec decoded, DecodeMask(wire));
  out.origin = decoded.origin;
  ASSIGN_OR_RETURN(out.mask, MaskDescription::Make(decoded, sizes));
  return absl::OkStatus();
}

}  // namespace attnd
