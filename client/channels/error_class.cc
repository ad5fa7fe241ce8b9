#include "client/channels/error_class.h"

#include <optional>

#include "absl/strings/string_view.h"
#include "client/types/error_detail.h"

namespace attnd {

bool IsResidualLost(const absl::Status& status) {
  std::optional<ErrorDetail> detail = DetailOf(status);
  if (!detail.has_value()) return false;
  for (absl::string_view reason :
       {"LEASE_LOST", "EPOCH_CHANGED", "WRONG_REPLICA", "LEASE_MISMATCH", "LEASE_NOT_OWNED"}) {
    if (detail->reason == reason) return true;
  }
  auto field = detail->metadata.find("field");
  return field != detail->metadata.end() && field->second == "residual_token";
}

bool IsMaskUnknown(const absl::Status& status) {
  std::optional<ErrorDetail> detail = DetailOf(status);
  return detail.has_value() && detail->reason == "MASK_UNKNOWN";
}

bool IsOverQuota(const absl::Status& status) {
  std::optional<ErrorDetail> detail = DetailOf(status);
  return detail.has_value() && detail->reason == "TENANT_QUOTA";
}

}  // namespace attnd
