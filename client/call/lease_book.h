// LeaseBook: the residual leases that one client holds: which token, at which address. A thread of
// its own, started with the first lease, renews each lease after half its life and returns released
// ones to their servers, many in one call. Release returns at once.
//
// Threads: any. shared_ptr: the client and each Residual have it, so that a Residual may outlive
// its client; Close then has given everything back.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/steady_cond_var.h"

namespace attnd {

struct HeldLease {
  std::string token;
  int address = 0;  // index of the server that keeps it
  absl::Duration life;
  int64_t bytes = 0;
};

class LeaseBook {
 public:
  // The book's thread asks servers by these calls.
  struct Calls {
    // The lease's new life. UNAVAILABLE and DEADLINE_EXCEEDED: asked again later; other errors: it
    // is lost.
    std::function<absl::StatusOr<absl::Duration>(int address, const std::string& token)> renew;
    std::function<void(int address, const std::vector<std::string>& tokens)> release;
  };
  using Id = uint64_t;  // 0: none

  // `clock` outlives Close.
  LeaseBook(Calls calls, const Clock& clock) : calls_(std::move(calls)), clock_(clock) {}
  ~LeaseBook();

  Id Add(HeldLease lease);  // 0 after Close
  std::optional<HeldLease> Find(Id id);
  void Lost(Id id);  // the server no longer has it
  void Release(Id id);

  // Gives everything back and ends the thread; nothing is held or added from then on.
  void Close();

 private:
  struct Entry {
    HeldLease lease;
    absl::Time due;  // when it is renewed
  };
  using Returned = std::map<int, std::vector<std::string>>;  // tokens by address

  void Main();
  void Forget(Id id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetDue(Id id, Entry& entry, absl::Duration after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveBack(Returned returned) ABSL_LOCKS_EXCLUDED(mutex_);
  void RenewDue() ABSL_LOCKS_EXCLUDED(mutex_);

  const Calls calls_;
  const Clock& clock_;
  absl::Mutex mutex_;
  SteadyCondVar changed_;
  absl::flat_hash_map<Id, Entry> held_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<absl::Time, Id>> due_ ABSL_GUARDED_BY(mutex_);
  Returned returned_ ABSL_GUARDED_BY(mutex_);
  Id next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // started under mutex_, joined by Close
};

}  // namespace attnd
