#include "client/channels/error_class.h"

#include <optional>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/types/error_detail.h"
#include "proto/google/rpc/error_details.pb.h"
#include "proto/google/rpc/status_payload.h"

namespace attnd {
namespace {

constexpr char kCancelledByServer[] = "CANCELLED_BY_SERVER";

bool HasReason(const absl::Status& status, absl::string_view reason) {
  std::optional<ErrorDetail> detail = DetailOf(status);
  return detail.has_value() && detail->reason == reason;
}

}  // namespace

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

bool IsMaskUnknown(const absl::Status& status) { return HasReason(status, "MASK_UNKNOWN"); }

bool IsOverQuota(const absl::Status& status) { return HasReason(status, "TENANT_QUOTA"); }

bool IsDraining(const absl::Status& status) { return HasReason(status, "DRAINING"); }

absl::Status WithReason(absl::Status status, absl::string_view reason) {
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(reason));
  info.set_domain("attnd");
  status.SetPayload(kErrorInfoUrl, absl::Cord(info.SerializeAsString()));
  return status;
}

bool IsCancelledByServer(const absl::Status& status) {
  return HasReason(status, kCancelledByServer);
}

bool IsWaitedFor(const absl::Status& status, bool wait_for_ready) {
  return IsOverQuota(status) || HasReason(status, "MICRO_BATCH_EARLY") ||
         (wait_for_ready && (IsDraining(status) || IsCancelledByServer(status)));
}

absl::Status UnavailableIfCancelled(const absl::Status& status, bool by_caller) {
  if (!absl::IsCancelled(status) || by_caller) return status;
  absl::Status told = WithReason(
      absl::UnavailableError(absl::StrCat("the server cancelled the call: ", status.message())),
      kCancelledByServer);
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    told.SetPayload(url, payload);
  });
  return told;
}

}  // namespace attnd
