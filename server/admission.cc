#include "server/admission.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "server/staging_pool.h"
#include "server/status_details.h"

namespace attnd {
namespace {

// An estimate may be wrong by this factor; only what misses its deadline by more is refused.
constexpr double kEstimateSlack = 2;

// A draining one will not come back: longer than its ports stay open.
constexpr absl::Duration kDrainingRetryDelay = absl::Seconds(1);

// A full server asks to be left alone for the time its queue needs, within reason.
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

// What is taken now, in total and by each caller. Any thread.
class AdmissionLedger {
 public:
  // When leases stand in the way, `missing` tells how many of their bytes would have to go.
  absl::Status Take(const AdmissionLimits& limits, const std::string& caller, int64_t bytes,
                    double seconds, int64_t* missing) {
    absl::MutexLock lock(&mutex_);
    if (use_.calls + 1 > limits.max_calls) {
      return Full(reason::kQueueFull, "calls", limits.max_calls, use_.calls + 1, use_.seconds);
    }
    if (use_.calls > 0 && use_.seconds > limits.max_queue_seconds) {
      return Full(reason::kQueueFull, "milliseconds of work ahead",
                  static_cast<int64_t>(limits.max_queue_seconds * 1e3),
                  static_cast<int64_t>(use_.seconds * 1e3), use_.seconds);
    }
    int64_t wanted = use_.bytes + use_.lease_bytes + bytes;
    if (wanted > limits.memory_bytes) {
      *missing = std::min(wanted - limits.memory_bytes, use_.lease_bytes);
      return Full(reason::kMemoryPressure, "bytes of staging memory", limits.memory_bytes, wanted,
                  use_.seconds);
    }
    auto own = callers_.find(caller);
    AdmissionUse mine = own == callers_.end() ? AdmissionUse{} : own->second;
    if (mine.calls + 1 > limits.caller_max_calls) {
      return OverQuota(caller, "calls", limits.caller_max_calls, mine.calls + 1);
    }
    if (mine.bytes + bytes > limits.caller_max_bytes) {
      return OverQuota(caller, "bytes", limits.caller_max_bytes, mine.bytes + bytes);
    }
    Add(caller, {.calls = 1, .bytes = bytes, .seconds = seconds});
    return absl::OkStatus();
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

  mutable absl::Mutex mutex_;
  AdmissionUse use_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, AdmissionUse> callers_ ABSL_GUARDED_BY(mutex_);
};

Ticket& Ticket::operator=(Ticket&& other) noexcept {
  if (this == &other) return *this;
  ReleaseWork();
  ShrinkTo(0);
  ledger_ = std::move(other.ledger_);
  caller_ = std::move(other.caller_);
  bytes_ = std::exchange(other.bytes_, 0);
  seconds_ = std::exchange(other.seconds_, 0);
  working_ = std::exchange(other.working_, false);
  lease_ = std::exchange(other.lease_, false);
  return *this;
}

Ticket::~Ticket() {
  ReleaseWork();
  ShrinkTo(0);
}

void Ticket::ReleaseWork() {
  if (!working_) return;
  working_ = false;
  ledger_->GiveBack(caller_, {.calls = 1, .seconds = seconds_});
}

void Ticket::ShrinkTo(int64_t bytes) {
  if (bytes >= bytes_) return;
  int64_t back = bytes_ - bytes;
  ledger_->GiveBack(caller_,
                    lease_ ? AdmissionUse{.lease_bytes = back} : AdmissionUse{.bytes = back});
  bytes_ = bytes;
}

void Ticket::BecomeLease(int64_t bytes) {
  ReleaseWork();
  ShrinkTo(bytes);
  if (lease_ || ledger_ == nullptr) return;
  ledger_->BecomeLease(caller_, bytes_);
  lease_ = true;
}

Admission::Admission(const AdmissionLimits& limits, const Backend& backend, const CostModel& cost,
                     const Clock& clock, MemoryReclaimer* reclaimer)
    : limits_(limits),
      backend_(backend),
      cost_(cost),
      clock_(clock),
      reclaimer_(reclaimer),
      ledger_(std::make_shared<AdmissionLedger>()) {}

absl::StatusOr<AdmittedCall> Admission::Admit(AttentionCall decoded, CallContext context) {
  const Problem& problem = decoded.problem();
  RETURN_IF_ERROR(Classified(backend_.Supports(problem, decoded.direction())));
  absl::Time now = clock_.Now();
  AdmittedCall admitted(std::move(decoded), std::move(context));
  const AttentionCall& call = admitted.call_;
  admitted.admitted_at_ = now;
  admitted.context_.deadline = std::min(admitted.context_.deadline, now + limits_.max_deadline);
  for (const TensorSource& input : call.inputs()) {
    admitted.input_bytes_ += AlignedSize(input.range.size);
  }
  for (const TensorSize& output : OutputsOf(problem, call.direction())) {
    admitted.output_bytes_ += AlignedSize(output.bytes);
  }
  admitted.workspace_bytes_ = AlignedSize(backend_.WorkspaceBytes(problem, call.direction()));
  int64_t bytes = admitted.input_bytes_ + admitted.workspace_bytes_ + admitted.output_bytes_;
  double seconds = cost_.EstimateSeconds(call.direction(), problem.element, call.flops(),
                                         call.input_bytes() + call.output_bytes());
  RETURN_IF_ERROR(Refuse(admitted, seconds, now));
  if (bytes > limits_.memory_bytes) {
    return TooLarge(reason::kTooLargeForDevice, "staging memory", limits_.memory_bytes, bytes);
  }
  RETURN_IF_ERROR(Take(admitted, bytes, seconds));
  admitted.ticket_.ledger_ = ledger_;
  admitted.ticket_.caller_ = admitted.context_.caller;
  admitted.ticket_.bytes_ = bytes;
  admitted.ticket_.seconds_ = seconds;
  admitted.ticket_.working_ = true;
  return admitted;
}

// Leases are asked to give way once for what is missing; more than once when others took what they
// gave, but not for ever.
absl::Status Admission::Take(const AdmittedCall& call, int64_t bytes, double seconds) {
  constexpr int kTries = 4;
  absl::Status status;
  for (int n = 0; n < kTries; ++n) {
    int64_t missing = 0;
    status = ledger_->Take(limits_, call.context().caller, bytes, seconds, &missing);
    if (missing == 0 || reclaimer_ == nullptr || reclaimer_->Reclaim(missing) == 0) return status;
  }
  return status;
}

absl::Status Admission::Refuse(const AdmittedCall& admitted, double seconds, absl::Time now) const {
  if (ledger_->draining.load(std::memory_order_relaxed)) {
    ledger_->last_refused_nanos.store(absl::ToUnixNanos(absl::Now()), std::memory_order_relaxed);
    return WithRetryAfter(Failure(absl::StatusCode::kUnavailable, reason::kDraining,
                                  "this server is draining; another replica can take the call"),
                          kDrainingRetryDelay);
  }
  if (!admitted.context().streamed && admitted.call().output_bytes() > limits_.max_reply_bytes) {
    return TooLarge(reason::kReplyTooLarge, "reply", limits_.max_reply_bytes,
                    admitted.call().output_bytes());
  }
  double ahead = ledger_->use().seconds;
  double remaining = absl::ToDoubleSeconds(admitted.context().deadline - now);
  if ((ahead + seconds) / kEstimateSlack <= remaining) return absl::OkStatus();
  std::string needed_text = absl::StrCat(ahead + seconds), left_text = absl::StrCat(remaining);
  return Failure(absl::StatusCode::kDeadlineExceeded, reason::kDeadlineUnmeetable,
                 absl::StrCat("deadline: about ", needed_text, " s of work lie before the answer, ",
                              left_text, " s are left"),
                 {{"estimated_seconds", needed_text}, {"remaining_seconds", left_text}});
}

void Admission::StartDraining() { ledger_->draining = true; }
absl::Time Admission::last_refused_at() const {
  int64_t nanos = ledger_->last_refused_nanos.load(std::memory_order_relaxed);
  return nanos == std::numeric_limits<int64_t>::min() ? absl::InfinitePast()
                                                      : absl::FromUnixNanos(nanos);
}

AdmissionUse Admission::Use() const { return ledger_->use(); }

}  // namespace attnd
