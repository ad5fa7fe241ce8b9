#include "server/admission/admission.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/cost.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "server/admission/admission_ledger.h"
#include "server/admission/staging_pool.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

// One call's estimate may be wrong by this factor, so a call is refused only if it misses its
// deadline by more. The work ahead counts in full: DeadlineOrder::kQueueMargin.
constexpr double kEstimateSlack = 2;
// One call's compiled mask may take 1 / this of a device's memory.
constexpr int64_t kMaskPlanShare = 8;

// Longer than the ports of a draining server stay open.
constexpr absl::Duration kDrainingRetryDelay = absl::Seconds(1);

absl::Status TooLarge(absl::string_view reason, absl::string_view what, int64_t limit,
                      int64_t wanted) {
  std::string limit_text = absl::StrCat(limit), wanted_text = absl::StrCat(wanted);
  return Failure(absl::StatusCode::kOutOfRange, reason,
                 absl::StrCat(what, ": at most ", limit_text, " bytes, this call needs ",
                              wanted_text, "; split it by batch or heads"),
                 {{"limit", limit_text}, {"wanted", wanted_text}});
}

}  // namespace

Ticket& Ticket::operator=(Ticket&& other) noexcept {
  if (this == &other) return *this;
  ReleaseWork();
  ShrinkTo(0);
  EndDeviceLease();
  ledger_ = std::move(other.ledger_);
  flow_ = std::move(other.flow_);
  place_ = other.place_;
  bytes_ = std::exchange(other.bytes_, 0);
  device_ = other.device_;
  device_bytes_ = std::exchange(other.device_bytes_, 0);
  device_lease_bytes_ = std::exchange(other.device_lease_bytes_, 0);
  seconds_ = std::exchange(other.seconds_, 0);
  working_ = std::exchange(other.working_, false);
  lease_ = std::exchange(other.lease_, false);
  return *this;
}

Ticket::~Ticket() {
  ReleaseWork();
  ShrinkTo(0);
  EndDeviceLease();
}

void Ticket::ReleaseWork() {
  if (!working_) return;
  working_ = false;
  ledger_->GiveBackWork(flow_, device_,
                        {.calls = 1, .memory_bytes = device_bytes_, .seconds = seconds_}, place_);
}

void Ticket::StartWork() {
  if (!working_ || place_.due == DeadlineOrder::kRunning) return;
  ledger_->StartWork(flow_, device_, place_);
  place_.due = DeadlineOrder::kRunning;
}

void Ticket::ShrinkTo(int64_t bytes) {
  if (bytes >= bytes_) return;
  int64_t back = bytes_ - bytes;
  ledger_->GiveBack(flow_.caller,
                    lease_ ? AdmissionUse{.lease_bytes = back} : AdmissionUse{.bytes = back});
  bytes_ = bytes;
}

void Ticket::BecomeLease(int64_t bytes) {
  ReleaseWork();
  ShrinkTo(bytes);
  if (lease_ || ledger_ == nullptr) return;
  ledger_->BecomeLease(flow_.caller, bytes_);
  lease_ = true;
}

Ticket Ticket::SplitOff(int64_t bytes) {
  CHECK(!working_ && !lease_ && bytes <= bytes_);
  Ticket part;
  part.ledger_ = ledger_;
  part.flow_ = flow_;
  part.bytes_ = bytes;
  bytes_ -= bytes;
  return part;
}

Ticket Ticket::LeaseDeviceMemory(int64_t bytes) {
  Ticket lease;
  if (ledger_ == nullptr) return lease;
  lease.ledger_ = ledger_;
  lease.device_ = device_;
  lease.device_lease_bytes_ = bytes;
  const int64_t taken = std::min(bytes, device_bytes_);
  device_bytes_ -= taken;
  ledger_->LeaseDeviceMemory(device_, taken, bytes);
  return lease;
}

void Ticket::EndDeviceLease() {
  const int64_t bytes = std::exchange(device_lease_bytes_, 0);
  if (bytes > 0) ledger_->LeaseDeviceMemory(device_, 0, -bytes);
}

Admission::Admission(const AdmissionLimits& limits, std::vector<AdmissionDevice> devices,
                     const Clock& clock, MemoryReclaimer* reclaimer)
    : limits_(limits),
      devices_(std::move(devices)),
      clock_(clock),
      reclaimer_(reclaimer),
      ledger_(std::make_shared<AdmissionLedger>(devices_.size())) {}

absl::StatusOr<AdmittedCall> Admission::Admit(AttentionCall call, CallContext context,
                                              CallMemory memory) {
  AdmittedCall admitted(std::move(call), std::move(context), std::move(memory));
  admitted.parts_->flops = Flops(admitted.call().problem(), admitted.call().direction());
  ASSIGN_OR_RETURN(const Choice choice, Choose(admitted));
  const absl::Time now = clock_.Now();
  admitted.parts_->admitted_at = now;
  absl::Time& deadline = admitted.parts_->context.deadline;
  deadline = std::min(deadline, now + limits_.max_deadline);
  admitted.parts_->keeps_on_device = KeepsOnDevice(admitted.call(), choice.device);
  const int64_t bytes = AddUpMemory(admitted, *devices_[choice.device].backend);
  RETURN_IF_ERROR(RefuseWhileDraining());
  RETURN_IF_ERROR(RefuseTooLarge(admitted, bytes, choice));
  CallerFlow flow = {admitted.context().caller, admitted.call().priority()};
  const Wanted wanted = {
      .flow = flow,
      .bytes = bytes,
      .device = choice.device,
      .part = {.calls = 1, .memory_bytes = choice.device_bytes, .seconds = choice.seconds},
      .device_limit = devices_[choice.device].backend->info().memory_bytes,
      .pace = devices_[choice.device].cost->pace(),
      .due = std::min(deadline, now + absl::Seconds(limits_.max_queue_seconds)),
      .deadline = deadline};
  RETURN_IF_ERROR(RefuseLate(wanted, now));
  Ticket& ticket = admitted.ticket();
  ticket.place_.due = wanted.due;
  RETURN_IF_ERROR(Take(wanted, ticket.place_.number));
  admitted.parts_->latest_start = deadline - absl::Seconds(choice.seconds / kEstimateSlack);
  ticket.ledger_ = ledger_;
  ticket.flow_ = std::move(flow);
  ticket.bytes_ = bytes;
  ticket.device_ = choice.device;
  ticket.device_bytes_ = choice.device_bytes;
  ticket.seconds_ = choice.seconds;
  ticket.working_ = true;
  return admitted;
}

int64_t Admission::AddUpMemory(AdmittedCall& admitted, const Backend& backend) {
  const AttentionCall& call = admitted.call();
  AdmittedCall::Parts& parts = *admitted.parts_;
  for (const TensorSpec& tensor : call.tensors()) {
    if (tensor.role == TensorUse::kKept || admitted.InPlace(tensor)) continue;
    int64_t& sum = tensor.role == TensorUse::kInput ? parts.input_bytes : parts.output_bytes;
    sum += AlignedSize(tensor.bytes);
  }
  parts.workspace_bytes = AlignedSize(backend.WorkspaceBytes(call.problem(), call.direction()));
  return parts.input_bytes + parts.workspace_bytes + parts.output_bytes +
         AlignedSize(call.mask_bytes());
}

// Evicts leases for what is missing. Other calls may take the freed memory, so it tries again, a
// few times.
absl::Status Admission::TakeEvicting(const std::function<absl::Status(LeasesInTheWay*)>& take) {
  constexpr int kTries = 4;
  absl::Status status;
  for (int n = 0; n < kTries; ++n) {
    LeasesInTheWay leases;
    status = take(&leases);
    const bool none = leases.bytes == 0 || reclaimer_ == nullptr;
    if (none || reclaimer_->Reclaim(leases.place, leases.bytes) == 0) return status;
  }
  return status;
}

absl::Status Admission::Take(const Wanted& wanted, uint64_t& number) {
  return TakeEvicting(
      [&](LeasesInTheWay* leases) { return ledger_->Take(limits_, wanted, number, leases); });
}

absl::StatusOr<Ticket> Admission::HoldStaging(const std::string& caller, int64_t bytes) {
  RETURN_IF_ERROR(RefuseTooMuchStaging(bytes));
  RETURN_IF_ERROR(TakeEvicting([&](LeasesInTheWay* leases) {
    return ledger_->HoldStaging(limits_, caller, bytes, leases);
  }));
  Ticket ticket;
  ticket.ledger_ = ledger_;
  ticket.flow_.caller = caller;
  ticket.bytes_ = bytes;
  return ticket;
}

absl::StatusOr<std::shared_ptr<void>> Admission::HoldDeviceMemory(int device, int64_t bytes) {
  const int64_t limit = devices_[device].backend->info().memory_bytes;
  RETURN_IF_ERROR(TakeEvicting([&](LeasesInTheWay* leases) {
    return ledger_->HoldDeviceMemory(device, bytes, limit, leases);
  }));
  return std::shared_ptr<void>(
      nullptr, [ledger = ledger_, device, bytes](void*) { ledger->GiveBackHeld(device, bytes); });
}

// A capture computes all scores once more.
constexpr double kCapturedWork = 1.6;

Admission::Choice Admission::ChoiceOf(const AdmittedCall& admitted, int device) const {
  const AttentionCall& call = admitted.call();
  const auto& [backend, cost] = devices_[device];
  const Problem& problem = call.problem();
  int64_t bytes = backend->DeviceBytes(problem, call.direction());
  if (admitted.memory().residual_place == device) bytes -= backend->ResidualBytes(problem);
  if (const CaptureWish* wish = call.capture(); wish != nullptr) {
    bytes = std::max(bytes, backend->CaptureBytes(
                                problem, {.block = wish->block, .keep_map = wish->needs_map()}));
  }
  if (call.keep_residual()) bytes += backend->KeepingBytes(problem);
  const double seconds = cost->EstimateSeconds(problem, call.direction(), admitted.flops(),
                                               call.input_bytes() + call.output_bytes());
  return {device, bytes, call.capture() == nullptr ? seconds : kCapturedWork * seconds};
}

bool Admission::KeepsOnDevice(const AttentionCall& call, int device) const {
  if (!call.keep_residual() || reclaimer_ == nullptr) return false;
  const int64_t bytes = devices_[device].backend->ResidualBytes(call.problem());
  return bytes > 0 && reclaimer_->MayHold(device, bytes);
}

// The device estimated to finish the call first; one without enough memory now only if there is no
// other. A backward on a residual runs on the residual's device.
absl::StatusOr<Admission::Choice> Admission::Choose(const AdmittedCall& call) const {
  const Problem& problem = call.call().problem();
  const int residual_place = call.memory().residual_place;
  absl::Status refusal;
  Choice best;
  bool found = false, best_fits = false;
  double best_end = 0;
  for (int n = 0; n < static_cast<int>(devices_.size()); ++n) {
    if (ledger_->is_fenced(n)) continue;
    if (residual_place != kHostMemory && residual_place != n) continue;
    const Backend& backend = *devices_[n].backend;
    absl::Status supported = backend.Supports(problem, call.call().direction());
    if (supported.ok() && call.call().capture() != nullptr) supported = backend.SupportsCapture();
    if (!supported.ok()) {
      refusal = Classified(std::move(supported));
      continue;
    }
    const Choice choice = ChoiceOf(call, n);
    const AdmissionDeviceUse use = ledger_->device_use(n);
    const bool fits =
        use.memory_bytes + use.held_bytes + choice.device_bytes <= backend.info().memory_bytes ||
        choice.device_bytes == 0;
    const double end = devices_[n].cost->pace() * (use.seconds + choice.seconds);
    if (!found || (fits && !best_fits) || (fits == best_fits && end < best_end)) {
      best = choice;
      best_fits = fits;
      best_end = end;
    }
    found = true;
  }
  if (found) return best;
  if (!refusal.ok()) return refusal;
  if (residual_place != kHostMemory) return LeaseLost("device_lost");
  return WithRetryAfter(Failure(absl::StatusCode::kUnavailable, reason::kDeviceLost,
                                "this server lost its device and is about to restart"),
                        kDrainingRetryDelay);
}

absl::Status Admission::RefuseWhileDraining() const {
  if (ledger_->draining.load(std::memory_order_relaxed)) {
    ledger_->last_refused_nanos.store(absl::ToUnixNanos(SteadyNow()), std::memory_order_relaxed);
    return WithRetryAfter(Failure(absl::StatusCode::kUnavailable, reason::kDraining,
                                  "this server is draining; another replica can take the call"),
                          kDrainingRetryDelay);
  }
  return absl::OkStatus();
}

// Checked first: neither waiting nor a later deadline would help.
absl::Status Admission::RefuseTooLarge(const AdmittedCall& admitted, int64_t bytes,
                                       const Choice& choice) const {
  const AttentionCall& call = admitted.call();
  const int64_t reply_bytes = call.output_bytes() - call.shared_output_bytes();
  if (!admitted.context().streamed && reply_bytes > limits_.max_reply_bytes) {
    return TooLarge(reason::kReplyTooLarge, "reply", limits_.max_reply_bytes, reply_bytes);
  }
  RETURN_IF_ERROR(RefuseTooMuchStaging(bytes));
  const BackendInfo& device = devices_[choice.device].backend->info();
  const int64_t budget = device.uuid.empty() ? limits_.memory_bytes : device.memory_bytes;
  if (call.mask_plan_bytes() > budget / kMaskPlanShare) {
    return TooLarge(reason::kTooLargeForDevice, "problem.mask: its tiles", budget / kMaskPlanShare,
                    call.mask_plan_bytes());
  }
  const int64_t device_memory = device.memory_bytes;
  if (choice.device_bytes > device_memory) {
    return TooLarge(reason::kTooLargeForDevice, "device memory", device_memory,
                    choice.device_bytes);
  }
  return absl::OkStatus();
}

absl::Status Admission::RefuseTooMuchStaging(int64_t bytes) const {
  if (bytes > limits_.memory_bytes) {
    return TooLarge(reason::kTooLargeForDevice, "staging memory", limits_.memory_bytes, bytes);
  }
  if (bytes > limits_.caller_max_bytes) {
    return TooLarge(reason::kTooLargeForDevice, "memory of one caller", limits_.caller_max_bytes,
                    bytes);
  }
  return absl::OkStatus();
}

absl::Status Admission::RefuseLate(const Wanted& wanted, absl::Time now) const {
  const double seconds = wanted.part.seconds;
  const DeadlineOrder::Outlook outlook = ledger_->OutlookOf(wanted, now);
  const double ahead = outlook.ahead_seconds;
  const double remaining = absl::ToDoubleSeconds(wanted.deadline - now);
  const bool late = DeadlineOrder::kQueueMargin * ahead + seconds / kEstimateSlack > remaining;
  if (!late && !outlook.breaks_another && ledger_->LetsIn(outlook.pressure)) {
    return absl::OkStatus();
  }
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

void Admission::StartDraining() { ledger_->draining = true; }
void Admission::Fence(int device) { ledger_->Fence(device); }
AdmissionDeviceUse Admission::DeviceUse(int device) const { return ledger_->device_use(device); }
double Admission::QueueSeconds(int device) const {
  return devices_[device].cost->pace() * ledger_->device_use(device).seconds;
}
absl::Time Admission::last_refused_at() const {
  int64_t nanos = ledger_->last_refused_nanos.load(std::memory_order_relaxed);
  return nanos == std::numeric_limits<int64_t>::min() ? absl::InfinitePast()
                                                      : absl::FromUnixNanos(nanos);
}

AdmissionUse Admission::Use() const { return ledger_->use(); }

}  // namespace attnd
