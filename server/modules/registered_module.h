// RegisteredModule: one module of a caller's: its instance, the ledger of what has been done to it,
// and the activations that wait for their Backward.
//
//   call → Hold (its turn at the instance) → compute → note what was done → the Hold goes
//
// One call holds the instance at a time. A call of the next sequence waits for the change that is
// under way; a micro-batch that is early waits for those before it. Waits end when the call is
// stopped, its deadline passes, or the module is lost. Lose makes it so; the memory goes with the
// last call that holds the module.
//
// Errors: FAILED_PRECONDITION MODULE_LOST, SEQUENCE_MISMATCH and those of CallLedger; CANCELLED,
// DEADLINE_EXCEEDED. Any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "modules/module_engine.h"
#include "proto/attnd/v1/module.pb.h"
#include "server/keep/call_pace.h"
#include "server/keep/early_places.h"
#include "server/keep/module_memory.h"
#include "server/modules/call_ledger.h"
#include "server/modules/module_state.h"

namespace attnd {

// Causes of MODULE_LOST.
inline constexpr char kExpired[] = "expired";
inline constexpr char kDeviceLost[] = "device_lost";
inline constexpr char kTaken[] = "taken";  // by a later owner

// Who asks, and for how long it waits.
struct CallWait {
  std::stop_token stop;
  absl::Time deadline;
  absl::Status Stopped() const;  // CANCELLED or DEADLINE_EXCEEDED
};

// A Forward whose activations are kept.
struct KeptForward {
  ActivationId activation = 0;
  CallRows rows;
  CallDropout dropout;
  LayerRange layers;
  std::string digest;  // of rows, dropout and layers
  absl::Time expires;
};

// Holds what Register found out about a module; it does not change.
struct ModuleRecord {
  uint64_t id = 0;
  uint64_t owner_epoch = 0, history_epoch = 0;
  std::string caller, name;
  std::string digest;         // of layout, optimizer, limits and durability: the same registration
  std::string state_digest;   // of layout and optimizer
  std::string layout_digest;  // SHA-256
  ModuleLimits limits;
  v1::Plan plan;
  std::vector<std::string> devices;  // names, where the plan's parts lie
};

// Fills in a status: `all` that is reserved, of which the plan's lies where the engine computes.
void SetBytes(const EnginePlan& plan, int64_t all, const std::string& engine,
              v1::ModuleStatus& status);

class RegisteredModule {
 public:
  // `state`: null with DURABILITY_PROCESS. `saved`: what the instance has been loaded from it.
  RegisteredModule(ModuleRecord record, std::unique_ptr<ModuleInstance> instance,
                   ModuleMemory::Reservation memory, std::unique_ptr<ModuleState> state = nullptr,
                   std::optional<SavedChange> saved = std::nullopt);
  ~RegisteredModule();

  // Another owner's, of another id, with all that this one is; this one is lost then, with the
  // calls that wait for it and its activations. Waits for the call that holds it.
  absl::StatusOr<std::shared_ptr<RegisteredModule>> TakeOver(uint64_t id, uint64_t owner_epoch,
                                                             const CallWait& wait);

  const ModuleRecord& record() const { return record_; }
  const ModuleDescription& description() const { return instance_->description(); }
  const EnginePlan& plan() const { return instance_->plan(); }
  bool IsOn(int device) const;
  CallPace& pace() { return pace_; }

  // The right to use the instance, and to say what was done with it.
  class Hold {
   public:
    explicit Hold(RegisteredModule& module) : module_(&module) {}
    Hold(Hold&& other) noexcept : module_(std::exchange(other.module_, nullptr)) {}
    Hold& operator=(Hold&&) = delete;
    ~Hold();

    ModuleInstance& instance() { return *module_->instance_; }
    // Counts what the instance takes for sums of replicas, beside its plan.
    ModuleMemory::Reservation& replica_memory() { return module_->replica_memory_; }
    uint64_t sequence() const;
    absl::Status CheckGradient(uint64_t micro_batches) const;
    // A Forward's activations, under a number for a token. Gone: nothing.
    uint64_t Keep(KeptForward kept);
    std::optional<KeptForward> Find(uint64_t kept) const;
    void Drop(uint64_t kept);
    // Gives up the activations that have waited longest, at once. False: there are none.
    bool DropOldest();
    void Added(std::string digest);
    void WasPut(int64_t entry);  // a weight
    // The change of CheckChange; `reply` is what the same call gets again.
    void Changed(std::string digest, std::string reply);
    // Writes the state to where it outlives the process, if the module has such a place, its
    // weights are complete and it is time, or `at_once`. ModuleState tells of a failure.
    void Save(absl::Time now, bool at_once = false);
    // The instance holds half of a change: nobody may use it any more.
    void Fail();

   private:
    RegisteredModule* module_;
  };

  // `sequence`: absent for whatever stands there.
  absl::StatusOr<Hold> Take(std::optional<uint64_t> sequence, const CallWait& wait);
  // Either its turn, or the reply that the same change got before.
  struct ChangeTurn {
    std::optional<Hold> hold;
    std::string reply;
  };
  absl::StatusOr<ChangeTurn> TakeChange(uint64_t sequence, const std::string& digest,
                                        const CallWait& wait);
  // `added`: it has been, and must not be again. Only then is `digest` called.
  struct MicroBatchTurn {
    Hold hold;
    bool added;
  };
  absl::StatusOr<MicroBatchTurn> TakeMicroBatch(uint64_t sequence, uint64_t micro_batch,
                                                absl::FunctionRef<std::string()> digest,
                                                const CallWait& wait);

  // Before payloads are read: what Take would refuse at once.
  absl::Status CheckSequence(std::optional<uint64_t> sequence) const;
  absl::Status CheckChange(uint64_t sequence) const;
  absl::Status CheckMicroBatch(uint64_t micro_batch) const;
  // UNAVAILABLE MICRO_BATCH_EARLY where others have to be added before it.
  absl::Status CheckIsNext(uint64_t micro_batch) const;
  // Whether it has micro-batches since the last change, and was asked the same before, since then.
  bool FinishesStep();
  // FAILED_PRECONDITION WEIGHTS_INCOMPLETE, where `too` would be put beside what has been.
  absl::Status CheckWeights(const std::vector<bool>& too = {}) const;
  // The Forward of a token; FAILED_PRECONDITION LEASE_LOST.
  absl::StatusOr<KeptForward> FindKept(uint64_t kept) const;

  // Early micro-batches take places there from now on; before the first call.
  void Share(EarlyPlaces& places) { early_places_ = &places; }
  // Used at `now`: lives `ttl` longer; absent: as long as it was given before.
  void Touch(absl::Time now, std::optional<absl::Duration> ttl = std::nullopt);
  void Prolong(absl::Duration time);  // lives so much longer
  // Hold::Save, unless somebody uses it now.
  void SaveIfDue(absl::Time now, bool at_once);
  // Gives up activations whose time has passed. Whether the module's own has, and nobody uses it.
  bool Expire(absl::Time now);
  void Lose(std::string cause);
  v1::ModuleStatus Status() const;
  uint64_t durable_sequence() const;
  uint64_t durable_lag() const;  // changes that a restart would not find; 0 where it finds none
  absl::Time used_at() const;
  int waiting() const;  // calls, for their turn

 private:
  bool Lost() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !lost_.empty(); }
  absl::Status CheckReachable(uint64_t sequence) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Until nobody holds the instance and `ready`.
  template <class Ready>
  absl::Status AwaitFree(const CallWait& wait, const Ready& ready)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Hold Begin(bool is_change) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropForgotten() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetKept() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  RegisteredModule(ModuleRecord record, RegisteredModule& from)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(from.mutex_);

  const ModuleRecord record_;
  // Shared with the owners before, whose calls may read the description yet.
  const std::shared_ptr<const ModuleMemory::Reservation> memory_;
  ModuleMemory::Reservation replica_memory_;        // as instance_, which goes before it
  const std::shared_ptr<ModuleInstance> instance_;  // used by the holder alone
  std::unique_ptr<ModuleState> state_;              // as instance_; gone with a later owner
  EarlyPlaces* early_places_ = nullptr;             // null: without a limit

  CallPace pace_;

  mutable absl::Mutex mutex_;
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool changing_ ABSL_GUARDED_BY(mutex_) = false;  // the holder makes the next sequence
  int waiting_ ABSL_GUARDED_BY(mutex_) = 0;        // calls
  CallLedger ledger_ ABSL_GUARDED_BY(mutex_);
  bool finishes_step_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t durable_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time save_again_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // not before
  std::vector<bool> put_ ABSL_GUARDED_BY(mutex_);                         // [entries]
  int64_t missing_ ABSL_GUARDED_BY(mutex_);                               // entries not put
  int64_t optimizer_step_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, KeptForward> kept_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_kept_ ABSL_GUARDED_BY(mutex_) = 1;
  std::vector<ActivationId> forgotten_ ABSL_GUARDED_BY(mutex_);  // to be dropped by a holder
  absl::Duration ttl_ ABSL_GUARDED_BY(mutex_);
  absl::Time expires_ ABSL_GUARDED_BY(mutex_);
  absl::Time used_at_ ABSL_GUARDED_BY(mutex_);
  std::string lost_ ABSL_GUARDED_BY(mutex_);  // how; empty: it is there
};

}  // namespace attnd
