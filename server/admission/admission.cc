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
  RETURN_IF_ERROR(RefuseWhileDraining());
  AdmittedCall admitted(std::move(call), std::move(context), std::move(memory));
  admitted.parts_->flops = Flops(admitted.call().problem(), admitted.call().direction());
  ASSIGN_OR_RETURN(const Choices choices, ChoicesOf(admitted));
  const absl::Time now = clock_.Now();
  admitted.parts_->admitted_at = now;
  absl::Time& deadline = admitted.parts_->context.deadline;
  deadline = std::min(deadline, now + limits_.max_deadline);
  CallerFlow flow = {admitted.context().caller, admitted.call().priority()};
  const absl::Time due = std::min(deadline, now + absl::Seconds(limits_.max_queue_seconds));
  const Wanted wanted = {flow, now, due, deadline, choices};
  absl::StatusOr<Taken> taken;
  RETURN_IF_ERROR(TakeEvicting([&](LeasesInTheWay* leases) {
    taken = ledger_->Take(limits_, wanted, leases);
    return taken.status();
  }));
  const DeviceChoice& choice = taken->choice;
  AddUpMemory(admitted, choice.device);
  admitted.parts_->latest_start = deadline - absl::Seconds(choice.part.seconds / kEstimateSlack);
  Ticket& ticket = admitted.ticket();
  ticket.ledger_ = ledger_;
  ticket.flow_ = std::move(flow);
  ticket.place_ = {due, taken->number};
  ticket.bytes_ = choice.staging_bytes;
  ticket.device_ = choice.device;
  ticket.device_bytes_ = choice.part.memory_bytes;
  ticket.seconds_ = choice.part.seconds;
  ticket.working_ = true;
  return admitted;
}

int64_t Admission::AddUpMemory(AdmittedCall& admitted, int device) const {
  const AttentionCall& call = admitted.call();
  AdmittedCall::Parts& parts = *admitted.parts_;
  parts.keeps_on_device = KeepsOnDevice(call, device);
  parts.input_bytes = parts.output_bytes = 0;
  for (const TensorSpec& tensor : call.tensors()) {
    if (tensor.role == TensorUse::kKept || admitted.InPlace(tensor)) continue;
    int64_t& sum = tensor.role == TensorUse::kInput ? parts.input_bytes : parts.output_bytes;
    sum += AlignedSize(tensor.bytes);
  }
  parts.workspace_bytes =
      AlignedSize(devices_[device].backend->WorkspaceBytes(call.problem(), call.direction()));
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

bool Admission::HoldsOverHalf(const std::string& caller) const {
  return ledger_->HoldsOverHalf(limits_, caller);
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

DeviceChoice Admission::ChoiceOf(AdmittedCall& admitted, int device) const {
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
  double seconds = cost->EstimateSeconds(problem, call.direction(), admitted.flops(),
                                         call.input_bytes() + call.output_bytes());
  if (call.capture() != nullptr) seconds *= kCapturedWork;
  return {.device = device,
          .staging_bytes = AddUpMemory(admitted, device),
          .part = {.calls = 1, .memory_bytes = bytes, .seconds = seconds},
          .device_limit = backend->info().memory_bytes,
          .pace = cost->pace()};
}

absl::Status Admission::Supports(const AttentionCall& call, int device) const {
  const Backend& backend = *devices_[device].backend;
  absl::Status supported = backend.Supports(call.problem(), call.direction());
  if (supported.ok() && call.capture() != nullptr) supported = backend.SupportsCapture();
  return supported.ok() ? supported : Classified(std::move(supported));
}

bool Admission::KeepsOnDevice(const AttentionCall& call, int device) const {
  if (!call.keep_residual() || reclaimer_ == nullptr) return false;
  const int64_t bytes = devices_[device].backend->ResidualBytes(call.problem());
  return bytes > 0 && reclaimer_->MayHold(device, bytes);
}

// A backward on a residual runs on the residual's device.
absl::StatusOr<Admission::Choices> Admission::ChoicesOf(AdmittedCall& admitted) const {
  const int residual_place = admitted.memory().residual_place;
  absl::Status refusal;
  Choices choices;
  for (int n = 0; n < static_cast<int>(devices_.size()); ++n) {
    if (ledger_->is_fenced(n)) continue;
    if (residual_place != kHostMemory && residual_place != n) continue;
    if (absl::Status supported = Supports(admitted.call(), n); !supported.ok()) {
      refusal = std::move(supported);
      continue;
    }
    const DeviceChoice choice = ChoiceOf(admitted, n);
    if (absl::Status fits = RefuseTooLarge(admitted, choice); !fits.ok()) {
      refusal = std::move(fits);
    } else {
      choices.push_back(choice);
    }
  }
  if (!choices.empty()) return choices;
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
absl::Status Admission::RefuseTooLarge(const AdmittedCall& admitted,
                                       const DeviceChoice& choice) const {
  const AttentionCall& call = admitted.call();
  const int64_t reply_bytes = call.output_bytes() - call.shared_output_bytes();
  if (!admitted.context().streamed && reply_bytes > limits_.max_reply_bytes) {
    return TooLarge(reason::kReplyTooLarge, "reply", limits_.max_reply_bytes, reply_bytes);
  }
  RETURN_IF_ERROR(RefuseTooMuchStaging(choice.staging_bytes));
  const BackendInfo& device = devices_[choice.device].backend->info();
  const int64_t budget = device.uuid.empty() ? limits_.memory_bytes : device.memory_bytes;
  if (call.mask_plan_bytes() > budget / kMaskPlanShare) {
    return TooLarge(reason::kTooLargeForDevice, "problem.mask: its tiles", budget / kMaskPlanShare,
                    call.mask_plan_bytes());
  }
  if (choice.part.memory_bytes > device.memory_bytes) {
    return TooLarge(reason::kTooLargeForDevice, "device memory", device.memory_bytes,
                    choice.part.memory_bytes);
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
