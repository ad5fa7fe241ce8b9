// TensorCopy: the bytes of one of a module's tensors, on their way in or out, in memory of its
// caller's share. Values; one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/large_buffer.h"
#include "modules/module_engine.h"
#include "proto/attnd/v1/module.pb.h"
#include "server/keep/module_memory.h"
#include "server/modules/registered_module.h"

namespace attnd {

absl::StatusOr<TensorRole> DecodeTensorKind(v1::TensorKind kind);

// Whether the optimizer and `entry` have such a tensor.
bool HasTensor(const ModuleDescription& module, const WeightEntry& entry, TensorRole role);

// `element`: unspecified for what is kept.
v1::TensorHeader HeaderOf(const ModuleDescription& module, const WeightEntry& entry,
                          TensorRole role, v1::Element element);

struct TensorCopy {
  // INVALID_ARGUMENT "tensor.name: expected ..., got ...", RESOURCE_EXHAUSTED MODULE_QUOTA.
  static absl::StatusOr<TensorCopy> Make(const v1::TensorHeader& header,
                                         const RegisteredModule& module, ModuleMemory& memory);

  std::byte* bytes() const { return data.data(); }
  int64_t size() const { return reserved.bytes(); }
  std::string Digest() const;  // SHA-256

  int64_t entry = 0;
  TensorRole role = TensorRole::kWeight;
  ElementType element = ElementType::kFloat32;
  ModuleMemory::Reservation reserved;
  LargeBuffer data;
};

}  // namespace attnd
