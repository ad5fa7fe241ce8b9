#include "client/modules/remote_module.h"

#include <algorithm>
#include <optional>
#include <stop_token>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status_macros.h"
#include "client/call/poll_hook.h"
#include "client/channels/error_class.h"
#include "client/channels/retry.h"
#include "client/modules/module_errors.h"
#include "client/types/error_detail.h"

namespace attnd {
namespace {

// One call recovers so often; each recovery follows a restart of the daemon.
constexpr int kMaxRecoveries = 8;
constexpr size_t kMostUnused = 256;  // activations that were given up
constexpr absl::Duration kReleaseTimeout = absl::Milliseconds(500);
constexpr size_t kStickyProbes = 4;
constexpr int kMaxOwners = 4;  // that register the name at the same time

}  // namespace

RemoteModule::RemoteModule(const ClientCore& core, int address, v1::RegisterModuleRequest request,
                           int64_t replay_bytes)
    : core_(core),
      request_(std::move(request)),
      is_placed_(address < 0 && !request_.dry_run()),
      has_log_(replay_bytes > 0),
      address_(std::max(address, 0)),
      epoch_(request_.owner_epoch()),
      log_(replay_bytes) {}

absl::StatusOr<absl::Time> RemoteModule::Deadline(const CallOptions& options) const {
  absl::Duration timeout = options.timeout.value_or(core_.options.timeout);
  if (timeout > absl::ZeroDuration()) return core_.clock.Now() + timeout;
  return absl::DeadlineExceededError("timeout: expected above 0, got none left");
}

absl::Status RemoteModule::Persist(const CallOptions& options, TryOnce attempt) {
  ASSIGN_OR_RETURN(absl::Time deadline, Deadline(options));
  return Persist(options, deadline, attempt, true);
}

absl::Status RemoteModule::Persist(const CallOptions& options, absl::Time deadline, TryOnce attempt,
                                   bool recovers) {
  absl::BitGen random;
  for (int attempts = 1, recoveries = 0;;) {
    uint64_t life;
    bool is_behind;
    {
      absl::ReaderMutexLock lock(&mutex_);
      if (recovers) RETURN_IF_ERROR(lost_);
      life = life_;
      is_behind = recovers && is_behind_;
    }
    if (is_behind) RETURN_IF_ERROR(Recover(life, deadline, options));
    ModuleTry one{.deadline = deadline, .options = options, .pushback = {}};
    absl::Status status = attempt(one);
    if (status.ok()) {
      core_.budget.OnSuccess();
      core_.counters.Ended(true);
      return status;
    }
    if (options.stop.stop_requested()) return absl::CancelledError("the caller cancelled the call");
    if (one.was_paused) continue;
    if (recovers && IsModuleLost(status) && ++recoveries <= kMaxRecoveries) {
      RETURN_IF_ERROR(Recover(life, deadline, options));
      continue;
    }
    const bool is_gone = absl::IsUnavailable(status) &&
                         (!DetailOf(status).has_value() || IsCancelledByServer(status));
    if (recovers && is_gone && recoveries < kMaxRecoveries && FailOver(life, deadline, options)) {
      ++core_.counters.failovers;
      ++recoveries;
      continue;
    }
    if (recovers && IsDraining(status) && recoveries < kMaxRecoveries &&
        Move(life, deadline, options)) {
      ++core_.counters.failovers;
      ++recoveries;
      continue;
    }
    std::optional<ErrorDetail> detail = DetailOf(status);
    FailedAttempt failed{.status = status,
                         .is_waited_for = IsWaitedFor(status, core_.options.wait_for_ready) ||
                                          (recovers && is_gone && core_.options.wait_for_ready),
                         .attempts = attempts++,
                         .retry_forbidden = one.pushback.forbids_retry,
                         .server_delay = one.pushback.delay};
    if (!failed.server_delay && detail) failed.server_delay = detail->retry_delay;
    std::optional<absl::Duration> delay =
        RetryDelay(core_.options.retry, failed, absl::Uniform(random, 0.0, 1.0));
    const bool in_time = delay && core_.clock.Now() + *delay < deadline;
    if (!in_time || !core_.budget.TakeFor(failed)) {
      core_.counters.Ended(false);
      return status;
    }
    core_.counters.Retried(*delay);
    RETURN_IF_ERROR(WaitFor(*delay, options));
  }
}

absl::StatusOr<v1::RegisterModuleResponse> RemoteModule::Register(const CallOptions& options) {
  v1::RegisterModuleResponse reply;
  ASSIGN_OR_RETURN(absl::Time deadline, Deadline(options));
  uint64_t before = 0;  // the owner
  if (is_placed_) {
    absl::StatusOr<Placement> place = PlaceModule(core_, request_, -1, deadline, options);
    if (!place.ok() && !absl::IsUnavailable(place.status())) return place.status();
    absl::MutexLock lock(&mutex_);
    if (place.ok()) address_ = place->address;
    if (place.ok()) before = place->owner_epoch;
  }
  const bool is_owner = request_.owner_epoch() == 0 && !request_.dry_run();
  for (int owners = 0;; ++owners) {
    if (is_owner) {
      absl::MutexLock lock(&mutex_);
      epoch_ = OwnerAfter(before);
    }
    absl::Status status = Persist(
        options, deadline,
        [&](ModuleTry& attempt) {
          absl::ReaderMutexLock lock(&mutex_);
          return rpcs().Register(Request(), reply, attempt);
        },
        false);
    const std::optional<uint64_t> later = LaterOwner(status);
    if (status.ok()) break;
    if (!is_owner || !later.has_value() || owners == kMaxOwners) return status;
    before = *later;
  }
  {
    absl::MutexLock lock(&mutex_);
    Registered(reply);
  }
  if (!has_log_ && !request_.dry_run()) RETURN_IF_ERROR(CheckSticky(deadline, options));
  return reply;
}

v1::RegisterModuleRequest RemoteModule::Request() const {
  v1::RegisterModuleRequest request = request_;
  request.set_owner_epoch(epoch_);
  return request;
}

absl::Status RemoteModule::CheckSticky(absl::Time deadline, const CallOptions& options) {
  absl::ReaderMutexLock lock(&mutex_);
  const auto call = [&](absl::string_view method, auto request) {
    request.set_token(token_);
    return CallOverEach(core_, core_.connections.FirstOf(address_, kStickyProbes),
                        absl::StrCat("/attnd.v1.Modules/", method), request.SerializeAsString(),
                        deadline, options, {{"attnd-module", request_.name()}});
  };
  const auto is_elsewhere = [](const auto& answer) { return IsOfOtherServer(answer.status()); };
  if (absl::c_none_of(call("GetModule", v1::GetModuleRequest()), is_elsewhere)) {
    return absl::OkStatus();
  }
  // One of them comes to the server that has the module; otherwise it ends with its ttl.
  call("Release", v1::ReleaseModuleRequest());
  return NotSticky(request_.name());
}

absl::Status RemoteModule::Join(uint32_t rank, uint32_t ranks) {
  constexpr uint32_t kMaxRanks = 1 << 16;
  if (ranks < 1 || ranks > kMaxRanks || rank >= ranks) {
    return absl::InvalidArgumentError(absl::StrCat("rank: expected one below ranks, of 1..",
                                                   kMaxRanks, ", got ", rank, " of ", ranks));
  }
  absl::MutexLock lock(&mutex_);
  rank_ = rank;
  ranks_ = ranks;
  absl::MutexLock log_lock(&log_mutex_);
  log_.Begin(sequence_);
  ClearGradients();
  return absl::OkStatus();
}

absl::Status RemoteModule::Follow(const CallOptions& options) {
  absl::MutexLock changing(&changing_);
  if (IsLost()) return BeginAnew(options);
  ASSIGN_OR_RETURN(const v1::ModuleStatus found, GetStatus(options));
  absl::MutexLock lock(&mutex_);
  sequence_ = found.sequence();
  optimizer_step_ = found.optimizer_step();
  absl::MutexLock log_lock(&log_mutex_);
  log_.Begin(sequence_);
  ClearGradients();
  unused_.clear();
  return absl::OkStatus();
}

uint32_t RemoteModule::GroupsMicroBatches() const { return ranks_ * micro_batches(); }

// Others are late by what their computation takes longer, so that a few milliseconds cost little.
absl::Status RemoteModule::AwaitGroup(const ModuleTry& attempt,
                                      absl::FunctionRef<absl::Status()> call) const {
  constexpr absl::Duration kFirst = absl::Milliseconds(1), kLongest = absl::Milliseconds(50);
  for (absl::Duration delay = kFirst;; delay = std::min(2 * delay, kLongest)) {
    absl::Status status = call();
    const bool waits = ranks_ > 1 && IsGradientBehind(status);
    if (!waits || core_.clock.Now() + delay >= attempt.deadline) return status;
    RETURN_IF_ERROR(WaitFor(delay, attempt.options));
  }
}

absl::Status RemoteModule::Forward(const v1::ModuleForwardHeader& call,
                                   const ForwardInputsOfModule& in, absl::Span<std::byte> y,
                                   const CallOptions& options, std::unique_ptr<Activations>* keep) {
  auto kept = std::make_shared<SentForward>();
  kept->header = call;
  kept->x = KeptBytes::Copy(in.x, core_.shared_memory);
  kept->memory = KeptBytes::Copy(in.memory, core_.shared_memory);
  kept->mask_bits = KeptBytes::Copy(in.mask_bits, core_.shared_memory);
  auto made = std::make_unique<Activations>();
  absl::Status done = Persist(options, [&](ModuleTry& attempt) {
    absl::ReaderMutexLock lock(&mutex_);
    v1::ModuleForwardHeader header = call;
    header.set_token(token_);
    header.set_sequence(sequence_);
    header.mutable_options()->set_request_id(options.request_id);
    made->life = life_;
    made->sequence = sequence_;
    v1::ModuleForwardResult result;
    absl::Status status = rpcs().Forward(header, *kept, y, result, attempt);
    if (IsActivationPressure(status) && SpendUnused(attempt)) {
      status = rpcs().Forward(header, *kept, y, result, attempt);
    }
    made->token = result.activations().token();
    return status;
  });
  if (!done.ok()) return OfActivationPressure(std::move(done));
  made->forward = std::move(kept);
  if (keep != nullptr) {
    *keep = std::move(made);
  } else if (!made->token.empty()) {
    Drop(*made);
  }
  return absl::OkStatus();
}

absl::Status RemoteModule::BackwardOnce(const Activations& activations, const SentBackward& kept,
                                        bool no_weight_gradients,
                                        const BackwardOutputsOfModule& out, bool& resend,
                                        ModuleTry& attempt) {
  v1::ModuleBackwardHeader header;
  header.set_token(token_);
  header.set_sequence(sequence_);
  header.set_micro_batch(kept.micro_batch);
  header.set_want_dx(!out.dx.empty() || !out.d_memory.empty());
  header.set_no_weight_gradients(no_weight_gradients);
  resend |=
      activations.token.empty() || activations.life != life_ || activations.sequence != sequence_;
  if (resend) {
    *header.mutable_forward() = kept.forward->header;
    header.mutable_forward()->set_token(token_);
    header.mutable_forward()->set_training(true);
  } else {
    header.set_activations(activations.token);
  }
  v1::ModuleBackwardResult result;
  return rpcs().Backward(std::move(header), resend ? kept.forward.get() : nullptr, kept.dy, out,
                         result, attempt);
}

absl::Status RemoteModule::Backward(const Activations& activations, absl::Span<const std::byte> dy,
                                    bool no_weight_gradients, const BackwardOutputsOfModule& out,
                                    const CallOptions& options, uint64_t turn) {
  const std::stop_callback cancel(options.stop, [&] { turns_.GiveUp(turn); });
  SentBackward kept{.forward = activations.forward, .dy = KeptBytes::Copy(dy, core_.shared_memory)};
  absl::Status done = BackwardInTurn(activations, kept, no_weight_gradients, out, options, turn);
  if (done.ok()) {
    turns_.End(turn);
  } else {
    turns_.GiveUp(turn);
  }
  return OfActivationPressure(std::move(done));
}

absl::Status RemoteModule::BackwardInTurn(const Activations& activations, SentBackward& kept,
                                          bool no_weight_gradients,
                                          const BackwardOutputsOfModule& out,
                                          const CallOptions& options, uint64_t turn) {
  const bool has_turn = turn != 0;
  if (has_turn && no_weight_gradients) {
    return absl::InvalidArgumentError("turn: expected 0 with no_weight_gradients, got another");
  }
  ASSIGN_OR_RETURN(const absl::Time deadline, Deadline(options));
  if (has_turn) RETURN_IF_ERROR(turns_.Await(turn, deadline, options));
  if (!no_weight_gradients) RETURN_IF_ERROR(Enter(kept));
  if (has_turn) turns_.Begin(turn);
  bool resend = false;
  auto attempt = [&](ModuleTry& one) {
    absl::ReaderMutexLock lock(&mutex_);
    absl::Status status = BackwardOnce(activations, kept, no_weight_gradients, out, resend, one);
    // Activations that are gone are an ordinary answer: the inputs are sent at once.
    if (!resend && AreActivationsLost(status)) {
      resend = true;
      status = BackwardOnce(activations, kept, no_weight_gradients, out, resend, one);
    }
    return status;
  };
  // A pause has it tried again, the end of its turn ends it.
  auto attempt_in_turn = [&](ModuleTry& one) -> absl::Status {
    CallOptions stoppable = options;
    ASSIGN_OR_RETURN(stoppable.stop, turns_.Try(turn, deadline, options));
    ModuleTry mine{.deadline = deadline, .options = stoppable, .pushback = {}};
    absl::Status status = attempt(mine);
    one.pushback = mine.pushback;
    if (status.ok() || !stoppable.stop.stop_requested()) return status;
    RETURN_IF_ERROR(turns_.Check(turn));
    one.was_paused = true;
    return status;
  };
  absl::Status done = has_turn ? Persist(options, deadline, attempt_in_turn, true)
                               : Persist(options, deadline, attempt, true);
  if (!done.ok() && !no_weight_gradients) Withdraw(done);
  return done;
}

absl::StatusOr<v1::StepResponse> RemoteModule::Step(v1::StepRequest request,
                                                    const CallOptions& options) {
  absl::MutexLock changing(&changing_);
  v1::StepResponse reply;
  if (request.discard() && IsLost()) {  // with all gradients
    absl::MutexLock log_lock(&log_mutex_);
    ClearGradients();
    return reply;
  }
  if (!request.discard()) RETURN_IF_ERROR(CheckGradients());
  absl::Status status = Persist(options, [&](ModuleTry& attempt) {
    absl::ReaderMutexLock lock(&mutex_);
    request.set_token(token_);
    request.set_sequence(sequence_);
    request.set_micro_batches(GroupsMicroBatches());
    return AwaitGroup(attempt, [&] { return rpcs().Step(request, reply, attempt); });
  });
  if (IsStepDone(status, sequence())) {
    ASSIGN_OR_RETURN(v1::ModuleStatus found, GetStatus(options));
    absl::ReaderMutexLock lock(&mutex_);
    reply.set_applied(found.optimizer_step() > optimizer_step_);
    reply.set_replayed(true);
    reply.set_sequence(found.sequence());
    reply.set_durable_sequence(found.durable_sequence());
    reply.set_optimizer_step(found.optimizer_step());
    reply.set_finite(reply.applied() || !request.skip_unless_finite());
  } else if (!status.ok()) {
    return status;
  }
  {
    absl::MutexLock lock(&mutex_);
    request.clear_token();
    optimizer_step_ = reply.optimizer_step();
    Advance(std::move(request), reply.durable_sequence());
  }
  TakeSnapshot(options);
  return reply;
}

absl::Status RemoteModule::Put(SentPut given, const CallOptions& options) {
  auto put = std::make_shared<const SentPut>(std::move(given));
  absl::MutexLock changing(&changing_);
  if (put->commit.complete() && IsLost()) RETURN_IF_ERROR(BeginAnew(options));
  v1::PutTensorsResponse reply;
  absl::Status status = Persist(options, [&](ModuleTry& attempt) {
    absl::ReaderMutexLock lock(&mutex_);
    v1::PutTensorsHeader header;
    header.set_token(token_);
    header.set_sequence(sequence_);
    return rpcs().Put(header, *put, reply, attempt);
  });
  if (IsStepDone(status, sequence())) {
    ASSIGN_OR_RETURN(*reply.mutable_status(), GetStatus(options));
  } else if (!status.ok()) {
    return status;
  }
  {
    absl::MutexLock lock(&mutex_);
    optimizer_step_ = reply.status().optimizer_step();
    Advance(std::move(put), reply.status().durable_sequence());
  }
  TakeSnapshot(options);
  return absl::OkStatus();
}

void RemoteModule::Advance(StateChange change, uint64_t durable) {
  ++sequence_;
  absl::MutexLock lock(&log_mutex_);
  log_.End(std::move(change));
  log_.ForgetBefore(durable);
  durable_sequence_ = durable;
  ClearGradients();
  unused_.clear();
}

absl::Status RemoteModule::Get(const std::vector<TensorPlace>& places, const CallOptions& options) {
  v1::GetTensorsRequest request;
  for (const TensorPlace& place : places) {
    if (place.kind == v1::TENSOR_KIND_GRADIENT) RETURN_IF_ERROR(CheckGradients());
    if (std::find(request.kind().begin(), request.kind().end(), place.kind) ==
        request.kind().end()) {
      request.add_kind(place.kind);
    }
    if (std::find(request.name().begin(), request.name().end(), place.name) ==
        request.name().end()) {
      request.add_name(place.name);
    }
  }
  request.set_element(v1::ELEMENT_FLOAT32);
  size_t landed = 0;
  auto place_of = [&](const v1::TensorHeader& header) -> absl::StatusOr<absl::Span<std::byte>> {
    for (const TensorPlace& place : places) {
      if (place.kind == header.kind() && place.name == header.name()) {
        ++landed;
        return place.to;
      }
    }
    return absl::Span<std::byte>();
  };
  RETURN_IF_ERROR(Persist(options, [&](ModuleTry& attempt) {
    absl::ReaderMutexLock lock(&mutex_);
    landed = 0;
    request.set_token(token_);
    request.set_sequence(sequence_);
    return rpcs().Get(request, place_of, attempt);
  }));
  if (landed == places.size()) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("reply: expected ", places.size(), " tensors, got ", landed));
}

absl::StatusOr<v1::ModuleStatus> RemoteModule::GetStatus(const CallOptions& options) {
  v1::GetModuleResponse reply;
  RETURN_IF_ERROR(Persist(options, [&](ModuleTry& attempt) {
    absl::ReaderMutexLock lock(&mutex_);
    v1::GetModuleRequest request;
    request.set_token(token_);
    return rpcs().GetModule(request, reply, attempt);
  }));
  return reply.status();
}

absl::Status RemoteModule::Release(const CallOptions& options) {
  ASSIGN_OR_RETURN(absl::Time deadline, Deadline(options));
  // Before it is gone: a call on another thread, which then finds it gone, would register it again.
  absl::Status before = absl::FailedPreconditionError(
      "module: expected one that is registered, got one that was released; register it anew");
  {
    absl::MutexLock lock(&mutex_);
    std::swap(before, lost_);
  }
  absl::Status status = Persist(
      options, deadline,
      [&](ModuleTry& attempt) {
        absl::ReaderMutexLock lock(&mutex_);
        return rpcs().Release(token_, attempt);
      },
      false);
  if (status.ok() || IsModuleLost(status)) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  lost_ = std::move(before);
  return status;
}

bool RemoteModule::SpendUnused(ModuleTry& attempt) {
  std::vector<std::pair<std::string, size_t>> unused;
  {
    absl::MutexLock lock(&log_mutex_);
    unused.swap(unused_);
  }
  for (const auto& [token, bytes] : unused) {
    v1::ModuleBackwardHeader header;
    header.set_token(token_);
    header.set_activations(token);
    header.set_sequence(sequence_);
    header.set_no_weight_gradients(true);
    v1::ModuleBackwardResult result;
    rpcs()
        .Backward(std::move(header), nullptr, KeptBytes::Zeros(bytes), {}, result, attempt)
        .IgnoreError();
  }
  return !unused.empty();
}

void RemoteModule::Drop(const Activations& activations) {
  absl::ReaderMutexLock lock(&mutex_);
  const bool gone = activations.life != life_ || activations.sequence != sequence_;
  if (activations.token.empty() || gone) return;
  {
    absl::MutexLock log_lock(&log_mutex_);
    if (unused_.size() == kMostUnused) unused_.erase(unused_.begin());
    unused_.emplace_back(activations.token, activations.forward->x.size());
  }
  const CallOptions options;
  ModuleTry one{
      .deadline = core_.clock.Now() + kReleaseTimeout, .options = options, .pushback = {}};
  rpcs().ReleaseActivations(activations.token, one).IgnoreError();
}

uint64_t RemoteModule::sequence() const {
  absl::ReaderMutexLock lock(&mutex_);
  return sequence_;
}

uint32_t RemoteModule::micro_batches() const {
  absl::MutexLock lock(&log_mutex_);
  return micro_batches_;
}

}  // namespace attnd
