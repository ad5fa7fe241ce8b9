#include "client/channels/error_class.h"

#include <optional>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "client/types/error_detail.h"

namespace attnd {

bool IsResidualLost(const absl::Status& status) {
  if (HasReason(status, {"LEASE_LOST", "EPOCH_CHANGED", "WRONG_REPLICA", "LEASE_MISMATCH",
                         "LEASE_NOT_OWNED"})) {
    return true;
  }
  std::optional<ErrorDetail> detail = DetailOf(status);
  if (!detail.has_value()) return false;
  auto field = detail->metadata.find("field");
  return field != detail->metadata.end() && field->second == "residual_token";
}

bool IsMaskUnknown(const absl::Status& status) { return HasReason(status, {"MASK_UNKNOWN"}); }

bool IsOverQuota(const absl::Status& status) { return HasReason(status, {"TENANT_QUOTA"}); }

bool IsDraining(const absl::Status& status) { return HasReason(status, {"DRAINING"}); }

bool IsCancelledByServer(const absl::Status& status) {
  return HasReason(status, {"CANCELLED_BY_SERVER"});
}

bool IsWaitedFor(const absl::Status& status, bool wait_for_ready) {
  return IsOverQuota(status) || HasReason(status, {"MICRO_BATCH_EARLY"}) ||
         (wait_for_ready && (IsDraining(status) || IsCancelledByServer(status)));
}

absl::Status UnavailableIfCancelled(const absl::Status& status, bool by_caller) {
  if (!absl::IsCancelled(status) || by_caller) return status;
  absl::Status told = WithReason(
      absl::UnavailableError(absl::StrCat("the server cancelled the call: ", status.message())),
      "CANCELLED_BY_SERVER");
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { told.SetPayload(url, payload); });
  return told;
}

}  // namespace attnd
