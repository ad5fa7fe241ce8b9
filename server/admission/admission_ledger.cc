#include "server/admission/admission_ledger.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/admission/staging_pool.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

absl::Status Full(absl::string_view reason, absl::string_view what, int64_t limit, int64_t wanted,
                  double seconds_ahead) {
  std::string limit_text = absl::StrCat(limit), wanted_text = absl::StrCat(wanted);
  absl::Status status = Failure(
      absl::StatusCode::kUnavailable, reason,
      absl::StrCat("full now: ", what, " at most ", limit_text, ", this call would make it ",
                   wanted_text, "; wait, or try another replica"),
      {{"limit", limit_text}, {"wanted", wanted_text}});
  return WithRetryAfter(std::move(status), RetryDelay(seconds_ahead));
}

absl::Status OverQuota(absl::string_view caller, absl::string_view what, int64_t limit,
                       int64_t wanted) {
  std::string limit_text = absl::StrCat(limit), wanted_text = absl::StrCat(wanted);
  absl::Status status = Failure(
      absl::StatusCode::kResourceExhausted, reason::kTenantQuota,
      absl::StrCat("quota of caller ", caller, ": ", what, " at most ", limit_text,
                   ", this call would make it ", wanted_text, "; have fewer calls in flight"),
      {{"caller", caller}, {"limit", limit_text}, {"wanted", wanted_text}});
  return WithRetryAfter(std::move(status), absl::Milliseconds(100));
}

int64_t TakenOf(const AdmissionDeviceUse& use) {
  return use.memory_bytes + use.lease_bytes + use.held_bytes;
}

}  // namespace

absl::Duration RetryDelay(double seconds_ahead) {
  return absl::Seconds(std::clamp(seconds_ahead / 2, 0.05, 2.0));
}

absl::StatusOr<Taken> AdmissionLedger::Take(const AdmissionLimits& limits, const Wanted& call,
                                            LeasesInTheWay* in_the_way) {
  absl::MutexLock lock(&mutex_);
  const DeviceChoice& choice = FirstToFinish(call.choices);
  RETURN_IF_ERROR(CheckDeadline(call, choice));
  RETURN_IF_ERROR(CheckRoom(limits, call, choice, in_the_way));
  Add(call.flow.caller,
      {.calls = 1, .bytes = choice.staging_bytes, .seconds = choice.part.seconds});
  AddToDevice(choice.device, choice.part);
  Device& at = devices_[choice.device];
  auto [flow, is_new] = at.flows.try_emplace(call.flow);
  if (is_new) at.weights += WeightOf(call.flow.priority);
  const Taken taken = {choice, ++last_number_};
  flow->second.Add({call.due, taken.number}, call.deadline, choice.part.seconds);
  return taken;
}

const DeviceChoice& AdmissionLedger::FirstToFinish(absl::Span<const DeviceChoice> choices) const {
  const auto rank = [&](const DeviceChoice& choice) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const AdmissionDeviceUse& use = devices_[choice.device].use;
    const int64_t bytes = choice.part.memory_bytes;
    const bool fits =
        bytes == 0 || use.memory_bytes + use.held_bytes + bytes <= choice.device_limit;
    return std::pair(!fits, choice.pace * (use.seconds + choice.part.seconds));
  };
  return *std::min_element(
      choices.begin(), choices.end(),
      [&](const DeviceChoice& a, const DeviceChoice& b) { return rank(a) < rank(b); });
}

absl::Status AdmissionLedger::CheckDeadline(const Wanted& call, const DeviceChoice& choice) {
  const double seconds = choice.part.seconds;
  const DeadlineOrder::Outlook outlook = OutlookOf(call, choice);
  const double ahead = outlook.ahead_seconds;
  const double remaining = absl::ToDoubleSeconds(call.deadline - call.now);
  const bool late = DeadlineOrder::kQueueMargin * ahead + seconds / kEstimateSlack > remaining;
  if (!late && !outlook.breaks_another && LetsIn(outlook.pressure)) return absl::OkStatus();
  std::string needed_text = absl::StrCat(ahead + seconds), left_text = absl::StrCat(remaining);
  if (late) {
    return Failure(
        absl::StatusCode::kDeadlineExceeded, reason::kDeadlineUnmeetable,
        absl::StrCat("deadline: about ", needed_text, " s of work lie before the answer, ",
                     left_text, " s are left; set a later deadline, or try another replica"),
        {{"estimated_seconds", needed_text}, {"remaining_seconds", left_text}});
  }
  return WithRetryAfter(
      Failure(absl::StatusCode::kUnavailable, reason::kQueueFull,
              "full now: this caller's admitted calls need the time until their deadlines; "
              "wait, or set a later deadline",
              {{"estimated_seconds", needed_text}, {"remaining_seconds", left_text}}),
      RetryDelay(ahead));
}

absl::Status AdmissionLedger::CheckRoom(const AdmissionLimits& limits, const Wanted& call,
                                        const DeviceChoice& choice,
                                        LeasesInTheWay* in_the_way) const {
  const std::string& caller = call.flow.caller;
  const AdmissionDeviceUse& queue = devices_[choice.device].use;
  const double ahead = choice.pace * queue.seconds;
  if (use_.calls + 1 > limits.max_calls) {
    return Full(reason::kQueueFull, "calls", limits.max_calls, use_.calls + 1, ahead);
  }
  if (queue.calls > 0 && ahead > limits.max_queue_seconds) {
    return Full(reason::kQueueFull, "milliseconds of work ahead",
                static_cast<int64_t>(limits.max_queue_seconds * 1e3),
                static_cast<int64_t>(ahead * 1e3), ahead);
  }
  const int64_t bytes = choice.part.memory_bytes, on_device = TakenOf(queue) + bytes;
  if (bytes > 0 && on_device > choice.device_limit) {
    *in_the_way = {choice.device, std::min(on_device - choice.device_limit, queue.lease_bytes)};
    return Full(reason::kHbmPressure, "bytes of device memory", choice.device_limit, on_device,
                ahead);
  }
  RETURN_IF_ERROR(CheckStaging(limits, caller, choice.staging_bytes, ahead, in_the_way));
  const auto own = callers_.find(caller);
  const int64_t own_calls = own == callers_.end() ? 1 : own->second.calls + 1;
  if (own_calls > limits.caller_max_calls) {
    return OverQuota(caller, "calls", limits.caller_max_calls, own_calls);
  }
  return absl::OkStatus();
}

absl::Status AdmissionLedger::CheckStaging(const AdmissionLimits& limits, const std::string& caller,
                                           int64_t bytes, double seconds_ahead,
                                           LeasesInTheWay* in_the_way) const {
  const int64_t wanted = use_.bytes + use_.lease_bytes + bytes;
  if (wanted > limits.memory_bytes) {
    *in_the_way = {kHostMemory, std::min(wanted - limits.memory_bytes, use_.lease_bytes)};
    return Full(reason::kMemoryPressure, "bytes of staging memory", limits.memory_bytes, wanted,
                seconds_ahead);
  }
  const auto own = callers_.find(caller);
  const int64_t of_caller = own == callers_.end() ? bytes : own->second.bytes + bytes;
  if (of_caller > limits.caller_max_bytes) {
    return OverQuota(caller, "bytes", limits.caller_max_bytes, of_caller);
  }
  return absl::OkStatus();
}

absl::Status AdmissionLedger::HoldStaging(const AdmissionLimits& limits, const std::string& caller,
                                          int64_t bytes, LeasesInTheWay* in_the_way) {
  absl::MutexLock lock(&mutex_);
  RETURN_IF_ERROR(CheckStaging(limits, caller, bytes, 0, in_the_way));
  Add(caller, {.bytes = bytes});
  return absl::OkStatus();
}

bool AdmissionLedger::HoldsOverHalf(const AdmissionLimits& limits,
                                    const std::string& caller) const {
  absl::MutexLock lock(&mutex_);
  const auto own = callers_.find(caller);
  const int64_t of_caller = own == callers_.end() ? 0 : own->second.bytes;
  return of_caller > limits.caller_max_bytes / 2 || use_.bytes > limits.memory_bytes / 2;
}

DeadlineOrder::Outlook AdmissionLedger::OutlookOf(const Wanted& call,
                                                  const DeviceChoice& choice) const {
  static const DeadlineOrder kNone;
  const Device& at = devices_[choice.device];
  auto own = at.flows.find(call.flow);
  const DeadlineOrder& flow = own == at.flows.end() ? kNone : own->second;
  const double weight = WeightOf(call.flow.priority);
  const double weights = at.weights + (own == at.flows.end() ? weight : 0);
  const DeadlineOrder::Service service = {
      .others_seconds = std::max(0.0, at.use.seconds - flow.seconds()),
      .weights = weights / weight,
      .pace = choice.pace};
  return flow.For(call.due, choice.part.seconds, service, call.now);
}

bool AdmissionLedger::LetsIn(double pressure) {
  return pressure <= 0.5 || std::uniform_real_distribution<double>(0.5, 1)(random_) > pressure;
}

void AdmissionLedger::StartWork(const CallerFlow& flow, int device,
                                const DeadlineOrder::Place& place) {
  absl::MutexLock lock(&mutex_);
  devices_[device].flows.find(flow)->second.Start(place);
}

void AdmissionLedger::GiveBackWork(const CallerFlow& flow, int device,
                                   const AdmissionDeviceUse& part,
                                   const DeadlineOrder::Place& place) {
  absl::MutexLock lock(&mutex_);
  Add(flow.caller, {.calls = -part.calls, .seconds = -part.seconds});
  AddToDevice(device,
              {.calls = -part.calls, .memory_bytes = -part.memory_bytes, .seconds = -part.seconds});
  Device& at = devices_[device];
  auto own = at.flows.find(flow);
  own->second.Remove(place);
  if (!own->second.empty()) return;
  at.flows.erase(own);
  at.weights -= WeightOf(flow.priority);
}

void AdmissionLedger::GiveBack(const std::string& caller, const AdmissionUse& part) {
  absl::MutexLock lock(&mutex_);
  Add(caller, {-part.calls, -part.bytes, -part.lease_bytes, -part.seconds});
}

void AdmissionLedger::LeaseDeviceMemory(int device, int64_t taken, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  AddToDevice(device, {.memory_bytes = -taken, .lease_bytes = bytes});
}

absl::Status AdmissionLedger::HoldDeviceMemory(int device, int64_t bytes, int64_t limit,
                                               LeasesInTheWay* in_the_way) {
  absl::MutexLock lock(&mutex_);
  const AdmissionDeviceUse& use = devices_[device].use;
  const int64_t on_device = TakenOf(use) + bytes;
  if (on_device > limit) {
    *in_the_way = {device, std::min(on_device - limit, use.lease_bytes)};
    return Full(reason::kHbmPressure, "bytes of device memory", limit, on_device, use.seconds);
  }
  AddToDevice(device, {.held_bytes = bytes});
  return absl::OkStatus();
}

void AdmissionLedger::GiveBackHeld(int device, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  AddToDevice(device, {.held_bytes = -bytes});
}

void AdmissionLedger::BecomeLease(const std::string& caller, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  Add(caller, {.bytes = -bytes, .lease_bytes = bytes});
}

AdmissionDeviceUse AdmissionLedger::device_use(int device) const {
  absl::MutexLock lock(&mutex_);
  return devices_[device].use;
}

AdmissionUse AdmissionLedger::use() const {
  absl::MutexLock lock(&mutex_);
  return use_;
}

void AdmissionLedger::Fence(int device) {
  absl::MutexLock lock(&mutex_);
  devices_[device].fenced = true;
}

bool AdmissionLedger::is_fenced(int device) const {
  absl::MutexLock lock(&mutex_);
  return devices_[device].fenced;
}

void AdmissionLedger::Add(const std::string& caller, const AdmissionUse& part) {
  AdmissionUse& mine = callers_[caller];
  for (AdmissionUse* use : {&use_, &mine}) {
    use->calls += part.calls;
    use->bytes += part.bytes;
    use->seconds += part.seconds;
  }
  use_.lease_bytes += part.lease_bytes;
  if (use_.calls == 0) use_.seconds = 0;  // sums of doubles drift; an empty queue is empty
  if (mine.calls == 0 && mine.bytes == 0) callers_.erase(caller);
}

void AdmissionLedger::AddToDevice(int device, const AdmissionDeviceUse& part) {
  AdmissionDeviceUse& use = devices_[device].use;
  use.calls += part.calls;
  use.memory_bytes += part.memory_bytes;
  use.lease_bytes += part.lease_bytes;
  use.held_bytes += part.held_bytes;
  use.seconds = use.calls == 0 ? 0 : use.seconds + part.seconds;
}

}  // namespace attnd
