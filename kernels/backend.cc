#include "kernels/backend.h"

#include <algorithm>

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

absl::Status CheckCapture(const Problem& problem, const CaptureRequest& request) {
  if (IsPacked(problem.layout)) {
    return absl::UnimplementedError("capture: expected a dense layout, got a packed one");
  }
  if (request.block < 1 || request.block > kMaxCaptureLength) {
    return absl::InvalidArgumentError(
        absl::StrCat("capture.block: expected 1..", kMaxCaptureLength, ", got ", request.block));
  }
  const int64_t longest = std::max(problem.q_len, problem.kv_len);
  if (longest > kMaxCaptureLength) {
    return absl::OutOfRangeError(absl::StrCat("capture: expected at most ", kMaxCaptureLength,
                                              " rows and keys, got ", longest));
  }
  if (request.keep_map && longest > kMaxKeptMapLength) {
    return absl::OutOfRangeError(
        absl::StrCat("capture.keep: expected at most ", kMaxKeptMapLength, " rows and keys, got ",
                     longest, "; without it the pooled map and the moments are captured"));
  }
  const MapShape shape = {problem.q_len, problem.kv_len, request.block};
  const int64_t blocks = shape.row_blocks() * shape.key_blocks();
  if (blocks > kMaxMapBlocks) {
    return absl::OutOfRangeError(absl::StrCat("capture.block: expected at most ", kMaxMapBlocks,
                                              " blocks in all, got ", blocks));
  }
  return absl::OkStatus();
}

absl::Status Backend::SupportsCapture() const {
  return absl::UnimplementedError(
      absl::StrCat("capture: the ", info().backend, " engine captures no attention maps"));
}

absl::StatusOr<CapturedMap> Backend::Capture(const ForwardCall&, const CaptureRequest&) {
  return SupportsCapture();
}

}  // namespace attnd
