#include "server/modules/registered_module.h"

#include <algorithm>

#include "base/check.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "base/stop_wakes.h"
#include "server/call/status_details.h"
#include "server/modules/module_errors.h"

namespace attnd {
namespace {

constexpr double kMostOfTime = 0.2;  // that saves of a module take: a GPU's steps are far shorter

}  // namespace

absl::Status CallWait::Stopped() const {
  if (SteadyNow() >= deadline) {
    return Failure(absl::StatusCode::kDeadlineExceeded, reason::kDeadlineExceededQueue,
                   "the deadline passed while the call waited or was computed");
  }
  return Failure(absl::StatusCode::kCancelled, reason::kCancelled, "cancelled by the caller");
}

RegisteredModule::RegisteredModule(ModuleRecord record, std::unique_ptr<ModuleInstance> instance,
                                   ModuleMemory::Reservation memory,
                                   std::unique_ptr<ModuleState> state,
                                   std::optional<SavedChange> saved)
    : record_(std::move(record)),
      memory_(std::make_shared<const ModuleMemory::Reservation>(std::move(memory))),
      instance_(std::move(instance)),
      state_(std::move(state)),
      put_(instance_->description().table.entries().size(), saved.has_value()),
      missing_(saved.has_value() ? 0 : static_cast<int64_t>(put_.size())) {
  if (!saved.has_value()) return;
  durable_sequence_ = saved->sequence;
  optimizer_step_ = instance_->optimizer_step();
  ledger_.Restore(saved->sequence, std::move(saved->digest), std::move(saved->reply));
}

RegisteredModule::RegisteredModule(ModuleRecord record, RegisteredModule& from)
    : record_(std::move(record)),
      memory_(from.memory_),
      replica_memory_(std::move(from.replica_memory_)),
      instance_(from.instance_),
      state_(std::move(from.state_)),
      early_places_(from.early_places_),
      ledger_(std::move(from.ledger_)),
      durable_sequence_(from.durable_sequence_),
      save_again_(from.save_again_),
      put_(std::move(from.put_)),
      missing_(from.missing_),
      optimizer_step_(from.optimizer_step_),
      forgotten_(std::move(from.forgotten_)),
      ttl_(from.ttl_),
      expires_(from.expires_),
      used_at_(from.used_at_) {}

absl::StatusOr<std::shared_ptr<RegisteredModule>> RegisteredModule::TakeOver(uint64_t id,
                                                                             uint64_t owner_epoch,
                                                                             const CallWait& wait) {
  const StopWakes wakes(wait.stop, mutex_);
  absl::MutexLock lock(&mutex_);
  RETURN_IF_ERROR(AwaitFree(wait, [] { return true; }));
  ModuleRecord record = record_;
  record.id = id;
  record.owner_epoch = owner_epoch;
  lost_ = kTaken;
  ForgetKept();
  return std::shared_ptr<RegisteredModule>(new RegisteredModule(std::move(record), *this));
}

// A module that its caller has given up, or that failed, is not to be found again; an expired one
// is not to take memory of the host. A module whose device is lost goes on elsewhere.
RegisteredModule::~RegisteredModule() {
  absl::MutexLock lock(&mutex_);
  if (state_ == nullptr || lost_.empty() || lost_ == kDeviceLost) return;
  if (lost_ != kExpired || !state_->place().is_disk) state_->Forget();
}

// ---- Turns.

absl::Status RegisteredModule::CheckReachable(uint64_t sequence) const {
  if (Lost()) return ModuleLost(lost_);
  if (changing_ && sequence == ledger_.sequence() + 1) return absl::OkStatus();
  return ledger_.CheckSequence(sequence);
}

template <class Ready>
absl::Status RegisteredModule::AwaitFree(const CallWait& wait, const Ready& ready) {
  auto over = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return Lost() || wait.stop.stop_requested() || (!busy_ && ready());
  };
  ++waiting_;
  const bool in_time = mutex_.AwaitWithTimeout(absl::Condition(&over), wait.deadline - SteadyNow());
  --waiting_;
  if (Lost()) return ModuleLost(lost_);
  if (!in_time || wait.stop.stop_requested()) return wait.Stopped();
  return absl::OkStatus();
}

RegisteredModule::Hold RegisteredModule::Begin(bool is_change) {
  busy_ = true;
  changing_ = is_change;
  DropForgotten();
  return Hold(*this);
}

absl::StatusOr<RegisteredModule::Hold> RegisteredModule::Take(std::optional<uint64_t> sequence,
                                                              const CallWait& wait) {
  const StopWakes wakes(wait.stop, mutex_);
  absl::MutexLock lock(&mutex_);
  if (sequence.has_value()) RETURN_IF_ERROR(CheckReachable(*sequence));
  RETURN_IF_ERROR(AwaitFree(wait, [] { return true; }));
  if (sequence.has_value()) RETURN_IF_ERROR(ledger_.CheckSequence(*sequence));
  return Begin(false);
}

absl::StatusOr<RegisteredModule::ChangeTurn> RegisteredModule::TakeChange(uint64_t sequence,
                                                                          const std::string& digest,
                                                                          const CallWait& wait) {
  const StopWakes wakes(wait.stop, mutex_);
  absl::MutexLock lock(&mutex_);
  RETURN_IF_ERROR(AwaitFree(wait, [] { return true; }));
  ASSIGN_OR_RETURN(const CallLedger::Change change, ledger_.CheckChange(sequence, digest));
  if (change == CallLedger::Change::kSeen) return ChangeTurn{std::nullopt, ledger_.last_reply()};
  return ChangeTurn{Begin(true), ""};
}

absl::StatusOr<RegisteredModule::MicroBatchTurn> RegisteredModule::TakeMicroBatch(
    uint64_t sequence, uint64_t micro_batch, absl::FunctionRef<std::string()> digest,
    const CallWait& wait) {
  const StopWakes wakes(wait.stop, mutex_);
  absl::MutexLock lock(&mutex_);
  RETURN_IF_ERROR(CheckReachable(sequence));
  const bool is_early = micro_batch > ledger_.micro_batches();
  const bool is_limited = is_early && early_places_ != nullptr;
  const EarlyPlaces::Place among_early =
      is_limited ? early_places_->Take(record_.caller) : EarlyPlaces::Place();
  if (is_limited && !among_early) return MicroBatchEarly(micro_batch, ledger_.micro_batches());
  RETURN_IF_ERROR(AwaitFree(wait, [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return ledger_.sequence() != sequence || ledger_.micro_batches() >= micro_batch;
  }));
  RETURN_IF_ERROR(ledger_.CheckSequence(sequence));
  const bool was_added = micro_batch < ledger_.micro_batches();
  ASSIGN_OR_RETURN(const CallLedger::Place place,
                   ledger_.PlaceOf(micro_batch, was_added ? digest() : std::string()));
  return MicroBatchTurn{Begin(false), place == CallLedger::Place::kAdded};
}

absl::Status RegisteredModule::CheckSequence(std::optional<uint64_t> sequence) const {
  absl::MutexLock lock(&mutex_);
  if (Lost()) return ModuleLost(lost_);
  return sequence.has_value() ? CheckReachable(*sequence) : absl::OkStatus();
}

absl::Status RegisteredModule::CheckChange(uint64_t sequence) const {
  absl::MutexLock lock(&mutex_);
  if (Lost()) return ModuleLost(lost_);
  const uint64_t now = ledger_.sequence();
  const bool near = sequence == now || sequence + 1 == now || (changing_ && sequence == now + 1);
  return near ? absl::OkStatus() : StepOutOfOrder(now, sequence);
}

absl::Status RegisteredModule::CheckMicroBatch(uint64_t micro_batch) const {
  const bool has_room = early_places_ == nullptr || early_places_->HasRoom(record_.caller);
  return has_room ? absl::OkStatus() : CheckIsNext(micro_batch);
}

absl::Status RegisteredModule::CheckIsNext(uint64_t micro_batch) const {
  absl::MutexLock lock(&mutex_);
  if (micro_batch <= ledger_.micro_batches()) return absl::OkStatus();
  return MicroBatchEarly(micro_batch, ledger_.micro_batches());
}

bool RegisteredModule::FinishesStep() {
  absl::MutexLock lock(&mutex_);
  const bool has_gradients = ledger_.micro_batches() > 0;
  return std::exchange(finishes_step_, has_gradients) && has_gradients;
}

absl::Status RegisteredModule::CheckWeights(const std::vector<bool>& too) const {
  absl::MutexLock lock(&mutex_);
  if (missing_ == 0) return absl::OkStatus();
  int64_t missing = 0;
  std::string first;
  for (size_t n = 0; n < put_.size(); ++n) {
    if (put_[n] || (!too.empty() && too[n])) continue;
    if (missing++ == 0) first = description().table.entries()[n].name;
  }
  return missing == 0 ? absl::OkStatus() : WeightsIncomplete(missing, first);
}

absl::StatusOr<KeptForward> RegisteredModule::FindKept(uint64_t kept) const {
  absl::MutexLock lock(&mutex_);
  auto found = kept_.find(kept);
  if (found != kept_.end()) return found->second;
  return RenameField(LeaseLost(kept < next_kept_ ? "spent or expired" : "unknown"),
                     "residual_token", "activations");
}

// ---- What the holder did.

RegisteredModule::Hold::~Hold() {
  if (module_ == nullptr) return;
  absl::MutexLock lock(&module_->mutex_);
  module_->DropForgotten();
  module_->busy_ = module_->changing_ = false;
}

uint64_t RegisteredModule::Hold::sequence() const {
  absl::MutexLock lock(&module_->mutex_);
  return module_->ledger_.sequence();
}

absl::Status RegisteredModule::Hold::CheckGradient(uint64_t micro_batches) const {
  absl::MutexLock lock(&module_->mutex_);
  return module_->ledger_.CheckGradient(micro_batches);
}

uint64_t RegisteredModule::Hold::Keep(KeptForward kept) {
  absl::MutexLock lock(&module_->mutex_);
  const uint64_t number = module_->next_kept_++;
  module_->kept_.emplace(number, std::move(kept));
  return number;
}

std::optional<KeptForward> RegisteredModule::Hold::Find(uint64_t kept) const {
  absl::MutexLock lock(&module_->mutex_);
  auto found = module_->kept_.find(kept);
  if (found == module_->kept_.end()) return std::nullopt;
  return found->second;
}

void RegisteredModule::Hold::Drop(uint64_t kept) {
  absl::MutexLock lock(&module_->mutex_);
  auto found = module_->kept_.find(kept);
  if (found == module_->kept_.end()) return;
  module_->forgotten_.push_back(found->second.activation);
  module_->kept_.erase(found);
}

bool RegisteredModule::Hold::DropOldest() {
  absl::MutexLock lock(&module_->mutex_);
  module_->DropForgotten();
  const auto oldest = module_->kept_.begin();
  if (oldest == module_->kept_.end()) return false;
  module_->instance_->DropActivation(oldest->second.activation);
  module_->kept_.erase(oldest);
  return true;
}

void RegisteredModule::Hold::Added(std::string digest) {
  absl::MutexLock lock(&module_->mutex_);
  module_->ledger_.Added(std::move(digest));
}

void RegisteredModule::Hold::WasPut(int64_t entry) {
  absl::MutexLock lock(&module_->mutex_);
  if (!module_->put_[entry]) --module_->missing_;
  module_->put_[entry] = true;
}

// Activations of the weights that were are of no use.
void RegisteredModule::Hold::Changed(std::string digest, std::string reply) {
  absl::MutexLock lock(&module_->mutex_);
  module_->ledger_.Changed(std::move(digest), std::move(reply));
  module_->optimizer_step_ = module_->instance_->optimizer_step();
  module_->ForgetKept();
}

void RegisteredModule::Hold::Save(absl::Time now, bool at_once) {
  if (module_->state_ == nullptr) return;
  SavedChange change;
  {
    absl::MutexLock lock(&module_->mutex_);
    const auto behind =
        static_cast<int64_t>(module_->ledger_.sequence() - module_->durable_sequence_);
    if (module_->missing_ > 0 || behind == 0) return;
    const int64_t changes = module_->state_->place().changes;
    const bool is_due = changes > 0 ? behind >= changes : now >= module_->save_again_;
    if (!at_once && !is_due) return;
    change = {module_->ledger_.sequence(), module_->ledger_.last_digest(),
              module_->ledger_.last_reply(), module_->record_.owner_epoch,
              module_->record_.history_epoch};
  }
  const absl::Time began = SteadyNow();
  const bool saved = module_->state_->Save(*module_->instance_, change).ok();
  const absl::Duration took = SteadyNow() - began;
  absl::MutexLock lock(&module_->mutex_);
  module_->save_again_ = now + std::max(module_->state_->place().every, took / kMostOfTime);
  if (saved) module_->durable_sequence_ = change.sequence;
}

void RegisteredModule::Hold::Fail() {
  absl::MutexLock lock(&module_->mutex_);
  if (!module_->Lost()) module_->lost_ = "failed";
}

void RegisteredModule::ForgetKept() {
  for (const auto& [number, kept] : kept_) forgotten_.push_back(kept.activation);
  kept_.clear();
}

void RegisteredModule::DropForgotten() {
  for (const ActivationId activation : forgotten_) instance_->DropActivation(activation);
  forgotten_.clear();
}

// ---- Its life.

void RegisteredModule::Touch(absl::Time now, std::optional<absl::Duration> ttl) {
  absl::MutexLock lock(&mutex_);
  if (ttl.has_value()) ttl_ = *ttl;
  used_at_ = now;
  expires_ = now + ttl_;
}

void RegisteredModule::Prolong(absl::Duration time) {
  absl::MutexLock lock(&mutex_);
  expires_ += time;
}

void RegisteredModule::SaveIfDue(absl::Time now, bool at_once) {
  {
    absl::MutexLock lock(&mutex_);
    if (state_ == nullptr || busy_ || Lost()) return;
    busy_ = true;
  }
  Hold(*this).Save(now, at_once);
}

bool RegisteredModule::Expire(absl::Time now) {
  absl::MutexLock lock(&mutex_);
  for (auto kept = kept_.begin(); kept != kept_.end();) {
    const bool is_over = kept->second.expires <= now;
    if (is_over) forgotten_.push_back(kept->second.activation);
    kept = is_over ? kept_.erase(kept) : std::next(kept);
  }
  if (!busy_) DropForgotten();
  return !busy_ && waiting_ == 0 && expires_ <= now;
}

bool RegisteredModule::IsOn(int device) const {
  const absl::Span<const EnginePlan> parts = plan().parts();
  return std::any_of(parts.begin(), parts.end(),
                     [device](const EnginePlan& part) { return part.device == device; });
}

void RegisteredModule::Lose(std::string cause) {
  CHECK(!cause.empty());
  absl::MutexLock lock(&mutex_);
  if (lost_.empty()) lost_ = std::move(cause);
}

void SetBytes(const EnginePlan& plan, int64_t all, const std::string& engine,
              v1::ModuleStatus& status) {
  const int64_t on_gpus = engine == "cuda" ? plan.device_bytes() : 0;
  status.set_hbm_bytes(static_cast<uint64_t>(on_gpus));
  status.set_host_bytes(static_cast<uint64_t>(all - on_gpus));
}

v1::ModuleStatus RegisteredModule::Status() const {
  v1::ModuleStatus status;
  status.set_name(record_.name);
  status.set_layout_digest(record_.layout_digest);
  SetBytes(plan(), memory_->bytes(), record_.plan.engine(), status);
  status.set_owner_epoch(record_.owner_epoch);
  status.set_history_epoch(record_.history_epoch);
  status.mutable_device()->Assign(record_.devices.begin(), record_.devices.end());
  absl::MutexLock lock(&mutex_);
  status.set_sequence(ledger_.sequence());
  status.set_durable_sequence(durable_sequence_);
  status.set_optimizer_step(static_cast<uint64_t>(optimizer_step_));
  if (ledger_.micro_batches() > 0) {
    status.add_micro_batches(0);
    status.add_micro_batches(static_cast<uint32_t>(ledger_.micro_batches()));
  }
  status.set_weights_complete(missing_ == 0);
  status.set_expires_unix_ms(static_cast<uint64_t>(absl::ToUnixMillis(WallTime(expires_))));
  return status;
}

uint64_t RegisteredModule::durable_sequence() const {
  absl::MutexLock lock(&mutex_);
  return durable_sequence_;
}

uint64_t RegisteredModule::durable_lag() const {
  absl::MutexLock lock(&mutex_);
  return state_ == nullptr ? 0 : ledger_.sequence() - durable_sequence_;
}

absl::Time RegisteredModule::used_at() const {
  absl::MutexLock lock(&mutex_);
  return used_at_;
}

int RegisteredModule::waiting() const {
  absl::MutexLock lock(&mutex_);
  return waiting_;
}

}  // namespace attnd
