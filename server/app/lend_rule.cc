#include "server/app/lend_rule.h"

#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

absl::Status NotLendable(absl::string_view name, absl::string_view expected,
                         absl::string_view got) {
  return absl::InvalidArgumentError(
      absl::StrCat("lend: ", name, ": expected ", expected, ", got ", got));
}

// Ordinals mean other GPUs in CUDA's own order, which NVML does not know.
absl::Status CheckOrder(const char* order) {
  if (order == nullptr || absl::string_view(order) == "PCI_BUS_ID") return absl::OkStatus();
  return NotLendable("CUDA_DEVICE_ORDER", "PCI_BUS_ID, or GPUs named by UUID", order);
}

absl::StatusOr<std::string> GpuOf(const std::vector<std::string>& uuids, absl::string_view name,
                                  const char* order) {
  int index = 0;
  if (absl::SimpleAtoi(name, &index)) {
    RETURN_IF_ERROR(CheckOrder(order));
    if (index >= 0 && index < static_cast<int>(uuids.size())) return uuids[index];
  }
  auto found =
      absl::c_find_if(uuids, [&](const std::string& uuid) { return absl::StartsWith(uuid, name); });
  if (absl::StartsWith(name, "GPU-") && found != uuids.end()) return *found;
  return NotLendable("CUDA_VISIBLE_DEVICES", "ordinals or UUIDs of whole GPUs", name);
}

}  // namespace

absl::StatusOr<std::vector<std::string>> LentGpus(const std::vector<std::string>& uuids,
                                                  const std::vector<int>& devices,
                                                  const char* visible, const char* order) {
  std::vector<std::string> seen = uuids;
  if (visible != nullptr) {
    seen.clear();
    for (absl::string_view name : absl::StrSplit(visible, ',', absl::SkipWhitespace())) {
      ASSIGN_OR_RETURN(std::string gpu, GpuOf(uuids, name, order));
      seen.push_back(std::move(gpu));
    }
  } else if (!devices.empty()) {
    RETURN_IF_ERROR(CheckOrder(order));
  }
  if (seen.empty()) return NotLendable("GPUs", "one at least", "none");
  if (devices.empty()) return seen;
  std::vector<std::string> lent;
  for (int device : devices) {
    if (device >= static_cast<int>(seen.size())) {
      return NotLendable("devices", absl::StrCat("0..", seen.size() - 1), absl::StrCat(device));
    }
    lent.push_back(seen[device]);
  }
  return lent;
}

bool LendRule::MayTake(const std::vector<GpuUse>& uses, absl::Time now) {
  const bool idle = absl::c_all_of(uses, [](const GpuUse& use) {
    return use.process_ids.empty() && use.utilisation_percent <= kIdlePercent;
  });
  if (!idle) {
    idle_since_.reset();
    return false;
  }
  if (!idle_since_.has_value()) idle_since_ = now;
  return now - *idle_since_ >= after_;
}

void LendRule::Taken(unsigned own, absl::Time now) {
  idle_since_.reset();
  own_ = own;
  taken_ = now;
  shown_ = false;
}

absl::StatusOr<bool> LendRule::MustGiveBack(const std::vector<GpuUse>& uses, absl::Time now) {
  bool others = false;
  for (const GpuUse& use : uses) {
    for (unsigned process : use.process_ids) {
      shown_ |= process == own_;
      others |= process != own_;
    }
  }
  if (shown_) unshown_ = false;
  const bool never_shown = !shown_ && ((others && unshown_) || now - taken_ >= kShown);
  if (never_shown) {
    return absl::FailedPreconditionError(
        absl::StrCat("lend: NVML does not show the daemon as process ", own_,
                     ": start attnd with the host's process ids (hostPID: true, --pid=host)"));
  }
  if (others && !shown_) unshown_ = true;
  return others;
}

}  // namespace attnd
