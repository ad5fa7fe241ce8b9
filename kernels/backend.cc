#include "kernels/backend.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

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

absl::StatusOr<MaskKernel> Backend::KernelForMask(const Problem& problem,
                                                  Direction direction) const {
  RETURN_IF_ERROR(Supports(problem, direction));
  return absl::UnimplementedError(
      absl::StrCat("problem.mask: the ", info().backend, " engine does not tell its kernels"));
}

}  // namespace attnd
