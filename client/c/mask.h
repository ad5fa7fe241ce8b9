// attnd_mask: a checked mask and the place of its caller's problems in it. Immutable; any thread.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "attention/masks/mask_description.h"
#include "client/c/attnd_client.h"

struct attnd_mask {
  std::shared_ptr<const attnd::MaskDescription> mask;  // and calls that use it
  attnd::MaskOrigin origin;
};

namespace attnd {

// `spec`: a serialized attnd.v1.MaskSpec. InvalidArgument names the field, OutOfRange the limit.
absl::Status MakeMask(const void* spec, int64_t spec_bytes, const MaskCall& sizes, attnd_mask& out);

}  // namespace attnd
