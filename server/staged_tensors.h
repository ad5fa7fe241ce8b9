// StagedTensors: a call's place in staging memory: its inputs, in the order in which they travel,
// then its workspace; and its outputs. Landing fills it. Moves with the call; the memory is back
// when it dies.
#pragma once

#include <array>
#include <cstddef>

#include "absl/time/time.h"
#include "server/call.h"
#include "server/staging_pool.h"

namespace attnd {

// Where each tensor lies; null: not of this call.
struct TensorPlaces {
  std::array<std::byte*, kTensors> at = {};

  std::byte*& operator[](Tensor tensor) { return at[static_cast<int>(tensor)]; }
  std::byte* operator[](Tensor tensor) const { return at[static_cast<int>(tensor)]; }
  float* floats(Tensor tensor) const { return reinterpret_cast<float*>((*this)[tensor]); }
};

struct StagedTensors {
  StagingBlock inputs;  // and workspace
  StagingBlock outputs;
  TensorPlaces at;
  std::byte* workspace = nullptr;                 // null: none needed
  absl::Time landed_at = absl::InfiniteFuture();  // since when the inputs hold what was sent

  std::byte* operator[](Tensor tensor) const { return at[tensor]; }
};

}  // namespace attnd
