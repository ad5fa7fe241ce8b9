#include "client/modules/module_errors.h"

#include <optional>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/types/error_detail.h"
#include "proto/google/rpc/error_details.pb.h"
#include "proto/google/rpc/status_payload.h"

namespace attnd {
namespace {

bool HasReason(const absl::Status& status, std::initializer_list<absl::string_view> reasons) {
  std::optional<ErrorDetail> detail = DetailOf(status);
  if (!detail.has_value()) return false;
  for (absl::string_view reason : reasons) {
    if (detail->reason == reason) return true;
  }
  return false;
}

}  // namespace

bool IsModuleLost(const absl::Status& status) {
  return HasReason(status, {"MODULE_LOST", "EPOCH_CHANGED", "WRONG_REPLICA"});
}

bool AreActivationsLost(const absl::Status& status) {
  return HasReason(status, {"LEASE_LOST", "LEASE_MISMATCH", "LEASE_NOT_OWNED"});
}

bool IsDraining(const absl::Status& status) { return HasReason(status, {"DRAINING"}); }

bool IsActivationPressure(const absl::Status& status) {
  return HasReason(status, {"ACTIVATION_PRESSURE"});
}

absl::Status OfActivationPressure(absl::Status status) {
  if (!IsActivationPressure(status)) return status;
  absl::Status told = absl::ResourceExhaustedError(
      absl::StrCat(status.message(),
                   ": call backward before, register with more kept_rows, or let the oldest be "
                   "computed again (makes_room)"));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    told.SetPayload(url, payload);
  });
  return told;
}

bool IsRegionUnknown(const absl::Status& status) { return HasReason(status, {"REGION_UNKNOWN"}); }

bool IsGradientBehind(const absl::Status& status) {
  if (!HasReason(status, {"GRADIENT_INCOMPLETE"})) return false;
  const ErrorDetail detail = *DetailOf(status);
  auto number = [&](absl::string_view key) {
    auto found = detail.metadata.find(std::string(key));
    int64_t value = 0;
    return found != detail.metadata.end() && absl::SimpleAtoi(found->second, &value) ? value : -1;
  };
  return number("held") >= 0 && number("held") < number("expected");
}

bool IsStepDone(const absl::Status& status, uint64_t sequence) {
  if (!HasReason(status, {"STEP_OUT_OF_ORDER", "SEQUENCE_MISMATCH"})) return false;
  const ErrorDetail detail = *DetailOf(status);
  auto expected = detail.metadata.find("expected");
  return expected != detail.metadata.end() && expected->second == absl::StrCat(sequence + 1);
}

absl::Status StateLost(uint64_t found, uint64_t wanted) {
  absl::Status status = absl::FailedPreconditionError(
      absl::StrCat("the server restarted with the module's state of sequence ", found,
                   ", and the calls from "
                   "there to ",
                   wanted, " are no longer kept here: load a checkpoint of your own"));
  google::rpc::ErrorInfo info;
  info.set_reason("STATE_LOST");
  info.set_domain("attnd");
  (*info.mutable_metadata())["sequence"] = absl::StrCat(found);
  (*info.mutable_metadata())["expected"] = absl::StrCat(wanted);
  status.SetPayload(kErrorInfoUrl, absl::Cord(info.SerializeAsString()));
  return status;
}

}  // namespace attnd
