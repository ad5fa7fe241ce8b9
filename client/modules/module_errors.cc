#include "client/modules/module_errors.h"

#include <optional>
#include <string>

#include "absl/random/random.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/types/error_detail.h"

namespace attnd {

bool IsModuleLost(const absl::Status& status) {
  return HasReason(status, {"MODULE_LOST", "EPOCH_CHANGED", "WRONG_REPLICA"});
}

bool AreActivationsLost(const absl::Status& status) {
  return HasReason(status, {"LEASE_LOST", "LEASE_MISMATCH", "LEASE_NOT_OWNED"});
}

bool IsStateLost(const absl::Status& status) { return HasReason(status, {"STATE_LOST"}); }

// A count, and random bits that tell owners apart who count the same.
uint64_t OwnerAfter(uint64_t epoch) {
  constexpr int kRandomBits = 20;
  const uint64_t random = absl::Uniform<uint64_t>(absl::BitGen(), 0, uint64_t{1} << kRandomBits);
  return ((epoch >> kRandomBits) + 1) << kRandomBits | random;
}

std::optional<uint64_t> LaterOwner(const absl::Status& status) {
  if (!HasReason(status, {"MODULE_TAKEN"})) return std::nullopt;
  const ErrorDetail detail = *DetailOf(status);
  const auto found = detail.metadata.find("epoch");
  uint64_t epoch = 0;
  if (found == detail.metadata.end() || !absl::SimpleAtoi(found->second, &epoch)) {
    return std::nullopt;
  }
  return epoch;
}

bool IsOfOtherServer(const absl::Status& status) { return HasReason(status, {"WRONG_REPLICA"}); }

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

absl::Status NotSticky(absl::string_view name) {
  return WithReason(absl::FailedPreconditionError(absl::StrCat(
                        "replay_mib: calls of the module ", name,
                        " reach several daemons behind one address, and none are kept to make "
                        "it anew: let the balancer keep calls of one attnd-module metadata at "
                        "one daemon, or give replay_mib above 0")),
                    "NOT_STICKY", {{"name", std::string(name)}});
}

absl::Status GradientsUnsure() {
  return WithReason(
      absl::FailedPreconditionError(
          "gradients: expected those of backwards that have all succeeded since the last step, got "
          "ones of which a backward has failed, and was added or not: clear them (discard; "
          "zero_grad in PyTorch), and call the step's backwards again"),
      "GRADIENT_INCOMPLETE", {});
}

absl::Status StateLost(uint64_t found, uint64_t wanted) {
  const std::string calls =
      found == wanted ? "of this step" : absl::StrCat("from there to ", wanted);
  return WithReason(absl::FailedPreconditionError(absl::StrCat(
                        "the server has the module's state of sequence ", found,
                        ", and the calls ", calls,
                        " are no longer kept here (replay_mib): load a checkpoint of your own, "
                        "from which it goes on")),
                    "STATE_LOST",
                    {{"sequence", absl::StrCat(found)}, {"expected", absl::StrCat(wanted)}});
}

}  // namespace attnd
