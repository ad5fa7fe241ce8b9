// How a RemoteModule goes on after its server: registered again where that has restarted, taken to
// another address while it drains.
#include <algorithm>
#include <memory>
#include <utility>

#include "base/status_macros.h"
#include "client/modules/module_errors.h"
#include "client/modules/module_placement.h"
#include "client/modules/module_tensors.h"
#include "client/modules/remote_module.h"

namespace attnd {

absl::Status RemoteModule::Recover(uint64_t life, absl::Time deadline, const CallOptions& options) {
  v1::RegisterModuleResponse reply;
  absl::MutexLock lock(&mutex_);
  if (life_ != life) return absl::OkStatus();  // another thread has
  // The server is starting, or ends once more: asked again until the deadline.
  while (true) {
    ModuleTry one{.deadline = deadline, .options = options, .pushback = {}};
    absl::Status status = rpcs().Register(request_, reply, one);
    if (status.ok()) {
      token_ = reply.token();
      ++life_;
      status = Replay(reply.status(), deadline, options);
    }
    const bool again = absl::IsUnavailable(status) || IsModuleLost(status);
    if (!again || core_.clock.Now() >= deadline) return status;
    RETURN_IF_ERROR(WaitFor(core_.options.retry.initial_backoff, options));
  }
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
  absl::MutexLock lock(&mutex_);
  if (life_ != life) return true;  // another thread has
  if (core_.connections.address_count() == 1 || ranks_ > 1) return false;
  absl::StatusOr<ModuleContents> contents = Contents(deadline, options);
  if (!contents.ok()) return false;
  const absl::StatusOr<int> address = PlaceModule(core_, request_, address_, deadline, options);
  return address.ok() && MoveTo(*address, *contents, deadline, options).ok();
}

bool RemoteModule::FailOver(uint64_t life, absl::Time deadline, const CallOptions& options) {
  {
    absl::MutexLock lock(&mutex_);
    if (life_ != life) return true;  // another thread has
    if (core_.connections.address_count() == 1 || ranks_ > 1) return false;
    {
      absl::MutexLock log_lock(&log_mutex_);
      if (!log_.CanReplayFrom(0)) return false;
    }
    const absl::StatusOr<int> address = PlaceModule(core_, request_, address_, deadline, options);
    if (!address.ok()) return false;
    address_ = *address;
  }
  return Recover(life, deadline, options).ok();
}

absl::StatusOr<RemoteModule::ModuleContents> RemoteModule::Contents(
    absl::Time deadline, const CallOptions& options) const {
  ModuleTry one{.deadline = deadline, .options = options, .pushback = {}};
  ModuleContents contents;
  {
    absl::MutexLock log_lock(&log_mutex_);
    if (!log_.CanReplayFrom(sequence_)) return absl::FailedPreconditionError("gradients are gone");
    for (RedoLog::Entry& entry : log_.From(sequence_)) {
      contents.gradients = std::move(entry.backwards);
    }
  }
  v1::GetModuleRequest request;
  request.set_token(token_);
  v1::GetModuleResponse found;
  RETURN_IF_ERROR(rpcs().GetModule(request, found, one));
  if (!found.status().weights_complete()) return absl::FailedPreconditionError("no weights");
  auto state = std::make_shared<SentPut>();
  ASSIGN_OR_RETURN(state->tensors, FetchTensors(rpcs(), token_, sequence_, one));
  state->commit.set_complete(true);
  state->commit.set_optimizer_step(found.status().optimizer_step());
  contents.state = std::move(state);
  return contents;
}

absl::Status RemoteModule::MoveTo(int address, const ModuleContents& contents, absl::Time deadline,
                                  const CallOptions& options) {
  const ModuleRpcs there(core_, address);
  ModuleTry one{.deadline = deadline, .options = options, .pushback = {}};
  v1::RegisterModuleResponse made;
  RETURN_IF_ERROR(there.Register(request_, made, one));
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
  address_ = address;
  token_ = made.token();
  ++life_;
  sequence_ = status.sequence();
  absl::MutexLock log_lock(&log_mutex_);
  unused_.clear();
  log_.Begin(made.status().sequence());
  log_.End(contents.state);
  for (const SentBackward& kept : contents.gradients) log_.Add(kept);
  log_.ForgetBefore(status.durable_sequence());
  return absl::OkStatus();
}

}  // namespace attnd
