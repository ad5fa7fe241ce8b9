#include "server/wire/decode_shared.h"

#include <algorithm>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "server/call/attention_tensors.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

// As the calls' own fields are called.
std::string NameOf(v1::TensorName name) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::TensorName_Name(name), "TENSOR_NAME_"));
}

absl::Status CheckPlace(const v1::SharedTensor& tensor, int regions) {
  if (tensor.name() == v1::TENSOR_NAME_UNSPECIFIED) {
    return BadShared("tensor.name", "a tensor's name", "none");
  }
  if (tensor.region() >= static_cast<uint32_t>(regions)) {
    return BadShared("tensor.region", absl::StrCat("below ", regions),
                     absl::StrCat(tensor.region()));
  }
  if (tensor.offset() % kSharedAlignment != 0) {
    return BadShared("tensor.offset", absl::StrCat("a multiple of ", kSharedAlignment),
                     absl::StrCat(tensor.offset()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status BadShared(absl::string_view field, absl::string_view expected, absl::string_view got) {
  return FieldError(reason::kBadField, absl::StrCat("shared_memory.", field), expected, got);
}

absl::StatusOr<SharedPlaces> PlacesOf(const v1::SharedMemory& wire) {
  if (wire.region_size() < 1 || wire.region_size() > kTensors) {
    return BadShared("region", absl::StrCat("1..", kTensors, " tokens"),
                     absl::StrCat(wire.region_size()));
  }
  SharedPlaces shared;
  shared.request = std::make_unique<SharedRequest>();
  shared.request->regions.assign(wire.region().begin(), wire.region().end());
  shared.request->use = wire.use();
  for (const v1::SharedTensor& tensor : wire.tensor()) {
    RETURN_IF_ERROR(CheckPlace(tensor, wire.region_size()));
    if (shared.Find(tensor.name()) != nullptr) {
      return BadShared("tensor", "each tensor at most once", NameOf(tensor.name()));
    }
    shared.places.push_back({tensor.name(), static_cast<int>(tensor.region()), tensor.offset(),
                             static_cast<int64_t>(std::min<uint64_t>(tensor.size(), INT64_MAX))});
  }
  return shared;
}

}  // namespace attnd
