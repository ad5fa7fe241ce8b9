// The tensors of a Forward or Backward: their names and wire fields, and those that a problem
// implies. The decoder makes a call's TensorList from them. Any thread.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "attention/problem.h"
#include "server/call/attention_tensors.h"
#include "server/call/tensor_spec.h"

namespace attnd {

absl::string_view TensorName(int id);
// The field of a tensor in ForwardRequest and BackwardRequest, which agree.
int RequestField(int id);

// The lists of a mask that lie outside of it.
TensorSpec MaskDataInput(int64_t bytes);

// Lists the tensors that a call must bring; with a residual d_o alone, and the rest is kept. d_lse
// is not listed. Sizes of a validated problem fit 64 bits.
TensorList AttentionInputs(const Problem& problem, Direction direction, bool on_residual);
TensorSpec LseGradient(const Problem& problem);
// Adds what the engine writes: lse always, wanted or not.
void AddAttentionOutputs(const Problem& problem, Direction direction, bool want_lse,
                         TensorList& tensors);

}  // namespace attnd
