// ModuleTable: the modules of all callers, by caller and name, and by their tokens.
//
//   Register → lives ttl after each use ─┬─ Release           released
//                                        ├─ ttl passed        expired
//                                        ├─ a later owner     taken; it goes on under another token
//                                        ├─ a change failed   failed
//                                        └─ its device failed device_lost
//
// Names are per caller; nobody sees another's. Memory is reserved before an instance is made.
// Errors of Find: INVALID_ARGUMENT (no token), FAILED_PRECONDITION WRONG_REPLICA, EPOCH_CHANGED,
// MODULE_LOST, PERMISSION_DENIED MODULE_NOT_OWNED. Any thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/periodic.h"
#include "server/keep/lease_token.h"
#include "server/modules/registered_module.h"

namespace attnd {

struct ModuleOptions {
  ModuleMemoryLimits memory;
  bool memory_is_share = false;  // on a GPU memory.bytes is hbm_fraction of its own
  double hbm_fraction = 0.6;     // of what launches may take
  int64_t max_modules = 64;
  std::string state_dir;    // of DURABILITY_HOST and DURABILITY_DISK; empty: they are not offered
  int64_t state_bytes = 0;  // of all states; 0: kStatesOfMemory times memory.bytes
  absl::Duration state_age = absl::Hours(24 * 30);  // of a state whose module is not registered
  absl::Duration save_every = absl::Minutes(1);     // with DURABILITY_DISK
  int64_t shadow_every = 0;  // changes, with DURABILITY_HOST; 0: see StatePlace
};

// States of modules that are registered take up to twice their memory.
inline constexpr int64_t kStatesOfMemory = 8;

inline constexpr absl::Duration kModuleTtl = absl::Hours(1);
inline constexpr absl::Duration kMinModuleTtl = absl::Seconds(1);
inline constexpr absl::Duration kMaxModuleTtl = absl::Hours(24 * 7);

class ModuleTable {
 public:
  ModuleTable(const ModuleOptions& options, const TokenIssuer& issuer, const Clock& clock);

  ModuleMemory& memory() { return memory_; }
  const Clock& clock() const { return clock_; }

  struct Registration {
    std::string caller, name, digest;
    uint64_t owner_epoch = 0;  // 0: whoever has it
    absl::Duration ttl;
    CallWait wait;  // for a call that uses it, where another owner has it
  };
  // The module of that caller and name if its digest is the same; else what `make(id)` makes.
  // Registrations of one name wait for each other, those of other names do not.
  // FAILED_PRECONDITION MODULE_EXISTS or MODULE_TAKEN, RESOURCE_EXHAUSTED MODULE_QUOTA, CANCELLED,
  // DEADLINE_EXCEEDED, or what `make` says.
  using Make = std::function<absl::StatusOr<std::shared_ptr<RegisteredModule>>(uint64_t id)>;
  absl::StatusOr<std::shared_ptr<RegisteredModule>> Register(const Registration& wanted,
                                                             const Make& make);
  absl::StatusOr<std::shared_ptr<RegisteredModule>> Find(const std::string& token,
                                                         const std::string& caller);
  // RegisteredModule::FinishesStep of the token's module. No use of it.
  bool FinishesStep(const std::string& token, const std::string& caller);
  // MODULE_LOST: the caller has none of that name.
  absl::StatusOr<std::shared_ptr<RegisteredModule>> FindByName(const std::string& caller,
                                                               const std::string& name);
  // OK when the module is gone already.
  absl::Status Release(const std::string& token, const std::string& caller);
  std::vector<std::shared_ptr<RegisteredModule>> Of(const std::string& caller) const;

  std::string TokenOf(const RegisteredModule& module) const;
  // Tokens of activations name module and Forward: both are of `module`, or LEASE_LOST.
  std::string ActivationToken(const RegisteredModule& module, uint64_t kept) const;
  absl::StatusOr<uint64_t> CheckActivation(const std::string& token,
                                           const RegisteredModule& module) const;

  int64_t size() const;
  // The bytes that memory() has reserved: for modules, by their plans; copies of tensors and of
  // states, and modules that calls still hold, are others.
  struct Bytes {
    int64_t weights = 0, optimizers = 0, activations = 0, workspaces = 0, others = 0;
  };
  Bytes UsedBytes(int device) const;  // others: of the first device
  // Ends the modules on it; there will be no others.
  void LoseDevice(int device);
  // The largest number of changes that a restart would not find, of modules that have a state
  // there.
  uint64_t durable_lag() const;
  // Whether a module was used in the last `time`: its owner may be taking it elsewhere.
  bool AnyUsedWithin(absl::Duration time) const;
  // Saves what is due and ends what has expired; the table's own thread does so each second.
  void Expire();
  // Saves what has changed since it was saved, for the end of the process.
  void SaveAll();

 private:
  // The time since Expire began before.
  absl::Duration SinceLook();
  using Key = std::pair<std::string, std::string>;  // caller, name
  using Entry = std::shared_ptr<RegisteredModule>;
  std::vector<Entry> All() const;
  // Waits until no other registration has the name; then this one does, until EndRegistration.
  absl::Status BeginRegistration(const Key& key, const CallWait& wait);
  void EndRegistration(const Key& key);
  // The module that is there, as `wanted` has it from now on.
  absl::StatusOr<Entry> Take(const Entry& found, const Registration& wanted);
  // Takes the module out of the table. Who drops it last waits for memory and a disk: without
  // mutex_.
  Entry End(Entry module, const std::string& cause) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ModuleOptions options_;
  const Clock& clock_;
  ModuleMemory memory_;  // these two outlive the modules
  EarlyPlaces early_places_;
  const LeaseTokens tokens_, activation_tokens_;
  mutable absl::Mutex mutex_;
  std::set<Key> registering_ ABSL_GUARDED_BY(mutex_);
  int64_t making_ ABSL_GUARDED_BY(mutex_) = 0;  // modules that are not in the table yet
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<Key, std::shared_ptr<RegisteredModule>> by_name_ ABSL_GUARDED_BY(mutex_);  // and calls
  std::map<uint64_t, std::shared_ptr<RegisteredModule>> by_id_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::pair<uint64_t, std::string>> ended_ ABSL_GUARDED_BY(mutex_);  // how, the last
  absl::Time looked_at_ ABSL_GUARDED_BY(mutex_);  // steady: when Expire began last
  Periodic expires_;
};

}  // namespace attnd
