#include "client/cpp/refusal.h"

#include <optional>

#include "absl/strings/string_view.h"
#include "client/cpp/error_detail.h"
#include "client/cpp/grpc_status.h"

namespace attnd {

ResidualLoss ResidualLossOf(const absl::Status& status) {
  std::optional<ErrorDetail> detail = DetailOf(status);
  if (!detail.has_value()) return ResidualLoss::kNone;
  auto field = detail->metadata.find("field");
  bool names_token = field != detail->metadata.end() && field->second == "residual_token";
  bool names_wish = field != detail->metadata.end() && field->second == "options.keep_residual";
  if (names_wish && absl::IsUnimplemented(status)) return ResidualLoss::kNotKnown;
  for (absl::string_view reason :
       {"LEASE_LOST", "EPOCH_CHANGED", "WRONG_REPLICA", "LEASE_MISMATCH", "LEASE_NOT_OWNED"}) {
    if (detail->reason == reason) return ResidualLoss::kLost;
  }
  return names_token ? ResidualLoss::kLost : ResidualLoss::kNone;
}

bool IsOverQuota(const absl::Status& status) {
  std::optional<ErrorDetail> detail = DetailOf(status);
  return detail.has_value() && detail->reason == "TENANT_QUOTA";
}

}  // namespace attnd
