#include "client/modules/module_tensors.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

constexpr v1::TensorKind kKinds[] = {v1::TENSOR_KIND_WEIGHT, v1::TENSOR_KIND_MOMENT1,
                                     v1::TENSOR_KIND_MOMENT2, v1::TENSOR_KIND_MOMENT2_MAX};
// More than a parameter may have (docs of ModuleLayout), so that a reply cannot take all memory.
constexpr uint64_t kMostNumbers = uint64_t{1} << 40;

absl::StatusOr<size_t> TensorBytesOf(const v1::TensorHeader& header) {
  uint64_t numbers = 1;
  for (const uint32_t dimension : header.shape()) {
    if (dimension == 0 || numbers > kMostNumbers / dimension) {
      return absl::DataLossError(absl::StrCat("reply: shape of ", header.name()));
    }
    numbers *= dimension;
  }
  return numbers * (header.element() == v1::ELEMENT_FLOAT32 ? 4 : 2);
}

}  // namespace

absl::StatusOr<std::vector<SentTensor>> FetchTensors(const ModuleRpcs& rpcs,
                                                     const std::string& token,
                                                     std::optional<uint64_t> sequence,
                                                     ModuleTry& attempt) {
  v1::GetTensorsRequest request;
  request.set_token(token);
  if (sequence.has_value()) request.set_sequence(*sequence);
  for (const v1::TensorKind kind : kKinds) request.add_kind(kind);
  std::vector<SentTensor> tensors;
  auto place = [&](const v1::TensorHeader& header) -> absl::StatusOr<absl::Span<std::byte>> {
    ASSIGN_OR_RETURN(const size_t size, TensorBytesOf(header));
    auto bytes = std::make_shared<std::string>(size, '\0');
    const absl::Span<std::byte> to(reinterpret_cast<std::byte*>(bytes->data()), size);
    tensors.push_back({header, std::move(bytes)});
    return to;
  };
  RETURN_IF_ERROR(rpcs.Get(request, place, attempt));
  return tensors;
}

}  // namespace attnd
