// StagedTensors: a call's staging memory: its inputs in the order in which they travel, then its
// workspace; and its outputs. Landing fills it. It moves with the call and frees its memory when
// destroyed.
#pragma once

#include <cstddef>

#include "absl/time/time.h"
#include "server/admission/staging_pool.h"
#include "server/call/tensor_spec.h"

namespace attnd {

struct StagedTensors {
  StagingBlock inputs;  // and workspace
  StagingBlock outputs;
  TensorPlaces at;                                // of every tensor of the call
  std::byte* workspace = nullptr;                 // null: none needed
  absl::Time landed_at = absl::InfiniteFuture();  // since when the inputs hold what was sent

  std::byte* operator[](int id) const { return at[id]; }
};

}  // namespace attnd
