#include "server/admission/admission.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "attention/cost.h"
#include "base/status_macros.h"
#include "server/admission/staging_pool.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

// One call's estimate may be wrong by this factor, so a call is refused only if it misses its
// deadline by more. The work ahead is a sum of many estimates at a measured pace. It counts in full
// plus a margin for the reply's way back: under overload a call admitted too late is wasted work.
constexpr double kEstimateSlack = 2;
constexpr double kQueueMargin = 1.1;
// Of a device's memory, what one call's compiled mask may take: 1 / this.
constexpr int64_t kMaskPlanShare = 8;

// Longer than the ports of a draining server stay open.
constexpr absl::Duration kDrainingRetryDelay = absl::Seconds(1);

// Half of the queue's time, within bounds.
absl::Duration RetryDelay(double seconds_ahead) {
  return absl::Seconds(std::clamp(seconds_ahead / 2, 0.05, 2.0));
}

absl::Status Full(absl::string_view reason, absl::string_view what, int64_t limit, int64_t wanted,
                  double seconds_ahead) {
  std::string limit_text = absl::StrCat(limit), wanted_text = absl::StrCat(wanted);
  absl::Status status = Failure(absl::StatusCode::kUnavailable, reason,
                                absl::StrCat("full now: ", what, " at most ", limit_text,
                                             ", this call would make it ", wanted_text),
                                {{"limit", limit_text}, {"wanted", wanted_text}});
  return WithRetryAfter(std::move(status), RetryDelay(seconds_ahead));
}

absl::Status OverQuota(absl::string_view caller, absl::string_view what, int64_t limit,
                       int64_t wanted) {
  std::string limit_text = absl::StrCat(limit), wanted_text = absl::StrCat(wanted);
  absl::Status status =
      Failure(absl::StatusCode::kResourceExhausted, reason::kTenantQuota,
              absl::StrCat("quota of caller ", caller, ": ", what, " at most ", limit_text,
                           ", this call would make it ", wanted_text),
              {{"caller", caller}, {"limit", limit_text}, {"wanted", wanted_text}});
  return WithRetryAfter(std::move(status), absl::Milliseconds(100));
}

absl::Status TooLarge(absl::string_view reason, absl::string_view what, int64_t limit,
                      int64_t wanted) {
  std::string limit_text = absl::StrCat(limit), wanted_text = absl::StrCat(wanted);
  return Failure(absl::StatusCode::kOutOfRange, reason,
                 absl::StrCat(what, ": at most ", limit_text, " bytes, this call needs ",
                              wanted_text, "; split it by batch or heads"),
                 {{"limit", limit_text}, {"wanted", wanted_text}});
}

}  // namespace

// Memory of leases that would have to be evicted.
struct LeasesInTheWay {
  int place = kHostMemory;
  int64_t bytes = 0;
};

// What one call needs.
struct Wanted {
  const CallerFlow& flow;
  int64_t bytes;
  int device;
  AdmissionDeviceUse part;
  int64_t device_limit;  // bytes of its memory
  double pace;           // of its queue
};

// What is reserved now: in total, by each caller and of each device. Any thread.
class AdmissionLedger {
 public:
  explicit AdmissionLedger(size_t devices) : devices_(devices) {}

  // When leases take the missing memory, `in_the_way` says how many of their bytes, and where.
  absl::Status Take(const AdmissionLimits& limits, const Wanted& call, LeasesInTheWay* in_the_way) {
    const std::string& caller = call.flow.caller;
    const AdmissionDeviceUse& part = call.part;
    absl::MutexLock lock(&mutex_);
    const AdmissionDeviceUse& queue = devices_[call.device].use;
    const double ahead = call.pace * queue.seconds;
    if (use_.calls + 1 > limits.max_calls) {
      return Full(reason::kQueueFull, "calls", limits.max_calls, use_.calls + 1, ahead);
    }
    if (queue.calls > 0 && ahead > limits.max_queue_seconds) {
      return Full(reason::kQueueFull, "milliseconds of work ahead",
                  static_cast<int64_t>(limits.max_queue_seconds * 1e3),
                  static_cast<int64_t>(ahead * 1e3), ahead);
    }
    const int64_t on_device = queue.memory_bytes + queue.lease_bytes + part.memory_bytes;
    if (part.memory_bytes > 0 && on_device > call.device_limit) {
      *in_the_way = {call.device, std::min(on_device - call.device_limit, queue.lease_bytes)};
      return Full(reason::kHbmPressure, "bytes of device memory", call.device_limit, on_device,
                  ahead);
    }
    int64_t wanted = use_.bytes + use_.lease_bytes + call.bytes;
    if (wanted > limits.memory_bytes) {
      *in_the_way = {kHostMemory, std::min(wanted - limits.memory_bytes, use_.lease_bytes)};
      return Full(reason::kMemoryPressure, "bytes of staging memory", limits.memory_bytes, wanted,
                  ahead);
    }
    auto own = callers_.find(caller);
    AdmissionUse mine = own == callers_.end() ? AdmissionUse{} : own->second;
    if (mine.calls + 1 > limits.caller_max_calls) {
      return OverQuota(caller, "calls", limits.caller_max_calls, mine.calls + 1);
    }
    if (mine.bytes + call.bytes > limits.caller_max_bytes) {
      return OverQuota(caller, "bytes", limits.caller_max_bytes, mine.bytes + call.bytes);
    }
    Add(caller, {.calls = 1, .bytes = call.bytes, .seconds = part.seconds});
    AddToDevice(call.device, part);
    AddToFlow(call.device, call.flow, 1, part.seconds);
    return absl::OkStatus();
  }

  // The device has finished a call.
  void GiveBackWork(const CallerFlow& flow, int device, const AdmissionDeviceUse& part) {
    absl::MutexLock lock(&mutex_);
    Add(flow.caller, {.calls = -part.calls, .seconds = -part.seconds});
    AddToDevice(
        device,
        {.calls = -part.calls, .memory_bytes = -part.memory_bytes, .seconds = -part.seconds});
    AddToFlow(device, flow, -part.calls, -part.seconds);
  }

  // Estimated work before a new call of `seconds`: the whole queue, or, if less, what the batcher
  // runs of it while it serves the call's own flow by its weight.
  double SecondsAhead(int device, const CallerFlow& flow, double seconds) const {
    absl::MutexLock lock(&mutex_);
    const Device& at = devices_[device];
    auto own = at.flows.find(flow);
    const double own_seconds = own == at.flows.end() ? 0 : own->second.seconds;
    const double weight = WeightOf(flow.priority);
    const double weights = at.weights + (own == at.flows.end() ? weight : 0);
    return std::min(at.use.seconds, (own_seconds + seconds) * weights / weight - seconds);
  }

  // `taken` of the device's memory become a lease of `bytes`, which ends with taken 0 and −bytes.
  void LeaseDeviceMemory(int device, int64_t taken, int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    AddToDevice(device, {.memory_bytes = -taken, .lease_bytes = bytes});
  }

  AdmissionDeviceUse device_use(int device) const {
    absl::MutexLock lock(&mutex_);
    return devices_[device].use;
  }
  void Fence(int device) {
    absl::MutexLock lock(&mutex_);
    devices_[device].fenced = true;
  }
  bool is_fenced(int device) const {
    absl::MutexLock lock(&mutex_);
    return devices_[device].fenced;
  }

  void GiveBack(const std::string& caller, const AdmissionUse& part) {
    absl::MutexLock lock(&mutex_);
    Add(caller, {-part.calls, -part.bytes, -part.lease_bytes, -part.seconds});
  }

  // From the caller's account to the leases'.
  void BecomeLease(const std::string& caller, int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    Add(caller, {.bytes = -bytes, .lease_bytes = bytes});
  }

  AdmissionUse use() const {
    absl::MutexLock lock(&mutex_);
    return use_;
  }

  std::atomic<bool> draining{false};
  std::atomic<int64_t> last_refused_nanos{std::numeric_limits<int64_t>::min()};

 private:
  void Add(const std::string& caller, const AdmissionUse& part)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
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

  void AddToDevice(int device, const AdmissionDeviceUse& part)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    AdmissionDeviceUse& use = devices_[device].use;
    use.calls += part.calls;
    use.memory_bytes += part.memory_bytes;
    use.lease_bytes += part.lease_bytes;
    use.seconds = use.calls == 0 ? 0 : use.seconds + part.seconds;
  }

  void AddToFlow(int device, const CallerFlow& flow, int64_t calls, double seconds)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Device& at = devices_[device];
    auto [place, is_new] = at.flows.try_emplace(flow);
    if (is_new) at.weights += WeightOf(flow.priority);
    place->second.calls += calls;
    place->second.seconds += seconds;
    if (place->second.calls > 0) return;
    at.flows.erase(place);
    at.weights -= WeightOf(flow.priority);
  }

  struct FlowUse {
    int64_t calls = 0;
    double seconds = 0;
  };
  struct Device {
    AdmissionDeviceUse use;
    bool fenced = false;
    absl::flat_hash_map<CallerFlow, FlowUse> flows;
    double weights = 0;  // of all flows; whole numbers
  };
  mutable absl::Mutex mutex_;
  std::vector<Device> devices_ ABSL_GUARDED_BY(mutex_);
  AdmissionUse use_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, AdmissionUse> callers_ ABSL_GUARDED_BY(mutex_);
};

Ticket& Ticket::operator=(Ticket&& other) noexcept {
  if (this == &other) return *this;
  ReleaseWork();
  ShrinkTo(0);
  EndDeviceLease();
  ledger_ = std::move(other.ledger_);
  flow_ = std::move(other.flow_);
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
                        {.calls = 1, .memory_bytes = device_bytes_, .seconds = seconds_});
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
  const int64_t bytes = AddUpMemory(admitted, *devices_[choice.device].backend);
  RETURN_IF_ERROR(RefuseWhileDraining());
  RETURN_IF_ERROR(RefuseTooLarge(admitted, bytes, choice));
  CallerFlow flow = {admitted.context().caller, admitted.call().priority()};
  RETURN_IF_ERROR(RefuseLate(admitted, flow, choice, now));
  RETURN_IF_ERROR(Take(flow, bytes, choice));
  Ticket& ticket = admitted.ticket();
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
    if (tensor.role == TensorUse::kKept || call.InPlace(tensor)) continue;
    int64_t& sum = tensor.role == TensorUse::kInput ? parts.input_bytes : parts.output_bytes;
    sum += AlignedSize(tensor.bytes);
  }
  parts.workspace_bytes = AlignedSize(backend.WorkspaceBytes(call.problem(), call.direction()));
  return parts.input_bytes + parts.workspace_bytes + parts.output_bytes +
         AlignedSize(call.mask_bytes());
}

// Evicts leases for what is missing. Other calls may take the freed memory, so it tries again, a
// few times.
absl::Status Admission::Take(const CallerFlow& flow, int64_t bytes, const Choice& choice) {
  constexpr int kTries = 4;
  const auto& [backend, cost] = devices_[choice.device];
  const Wanted wanted = {
      .flow = flow,
      .bytes = bytes,
      .device = choice.device,
      .part = {.calls = 1, .memory_bytes = choice.device_bytes, .seconds = choice.seconds},
      .device_limit = backend->info().memory_bytes,
      .pace = cost->pace()};
  absl::Status status;
  for (int n = 0; n < kTries; ++n) {
    LeasesInTheWay leases;
    status = ledger_->Take(limits_, wanted, &leases);
    const bool none = leases.bytes == 0 || reclaimer_ == nullptr;
    if (none || reclaimer_->Reclaim(leases.place, leases.bytes) == 0) return status;
  }
  return status;
}

Admission::Choice Admission::ChoiceOf(const AdmittedCall& admitted, int device) const {
  const AttentionCall& call = admitted.call();
  const auto& [backend, cost] = devices_[device];
  const Problem& problem = call.problem();
  int64_t bytes = backend->DeviceBytes(problem, call.direction());
  if (admitted.memory().residual_place == device) bytes -= backend->ResidualBytes(problem);
  if (call.keep_residual()) bytes += backend->KeepingBytes(problem);
  return {device, bytes,
          cost->EstimateSeconds(problem, call.direction(), admitted.flops(),
                                call.input_bytes() + call.output_bytes())};
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
    if (!supported.ok()) {
      refusal = Classified(std::move(supported));
      continue;
    }
    const Choice choice = ChoiceOf(call, n);
    const AdmissionDeviceUse use = ledger_->device_use(n);
    const bool fits = use.memory_bytes + choice.device_bytes <= backend.info().memory_bytes ||
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
    ledger_->last_refused_nanos.store(absl::ToUnixNanos(absl::Now()), std::memory_order_relaxed);
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
  if (bytes > limits_.memory_bytes) {
    return TooLarge(reason::kTooLargeForDevice, "staging memory", limits_.memory_bytes, bytes);
  }
  if (bytes > limits_.caller_max_bytes) {
    return TooLarge(reason::kTooLargeForDevice, "memory of one caller", limits_.caller_max_bytes,
                    bytes);
  }
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

absl::Status Admission::RefuseLate(const AdmittedCall& admitted, const CallerFlow& flow,
                                   const Choice& choice, absl::Time now) const {
  const double seconds = choice.seconds;
  const double ahead =
      devices_[choice.device].cost->pace() * ledger_->SecondsAhead(choice.device, flow, seconds);
  double remaining = absl::ToDoubleSeconds(admitted.context().deadline - now);
  if (kQueueMargin * ahead + seconds / kEstimateSlack <= remaining) return absl::OkStatus();
  std::string needed_text = absl::StrCat(ahead + seconds), left_text = absl::StrCat(remaining);
  return Failure(absl::StatusCode::kDeadlineExceeded, reason::kDeadlineUnmeetable,
                 absl::StrCat("deadline: about ", needed_text, " s of work lie before the answer, ",
                              left_text, " s are left"),
                 {{"estimated_seconds", needed_text}, {"remaining_seconds", left_text}});
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
