// RemoteModule: one module on a daemon, as if it were here: each call is tried again as the
// client's RetryPolicy says, counts once whatever happens on the way, and survives the daemon.
//
//     Forward → Activations → Backward (each one a micro-batch) → Step → the next sequence
//
// Exactly once. A Backward or Step that is tried again names the same sequence and number; the
// server knows those that it has done. MODULE_LOST, after a restart say: the module is registered
// again by its name, and the calls that the server no longer knows of are replayed from the
// RedoLog, which gives the same bits. With KeepSnapshots a copy of the state is kept here too, and
// the log has to hold the calls since then alone. Beyond both: FAILED_PRECONDITION STATE_LOST,
// until a Put of all weights begins anew. A server that is gone or frozen is left in the same way,
// where log or snapshot reach and the client has another address (PlaceModule says which). From a
// server that drains the module is taken to another one. There, and after a snapshot, its sequence
// begins anew.
//
// One owner. Each RemoteModule registers with an owner epoch above that of the one before it, and
// with a greater one wherever its sequence begins anew: copies of the name that count otherwise, on
// a server that was frozen or kept its state, are known by their history epoch and ended. Where
// another RemoteModule has registered the name since: FAILED_PRECONDITION MODULE_TAKEN.
//
// A group (Join): several RemoteModules, in as many processes, train one module. Rank r of n
// registers with the owner epoch of rank 0, numbers its micro-batches r, r + n, ..., and each rank
// calls the same Step: the server does it
// when all micro-batches are there, once, and the others get its reply. A rank's log has its own
// calls alone, so that a module whose sequence is lost is STATE_LOST, and it stays at its address.
//
// Threads: any; Forward and Backward may run beside each other, Step, Put and recovery alone. Each
// thread that calls waits for its own call. Gradients are added in the order in which Backwards
// come here; those of several threads have the order of their turns, if they have some. The client
// outlives it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/modules/backward_turns.h"
#include "client/modules/module_placement.h"
#include "client/modules/module_rpcs.h"
#include "client/modules/redo_log.h"
#include "client/types/call_options.h"
#include "proto/attnd/v1/module.pb.h"

namespace attnd {

struct ForwardInputsOfModule {
  absl::Span<const std::byte> x, memory, mask_bits;  // empty: none
};

class RemoteModule {
 public:
  // A Forward leaves this for its Backward. Forward's inputs are copied, since they may be needed
  // again after the arrays have changed.
  struct Activations {
    std::shared_ptr<const SentForward> forward;
    uint64_t sequence = 0;
    std::string token;  // empty: nothing is kept, and the inputs are sent again
    uint64_t life = 0;  // of the module that the token is of
  };

  struct TensorPlace {
    v1::TensorKind kind;
    std::string name;
    absl::Span<std::byte> to;
  };

  // `address`: −1: where PlaceModule says.
  RemoteModule(const ClientCore& core, int address, v1::RegisterModuleRequest request,
               int64_t replay_bytes);

  // Once, before any other call. The answer's plan is all there is of a dry run. Without a log:
  // FAILED_PRECONDITION NOT_STICKY where connections to the address reach different servers.
  absl::StatusOr<v1::RegisterModuleResponse> Register(const CallOptions& options);
  // After every so many changes, and where the log no longer reaches back to the last one. Not of a
  // group. 0: never.
  void KeepSnapshots(uint64_t every);
  // Whether the state could be made again if the server ended now: the calls kept, and snapshots,
  // reach back to what it keeps itself.
  bool IsRecoverable() const;

  // From now on one of `ranks`, before any Backward of the sequence. INVALID_ARGUMENT.
  absl::Status Join(uint32_t rank, uint32_t ranks);
  // Another of the group has put tensors: the sequence is the server's from here on.
  absl::Status Follow(const CallOptions& options);

  // `call`: rows, training, seed, offset, layers. `keep`: null: nothing is kept for a Backward.
  absl::Status Forward(const v1::ModuleForwardHeader& call, const ForwardInputsOfModule& in,
                       absl::Span<std::byte> y, const CallOptions& options,
                       std::unique_ptr<Activations>* keep);
  // The next micro-batch of the sequence. After one that has failed the gradients have to be
  // cleared (discard, Put) before others, GradientStats, Step: FAILED_PRECONDITION. Where weights
  // have changed since its forward, gradients are those of a forward with the present ones: callers
  // that do not want them look before. `turn`: 0: it is the next one now; not with
  // no_weight_gradients.
  absl::Status Backward(const Activations& activations, absl::Span<const std::byte> dy,
                        bool no_weight_gradients, const BackwardOutputsOfModule& out,
                        const CallOptions& options, uint64_t turn = 0);
  // For one Backward, which gets its number after those of the turns reserved before. Where one of
  // these fails, or is given up, those behind it fail at once: FAILED_PRECONDITION. A turn that no
  // Backward will take is to be given up.
  uint64_t ReserveTurn() { return turns_.Reserve(); }
  void GiveUpTurn(uint64_t turn) { turns_.GiveUp(turn); }
  // by_parameter, all_norms: as attnd.v1.GradientStatsRequest has them.
  absl::StatusOr<v1::GradientStatsResponse> GradientStats(const CallOptions& options,
                                                          bool by_parameter = false,
                                                          bool all_norms = false);
  // The gradients become the sums of those of `request.replicas` modules, which their RemoteModules
  // call at once; from here to the next Step or Join this one alone may go on. `request` without
  // token, sequence and micro_batch. Without a group: a new one, of replica 0.
  absl::StatusOr<v1::SumGradientsResponse> SumGradients(v1::SumGradientsRequest request,
                                                        const CallOptions& options);
  // `request` without token, sequence and number of micro-batches.
  absl::StatusOr<v1::StepResponse> Step(v1::StepRequest request, const CallOptions& options);
  absl::Status Put(SentPut put, const CallOptions& options);
  // Gradients that replace those so far, as the next micro-batch. Not in a group, whose gradients
  // are the sum of all ranks': FAILED_PRECONDITION.
  absl::Status PutGradients(SentPut put, const CallOptions& options);
  absl::Status Get(const std::vector<TensorPlace>& places, const CallOptions& options);
  absl::StatusOr<v1::ModuleStatus> GetStatus(const CallOptions& options);
  // Calls after it are FAILED_PRECONDITION, unless it fails.
  absl::Status Release(const CallOptions& options);
  // Gives up what no Backward will use. Failures are not told: what a server still holds then is
  // spent by an empty Backward when it has no room for another Forward.
  void Drop(const Activations& activations);

  uint64_t sequence() const;
  uint32_t micro_batches() const;  // so far in the sequence, those of this rank

 private:
  // Counts the micro-batches of the whole group, where each rank has called as many as this one.
  uint32_t GroupsMicroBatches() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Calls again while micro-batches of other ranks are missing.
  absl::Status AwaitGroup(const ModuleTry& attempt, absl::FunctionRef<absl::Status()> call) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  using TryOnce = absl::FunctionRef<absl::Status(ModuleTry&)>;
  // Tries until it works, fails for good, or the deadline has come.
  absl::Status Persist(const CallOptions& options, TryOnce attempt);
  absl::Status Persist(const CallOptions& options, absl::Time deadline, TryOnce attempt,
                       bool recovers);
  absl::StatusOr<absl::Time> Deadline(const CallOptions& options) const;
  v1::RegisterModuleRequest Request() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Its connections reach one server; NOT_STICKY.
  absl::Status CheckSticky(absl::Time deadline, const CallOptions& options);
  // At `at`, where nothing of the name is kept: what is there is of other calls.
  absl::StatusOr<v1::RegisterModuleResponse> RegisterAnew(const ModuleRpcs& at, ModuleTry& attempt)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Where its server has a state that the log can go on from.
  absl::StatusOr<v1::RegisterModuleResponse> RegisterAgain(ModuleTry& attempt)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Registered(const v1::RegisterModuleResponse& reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsLost() const;                   // STATE_LOST
  bool HasLivedOn(uint64_t life) const;  // it was registered again since
  // After STATE_LOST: the sequence is the server's from here on.
  absl::Status BeginAnew(const CallOptions& options);
  bool CanReplayFrom(uint64_t sequence) const;
  bool HasSnapshot() const;  // that the log can go on from
  void TakeSnapshot(const CallOptions& options);
  // Makes the module anew of the last snapshot and the calls since then.
  absl::Status Restore(absl::Time deadline, const CallOptions& options)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Registers again and replays, unless another thread has done so since `life`; where its server
  // does not take it, at another address.
  absl::Status Recover(uint64_t life, absl::Time deadline, const CallOptions& options);
  absl::Status Replay(const v1::ModuleStatus& found, absl::Time deadline,
                      const CallOptions& options) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ReplayEntries(const std::vector<RedoLog::Entry>& entries, absl::Time deadline,
                             const CallOptions& options) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static absl::Status ReplayBackward(const ModuleRpcs& rpcs, const std::string& token,
                                     uint64_t sequence, const SentBackward& kept,
                                     ModuleTry& attempt);
  // Another address of the client's is the module's from here on. False: there is no other that has
  // room, or neither log nor snapshot reach so far, and its server may come back.
  bool GoElsewhere(absl::Time deadline, const CallOptions& options)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes the module at another address of the client's of all that has been called, after its
  // server has gone. False: neither log nor snapshot reach so far, or there is no other.
  bool FailOver(uint64_t life, absl::Time deadline, const CallOptions& options);
  // Takes the module, with the gradients so far, from a server that drains to another address of
  // the client's. False: it stays, and the call may be tried again later.
  bool Move(uint64_t life, absl::Time deadline, const CallOptions& options);
  struct ModuleContents {
    std::shared_ptr<const SentPut> state;
    std::vector<SentBackward> gradients;  // of the present sequence
    // All of them. Else none was added: those under way are sent again by who called them.
    bool is_logged = false;
  };
  // Weights and moments of that sequence.
  absl::StatusOr<std::shared_ptr<const SentPut>> StateOf(uint64_t sequence, absl::Time deadline,
                                                         const CallOptions& options,
                                                         bool must_have_no_gradients = false) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<ModuleContents> Contents(absl::Time deadline, const CallOptions& options) const
      ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  absl::Status MoveTo(const Placement& place, const ModuleContents& contents, absl::Time deadline,
                      const CallOptions& options) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ReplayEnd(uint64_t sequence, size_t micro_batches, const StateChange& change,
                         ModuleTry& attempt) ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  absl::Status BackwardInTurn(const Activations& activations, SentBackward& kept,
                              bool no_weight_gradients, const BackwardOutputsOfModule& out,
                              const CallOptions& options, uint64_t turn);
  absl::Status BackwardOnce(const Activations& activations, const SentBackward& kept,
                            bool no_weight_gradients, const BackwardOutputsOfModule& out,
                            bool& resend, ModuleTry& attempt) ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // After ACTIVATION_PRESSURE: makes room of what Drop has given up. False where there was none.
  bool SpendUnused(ModuleTry& attempt) ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Numbers the micro-batch, and keeps it for replay at once: a recovery needs all numbers below
  // one that has been added.
  absl::Status Enter(SentBackward& kept);
  // It failed. Where the server may have added it, the gradients of this step are good for nothing:
  // CheckGradients and Enter say so until they are cleared.
  void Withdraw(const absl::Status& why);
  absl::Status CheckGradients() const;
  void ClearGradients() ABSL_EXCLUSIVE_LOCKS_REQUIRED(log_mutex_);
  // The state is the next sequence's from here on.
  void Advance(StateChange change, uint64_t durable) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ModuleRpcs rpcs() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return ModuleRpcs(core_, address_, request_.name(), carry_streams_, whole_bytes_);
  }

  const ClientCore& core_;
  const v1::RegisterModuleRequest request_;
  const bool is_placed_;
  const bool has_log_;
  BackwardTurns turns_;
  mutable absl::Mutex changing_;  // held by Step and Put for their whole time
  mutable absl::Mutex mutex_;     // shared by calls on the state, exclusive where it changes
  int address_ ABSL_GUARDED_BY(mutex_);
  std::string token_ ABSL_GUARDED_BY(mutex_);
  int carry_streams_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t whole_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t epoch_ ABSL_GUARDED_BY(mutex_);  // as whose owner it registers
  uint64_t history_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);       // STATE_LOST, or released; OK: it is there
  bool is_behind_ ABSL_GUARDED_BY(mutex_) = false;  // a recovery has begun and not ended
  uint64_t life_ ABSL_GUARDED_BY(mutex_) = 0;       // registrations so far
  uint64_t sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t optimizer_step_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t rank_ ABSL_GUARDED_BY(mutex_) = 0, ranks_ ABSL_GUARDED_BY(mutex_) = 1;
  mutable absl::Mutex log_mutex_;  // after mutex_
  uint32_t micro_batches_ ABSL_GUARDED_BY(log_mutex_) = 0;
  bool has_failed_ ABSL_GUARDED_BY(log_mutex_) = false;  // one of these, since the last change
  // Belongs to the present sequence and life: token and bytes of x.
  std::vector<std::pair<std::string, size_t>> unused_ ABSL_GUARDED_BY(log_mutex_);
  RedoLog log_ ABSL_GUARDED_BY(log_mutex_);
  uint64_t durable_sequence_ ABSL_GUARDED_BY(log_mutex_) = 0;  // what a restart would find
  uint64_t snapshot_every_ ABSL_GUARDED_BY(log_mutex_) = 0;
  uint64_t snapshot_sequence_ ABSL_GUARDED_BY(log_mutex_) = 0;
  std::shared_ptr<const SentPut> snapshot_ ABSL_GUARDED_BY(log_mutex_);  // null: none
};

}  // namespace attnd
