// How a RemoteModule goes on after its server: registered again where that has restarted, taken to
// another address while it drains.
#include <algorithm>
#include <memory>
#include <utility>

#include "base/status_macros.h"
#include "client/call/poll_hook.h"
#include "client/channels/error_class.h"
#include "client/modules/module_errors.h"
#include "client/modules/module_placement.h"
#include "client/modules/module_tensors.h"
#include "client/modules/remote_module.h"

namespace attnd {
namespace {

// Sequence 0, without gradients.
bool IsNew(const v1::ModuleStatus& found) {
  return found.sequence() == 0 && found.micro_batches().empty();
}

// A server does not take the module: it is gone once more, ends, or was started with less room. For
// a caller's share another one has no other answer.
bool IsForOthers(const absl::Status& status) {
  const bool is_full = absl::IsResourceExhausted(status) && !IsOverQuota(status);
  return absl::IsUnavailable(status) || is_full || absl::IsOutOfRange(status) ||
         absl::IsUnimplemented(status);
}

}  // namespace

bool RemoteModule::IsLost() const {
  absl::ReaderMutexLock lock(&mutex_);
  return IsStateLost(lost_);
}

bool RemoteModule::HasLivedOn(uint64_t life) const {
  absl::ReaderMutexLock lock(&mutex_);
  return life_ != life;
}

absl::Status RemoteModule::Recover(uint64_t life, absl::Time deadline, const CallOptions& options) {
  if (HasLivedOn(life)) return absl::OkStatus();  // another thread has recovered it
  const BackwardTurns::Pause pause(turns_);
  absl::MutexLock lock(&mutex_);
  if (life_ != life) return absl::OkStatus();
  RETURN_IF_ERROR(lost_);
  is_behind_ = true;
  // The server is starting, or ends once more: asked again until the deadline.
  while (true) {
    ModuleTry one{.deadline = deadline, .options = options, .pushback = {}};
    absl::StatusOr<v1::RegisterModuleResponse> reply = RegisterAgain(one);
    absl::Status status = reply.status();
    if (status.ok()) {
      token_ = reply->token();
      history_ = reply->status().history_epoch();
      ++life_;
      status = Replay(reply->status(), deadline, options);
    }
    if (IsStateLost(status) && HasSnapshot()) status = Restore(deadline, options);
    if (IsStateLost(status)) lost_ = status;
    if (status.ok()) is_behind_ = false;
    const bool again = absl::IsUnavailable(status) || IsModuleLost(status) || IsOverQuota(status);
    if (status.ok() || core_.clock.Now() >= deadline) return status;
    if (IsForOthers(status) && GoElsewhere(deadline, options)) continue;
    if (!again) return status;
    RETURN_IF_ERROR(WaitFor(core_.options.retry.initial_backoff, options));
  }
}

bool RemoteModule::GoElsewhere(absl::Time deadline, const CallOptions& options) {
  if (core_.connections.address_count() == 1 || !lost_.ok()) return false;
  const bool reaches = ranks_ == 1 && (CanReplayFrom(0) || HasSnapshot());
  // A server that ends at an address that its name has no more does not come back with the state:
  // then Recover says that it is lost.
  const bool is_over =
      request_.durability() == v1::DURABILITY_PROCESS && core_.connections.IsGone(address_);
  if (!reaches && !is_over) return false;
  const absl::StatusOr<Placement> place = PlaceModule(core_, request_, address_, deadline, options);
  if (!place.ok()) return false;
  address_ = place->address;
  // The copy that is left stays with the epoch before. A later owner refuses this one. A group has
  // one epoch.
  if (ranks_ == 1 && place->owner_epoch <= epoch_) epoch_ = OwnerAfter(epoch_);
  return true;
}

absl::StatusOr<v1::RegisterModuleResponse> RemoteModule::RegisterAgain(ModuleTry& attempt) {
  v1::RegisterModuleResponse reply;
  RETURN_IF_ERROR(rpcs().Register(Request(), reply, attempt));
  const v1::ModuleStatus& found = reply.status();
  if (found.history_epoch() == history_ || IsNew(found) || ranks_ > 1) return reply;
  if (!CanReplayFrom(0)) return StateLost(found.sequence(), sequence_);
  return RegisterAnew(rpcs(), attempt);
}

void RemoteModule::Registered(const v1::RegisterModuleResponse& reply) {
  token_ = reply.token();
  carry_streams_ = static_cast<int>(reply.carry_streams());
  whole_bytes_ = static_cast<int64_t>(reply.whole_bytes());
  ++life_;
  history_ = reply.status().history_epoch();
  sequence_ = reply.status().sequence();
  optimizer_step_ = reply.status().optimizer_step();
  lost_ = absl::OkStatus();
  is_behind_ = false;
  absl::MutexLock log_lock(&log_mutex_);
  log_.Begin(sequence_);
  ClearGradients();
  for (uint32_t end : reply.status().micro_batches())
    micro_batches_ = std::max(micro_batches_, end);
  unused_.clear();
  snapshot_ = nullptr;
}

absl::StatusOr<v1::RegisterModuleResponse> RemoteModule::RegisterAnew(const ModuleRpcs& at,
                                                                      ModuleTry& attempt) {
  v1::RegisterModuleResponse reply;
  RETURN_IF_ERROR(at.Register(Request(), reply, attempt));
  if (IsNew(reply.status()) && reply.status().history_epoch() == epoch_) return reply;
  RETURN_IF_ERROR(at.Release(reply.token(), attempt));
  RETURN_IF_ERROR(at.Register(Request(), reply, attempt));
  return reply;
}

absl::Status RemoteModule::BeginAnew(const CallOptions& options) {
  ASSIGN_OR_RETURN(const absl::Time deadline, Deadline(options));
  ModuleTry one{.deadline = deadline, .options = options, .pushback = {}};
  absl::MutexLock lock(&mutex_);
  v1::RegisterModuleResponse reply;
  if (ranks_ == 1) {
    epoch_ = OwnerAfter(epoch_);
    ASSIGN_OR_RETURN(reply, RegisterAnew(rpcs(), one));
  } else {  // which has one owner epoch
    RETURN_IF_ERROR(rpcs().Register(Request(), reply, one));
  }
  Registered(reply);
  absl::MutexLock log_lock(&log_mutex_);
  ClearGradients();  // of this rank; others may have called
  return absl::OkStatus();
}

void RemoteModule::KeepSnapshots(uint64_t every) {
  absl::MutexLock lock(&log_mutex_);
  snapshot_every_ = every;
}

bool RemoteModule::CanReplayFrom(uint64_t sequence) const {
  absl::MutexLock lock(&log_mutex_);
  return log_.CanReplayFrom(sequence);
}

bool RemoteModule::HasSnapshot() const {
  absl::MutexLock lock(&log_mutex_);
  return snapshot_ != nullptr && log_.CanReplayFrom(snapshot_sequence_);
}

bool RemoteModule::IsRecoverable() const {
  if (HasSnapshot()) return true;
  absl::MutexLock lock(&log_mutex_);
  return log_.CanReplayFrom(durable_sequence_);
}

// A server that cannot give it now is asked after the next change.
void RemoteModule::TakeSnapshot(const CallOptions& options) {
  absl::ReaderMutexLock lock(&mutex_);
  {
    absl::MutexLock log_lock(&log_mutex_);
    const bool is_due = snapshot_ == nullptr || sequence_ - snapshot_sequence_ >= snapshot_every_ ||
                        !log_.CanReplayFrom(snapshot_sequence_);
    if (snapshot_every_ == 0 || !is_due) return;
  }
  const absl::StatusOr<absl::Time> deadline = Deadline(options);
  if (!deadline.ok()) return;
  absl::StatusOr<std::shared_ptr<const SentPut>> state = StateOf(sequence_, *deadline, options);
  if (!state.ok()) return;
  absl::MutexLock log_lock(&log_mutex_);
  snapshot_ = *std::move(state);
  snapshot_sequence_ = sequence_;
  log_.ForgetBefore(sequence_);
}

absl::Status RemoteModule::Restore(absl::Time deadline, const CallOptions& options) {
  ModuleTry one{.deadline = deadline, .options = options, .pushback = {}};
  std::shared_ptr<const SentPut> snapshot;
  std::vector<RedoLog::Entry> entries;
  {
    absl::MutexLock log_lock(&log_mutex_);
    snapshot = snapshot_;
    entries = log_.From(snapshot_sequence_);
  }
  epoch_ = OwnerAfter(epoch_);  // sequences count from here on
  ASSIGN_OR_RETURN(const v1::RegisterModuleResponse reply, RegisterAnew(rpcs(), one));
  token_ = reply.token();
  history_ = reply.status().history_epoch();
  ++life_;
  {
    absl::MutexLock log_lock(&log_mutex_);
    unused_.clear();
    sequence_ = sequence_ - snapshot_sequence_ + 1;
    log_.Begin(0);
    log_.End(snapshot);
    for (RedoLog::Entry& entry : entries) {
      entry.sequence = entry.sequence - snapshot_sequence_ + 1;
      for (SentBackward& kept : entry.backwards) log_.Add(kept);
      for (StateChange& change : entry.end) log_.End(change);
    }
    snapshot_sequence_ = 1;
  }
  RETURN_IF_ERROR(ReplayEnd(0, 0, snapshot, one));
  return ReplayEntries(entries, deadline, options);
}

absl::Status RemoteModule::Replay(const v1::ModuleStatus& found, absl::Time deadline,
                                  const CallOptions& options) {
  std::vector<RedoLog::Entry> entries;
  {
    absl::MutexLock lock(&log_mutex_);
    unused_.clear();
    // One ahead is a Step or Put whose reply was lost: what tries it again finds out.
    if (found.sequence() == sequence_ + 1) return absl::OkStatus();
    const bool is_others = ranks_ > 1 && found.sequence() != sequence_;
    if (is_others || !log_.CanReplayFrom(found.sequence())) {
      return StateLost(found.sequence(), sequence_);
    }
    entries = log_.From(found.sequence());
  }
  return ReplayEntries(entries, deadline, options);
}

absl::Status RemoteModule::ReplayEntries(const std::vector<RedoLog::Entry>& entries,
                                         absl::Time deadline, const CallOptions& options) {
  for (const RedoLog::Entry& entry : entries) {
    for (const SentBackward& kept : entry.backwards) {
      ModuleTry one{.deadline = deadline, .options = options, .pushback = {}};
      RETURN_IF_ERROR(ReplayBackward(rpcs(), token_, entry.sequence, kept, one));
      ++core_.counters.replays;
    }
    for (const StateChange& change : entry.end) {
      ModuleTry one{.deadline = deadline, .options = options, .pushback = {}};
      RETURN_IF_ERROR(ReplayEnd(entry.sequence, entry.backwards.size(), change, one));
      ++core_.counters.replays;
    }
  }
  return absl::OkStatus();
}

absl::Status RemoteModule::ReplayBackward(const ModuleRpcs& rpcs, const std::string& token,
                                          uint64_t sequence, const SentBackward& kept,
                                          ModuleTry& attempt) {
  if (kept.gradients != nullptr) {
    v1::PutTensorsHeader header;
    header.set_token(token);
    header.set_sequence(sequence);
    header.set_micro_batch(kept.micro_batch);
    v1::PutTensorsResponse reply;
    return rpcs.Put(header, *kept.gradients, reply, attempt);
  }
  v1::ModuleBackwardHeader header;
  header.set_token(token);
  header.set_sequence(sequence);
  header.set_micro_batch(kept.micro_batch);
  *header.mutable_forward() = kept.forward->header;
  header.mutable_forward()->set_token(token);
  header.mutable_forward()->set_training(true);
  v1::ModuleBackwardResult result;
  return rpcs.Backward(std::move(header), kept.forward.get(), kept.dy, {}, result, attempt);
}

absl::Status RemoteModule::ReplayEnd(uint64_t sequence, size_t micro_batches,
                                     const StateChange& change, ModuleTry& attempt) {
  if (const auto* put = std::get_if<std::shared_ptr<const SentPut>>(&change)) {
    v1::PutTensorsHeader header;
    header.set_token(token_);
    header.set_sequence(sequence);
    v1::PutTensorsResponse reply;
    return rpcs().Put(header, **put, reply, attempt);
  }
  v1::StepRequest request = std::get<v1::StepRequest>(change);
  request.set_token(token_);
  request.set_sequence(sequence);
  request.set_micro_batches(static_cast<uint32_t>(micro_batches));
  v1::StepResponse reply;
  return rpcs().Step(request, reply, attempt);
}

bool RemoteModule::Move(uint64_t life, absl::Time deadline, const CallOptions& options) {
  if (core_.connections.address_count() == 1) return HasLivedOn(life);
  const BackwardTurns::Pause pause(turns_);
  absl::MutexLock lock(&mutex_);
  if (life_ != life) return true;  // another thread has
  if (ranks_ > 1 || !lost_.ok()) return false;
  absl::StatusOr<ModuleContents> contents = Contents(deadline, options);
  if (!contents.ok()) return false;
  const absl::StatusOr<Placement> place = PlaceModule(core_, request_, address_, deadline, options);
  return place.ok() && MoveTo(*place, *contents, deadline, options).ok();
}

bool RemoteModule::FailOver(uint64_t life, absl::Time deadline, const CallOptions& options) {
  if (core_.connections.address_count() == 1) return HasLivedOn(life);
  {
    const BackwardTurns::Pause pause(turns_);
    absl::MutexLock lock(&mutex_);
    if (life_ != life) return true;  // another thread has
    if (!GoElsewhere(deadline, options)) return false;
  }
  const absl::Status recovered = Recover(life, deadline, options);
  return recovered.ok() || IsStateLost(recovered);
}

absl::StatusOr<RemoteModule::ModuleContents> RemoteModule::Contents(
    absl::Time deadline, const CallOptions& options) const {
  ModuleContents contents;
  {
    absl::MutexLock log_lock(&log_mutex_);
    contents.is_logged = log_.CanReplayFrom(sequence_);
    if (contents.is_logged) {
      for (RedoLog::Entry& entry : log_.From(sequence_)) {
        contents.gradients = std::move(entry.backwards);
      }
    }
  }
  ASSIGN_OR_RETURN(contents.state, StateOf(sequence_, deadline, options, !contents.is_logged));
  return contents;
}

absl::StatusOr<std::shared_ptr<const SentPut>> RemoteModule::StateOf(
    uint64_t sequence, absl::Time deadline, const CallOptions& options,
    bool must_have_no_gradients) const {
  ModuleTry one{.deadline = deadline, .options = options, .pushback = {}};
  v1::GetModuleRequest request;
  request.set_token(token_);
  v1::GetModuleResponse found;
  RETURN_IF_ERROR(rpcs().GetModule(request, found, one));
  if (!found.status().weights_complete()) return absl::FailedPreconditionError("no weights");
  if (must_have_no_gradients && !found.status().micro_batches().empty()) {
    return absl::FailedPreconditionError("gradients are there");
  }
  auto state = std::make_shared<SentPut>();
  ASSIGN_OR_RETURN(state->tensors, FetchTensors(rpcs(), token_, sequence, one));
  state->commit.set_complete(true);
  state->commit.set_optimizer_step(found.status().optimizer_step());
  return state;
}

absl::Status RemoteModule::MoveTo(const Placement& place, const ModuleContents& contents,
                                  absl::Time deadline, const CallOptions& options) {
  const ModuleRpcs there(core_, place.address, request_.name());
  ModuleTry one{.deadline = deadline, .options = options, .pushback = {}};
  if (place.owner_epoch <= epoch_) epoch_ = OwnerAfter(epoch_);
  ASSIGN_OR_RETURN(const v1::RegisterModuleResponse made, RegisterAnew(there, one));
  v1::PutTensorsHeader header;
  header.set_token(made.token());
  header.set_sequence(made.status().sequence());
  v1::PutTensorsResponse put;
  RETURN_IF_ERROR(there.Put(header, *contents.state, put, one));
  const v1::ModuleStatus& status = put.status();
  for (const SentBackward& kept : contents.gradients) {
    RETURN_IF_ERROR(ReplayBackward(there, made.token(), status.sequence(), kept, one));
  }
  rpcs().Release(token_, one).IgnoreError();  // that server waits for it
  address_ = place.address;
  token_ = made.token();
  history_ = made.status().history_epoch();
  ++life_;
  sequence_ = status.sequence();
  absl::MutexLock log_lock(&log_mutex_);
  unused_.clear();
  log_.Begin(made.status().sequence());
  log_.End(contents.state);
  if (snapshot_every_ > 0) snapshot_ = contents.state;
  snapshot_sequence_ = status.sequence();
  for (const SentBackward& kept : contents.gradients) log_.Add(kept);
  if (!contents.is_logged) log_.LosePresent();
  log_.ForgetBefore(status.durable_sequence());
  return absl::OkStatus();
}

}  // namespace attnd
