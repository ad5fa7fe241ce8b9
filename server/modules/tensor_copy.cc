#include "server/modules/tensor_copy.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"
#include "server/modules/module_errors.h"
#include "server/modules/running_digest.h"

namespace attnd {
namespace {

absl::StatusOr<ElementType> DecodeElement(v1::Element element) {
  switch (element) {
    case v1::ELEMENT_FLOAT16:
      return ElementType::kFloat16;
    case v1::ELEMENT_BFLOAT16:
      return ElementType::kBFloat16;
    case v1::ELEMENT_FLOAT32:
      return ElementType::kFloat32;
    default:
      return FieldError(reason::kBadDtype, "tensor.element",
                        "ELEMENT_FLOAT16, ELEMENT_BFLOAT16 or ELEMENT_FLOAT32",
                        v1::Element_Name(element));
  }
}

v1::TensorKind EncodeTensorKind(TensorRole role) {
  return static_cast<v1::TensorKind>(static_cast<int>(role) + 1);
}

}  // namespace

absl::StatusOr<TensorRole> DecodeTensorKind(v1::TensorKind kind) {
  if (kind != v1::TENSOR_KIND_UNSPECIFIED) return static_cast<TensorRole>(kind - 1);
  return FieldError(reason::kBadField, "tensor.kind", "a kind of tensor", "none");
}
static_assert(static_cast<int>(TensorRole::kWeight) + 1 == v1::TENSOR_KIND_WEIGHT);
static_assert(static_cast<int>(TensorRole::kMoment2Max) + 1 == v1::TENSOR_KIND_MOMENT2_MAX);

bool HasTensor(const ModuleDescription& module, const WeightEntry& entry, TensorRole role) {
  if (role == TensorRole::kWeight) return true;
  if (!entry.trained_offset.has_value()) return false;
  const auto moment =
      static_cast<int64_t>(role) - static_cast<int64_t>(TensorRole::kMoment1);  // −1: gradient
  return moment < module.optimizer.MomentCount();
}

v1::TensorHeader HeaderOf(const ModuleDescription& module, const WeightEntry& entry,
                          TensorRole role, v1::Element element) {
  const ElementType kept =
      role == TensorRole::kWeight ? module.graph.layout().parameter_element : ElementType::kFloat32;
  v1::TensorHeader header;
  header.set_kind(EncodeTensorKind(role));
  header.set_name(entry.name);
  header.set_element(element == v1::ELEMENT_UNSPECIFIED ? static_cast<v1::Element>(kept) : element);
  for (const int64_t size : entry.shape) header.add_shape(static_cast<uint32_t>(size));
  return header;
}

absl::StatusOr<TensorCopy> TensorCopy::Make(const v1::TensorHeader& header,
                                            const RegisteredModule& module, ModuleMemory& memory) {
  TensorCopy copy;
  ASSIGN_OR_RETURN(copy.role, DecodeTensorKind(header.kind()));
  ASSIGN_OR_RETURN(copy.element, DecodeElement(header.element()));
  const ModuleDescription& description = module.description();
  const WeightEntry* entry = description.table.Find(header.name());
  if (entry == nullptr) {
    return FieldError(reason::kBadField, "tensor.name",
                      "the name of one of the module's parameters", header.name());
  }
  if (!HasTensor(description, *entry, copy.role)) {
    return FieldError(reason::kBadField, "tensor.kind",
                      absl::StrCat("a kind that ", header.name(), " has"),
                      v1::TensorKind_Name(header.kind()));
  }
  const std::string expected = absl::StrCat("[", absl::StrJoin(entry->shape, ", "), "]");
  const std::string got = absl::StrCat("[", absl::StrJoin(header.shape(), ", "), "]");
  if (expected != got) return FieldError(reason::kBadShape, "tensor.shape", expected, got);
  copy.entry = entry - description.table.entries().data();
  const int64_t bytes = entry->elements * ElementBytes(copy.element);
  ASSIGN_OR_RETURN(copy.reserved, memory.Reserve(module.record().caller, bytes));
  absl::StatusOr<LargeBuffer> data = LargeBuffer::Make(bytes);
  if (!data.ok()) return OfEngine(data.status());
  copy.data = *std::move(data);
  return copy;
}

std::string TensorCopy::Digest() const {
  return DigestOf({reinterpret_cast<const char*>(bytes()), static_cast<size_t>(size())});
}

}  // namespace attnd
