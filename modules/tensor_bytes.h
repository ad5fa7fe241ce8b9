// Tensors between the caller's bytes and an instance's memory, and the sizes that a call must have.
// Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "modules/module_engine.h"

namespace attnd {

// `count` numbers, each converted by way of float.
void ConvertNumbers(ElementType from, const void* in, ElementType to, void* out, int64_t count);

// The tensor of `entry` that `role` names is kept as this. NOT_FOUND "moment1" where there is none.
absl::StatusOr<ElementType> ElementOfRole(const ModuleDescription& module, int64_t entry,
                                          TensorRole role);

// CHECK that the call's spans have the sizes that its rows say.
void CheckSizes(const ModuleDescription& module, const ModuleForwardCall& call);
void CheckSizes(const ModuleDescription& module, const CallRows& rows, LayerRange layers,
                const ModuleBackwardCall& call);

}  // namespace attnd
