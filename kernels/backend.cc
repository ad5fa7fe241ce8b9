#include "kernels/backend.h"

#include "absl/strings/cord.h"

namespace attnd {
namespace {

constexpr absl::string_view kLostPayload = "attnd/device_lost";

}  // namespace

bool IsDeviceLost(const absl::Status& status) {
  return status.GetPayload(kLostPayload).has_value();
}

absl::Status DeviceLost(absl::Status status) {
  status.SetPayload(kLostPayload, absl::Cord("1"));
  return status;
}

}  // namespace attnd
