// LeaseTable: the callers' rights to use ResidualTensors, each for a time. A Forward that asked for
// a lease gets one once it is computed. A token (LeaseTokens) names the lease to its owner.
//
// clang-format off
//   Grant → held ── Find, Renew: extends it ──┬── Release                 released
//                                             ├── ttl passed              expired
//                                             ├── its device failed       device_lost
//                                             ├── memory is short         evicted
//                                             └── the same request again  replaced
// clang-format on
//
// A lease's memory is host memory or a device's; each place has a budget. Grant keeps only what
// fits beside leases in recent use; without a lease the Forward succeeds all the same.
// Eviction frees memory for a call that would be refused, for a new lease beyond a place's budget
// (its least recently used goes) or the owner's quota (the owner's least recently used), or for an
// admitted call that finds memory in pieces. Only the last evicts leases used within min_hold. A
// lease that a call or a send still reads is not evicted.
//
// Invariants: (1) leases never exceed their place's bytes, their owner's caller_bytes, nor
// max_leases; (2) an ended lease's memory is free once its last reader is done; (3) a token opens
// its own lease or none. Errors of Find, Renew: those of LeaseTokens; FAILED_PRECONDITION
// LEASE_LOST with how the lease ended, if remembered, LEASE_MISMATCH for another problem. Any
// thread.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "server/admission/admission.h"
#include "server/admission/residual.h"
#include "server/keep/kept_table.h"
#include "server/keep/lease_token.h"
#include "server/metrics/metrics.h"

namespace attnd {

struct LeaseLimits {
  int64_t memory_bytes = int64_t{512} << 20;  // of leases in host memory; 0: none there
  std::vector<int64_t> device_bytes;          // of those on each device, by its number
  // The limit of one owner's leases, wherever they lie.
  int64_t caller_bytes = std::numeric_limits<int64_t>::max();
  int64_t max_leases = 1 << 16;
  absl::Duration ttl = absl::Minutes(2);    // after the grant and after each use, unless asked
  absl::Duration max_ttl = absl::Hours(1);  // the most that a caller gets
  absl::Duration min_hold = absl::Seconds(5);
};

// Tells the caller about its lease.
struct LeaseGrant {
  std::string token;
  absl::Time expires;
  int64_t bytes = 0;
};

// Asks for a lease. `request` names the call among its owner's (empty: no name). A second grant of
// one request replaces the first, so a retried Forward holds its memory once.
struct LeaseWish {
  std::string owner;
  std::string request;
  absl::Duration ttl = absl::ZeroDuration();  // 0: the default
};

struct LeaseUse {
  int64_t leases = 0;
  int64_t bytes = 0;
  absl::Time next_end = absl::InfiniteFuture();  // of the lease whose time is over first
};

class LeaseTable final : public MemoryReclaimer {
 public:
  // `metrics` and `clock` outlive it.
  LeaseTable(const LeaseLimits& limits, const TokenIssuer& issuer, Metrics& metrics,
             const Clock& clock);

  // Nothing when it does not fit; `residual` is then released.
  std::optional<LeaseGrant> Grant(const LeaseWish& wish,
                                  std::shared_ptr<const ResidualTensors> residual);
  // The residual of `token` for a Backward of `problem`; extends the lease.
  absl::StatusOr<std::shared_ptr<const ResidualTensors>> Find(absl::string_view token,
                                                              absl::string_view owner,
                                                              const Problem& problem);
  // Gives `memory` the residual that a decoded call names, if any. Errors: those of Find.
  absl::Status FindFor(const AttentionCall& call, absl::string_view caller, CallMemory& memory);
  // ttl 0: the default.
  absl::StatusOr<LeaseGrant> Renew(absl::string_view token, absl::string_view owner,
                                   absl::Duration ttl);
  // OK also for a lease that has ended, however it ended.
  absl::Status Release(absl::string_view token, absl::string_view owner);

  bool MayHold(int place, int64_t bytes) const override;
  // Evicts leases unused for min_hold, least recently used first, until `bytes` are freed at the
  // place or none is left. Returns the bytes freed.
  int64_t Reclaim(int place, int64_t bytes) override;
  // Evicts one, even within min_hold; false when there is none to evict.
  bool EvictOne(int place) override;
  // Ends leases that have expired, so that their memory is free also where no call comes. A lease
  // ends for its owner exactly at its time, since each use checks it.
  void Expire();
  // Ends the leases of a lost device and grants none there from then on.
  void LoseDevice(int device);

  LeaseUse Use() const;           // in all
  LeaseUse Use(int place) const;  // without next_end
  const LeaseLimits& limits() const { return limits_; }

 private:
  using Held = std::vector<std::shared_ptr<const ResidualTensors>>;  // let go of outside the lock
  struct Lease {
    std::string request;
    std::shared_ptr<const ResidualTensors> residual;
    absl::Time granted;
  };
  using Leases = KeptTable<uint64_t, Lease>;  // its places: host memory, then the devices
  struct Ended {
    uint64_t lease = 0;
    LeaseEnd how = LeaseEnd::kReleased;
  };
  static constexpr size_t kRemembered = 1 << 14;  // ends of leases
  static size_t Index(int place) { return static_cast<size_t>(place - kHostMemory); }

  absl::Duration TtlOf(absl::Duration wished) const;
  absl::StatusOr<uint64_t> CheckToken(absl::string_view token, absl::string_view owner);
  absl::StatusOr<Leases::Entry*> Look(uint64_t lease, Held& gone)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(Leases::Entry& lease, LeaseEnd how, Held& gone) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ExpireDue(absl::Time now, Held& gone) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the least recently used lease of a list that has no reader and was last used at `before`
  // or earlier. Returns its bytes, 0 when there is none.
  int64_t Evict(const Leases::ByUse& by_use, absl::Time before, Held& gone)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The same for the leases of all places.
  int64_t EvictAnywhere(absl::Time before, Held& gone) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MakeRoom(const LeaseWish& wish, const ResidualTensors& residual, absl::Time now, Held& gone)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  LeaseGrant GrantOf(const Leases::Entry& lease) const;

  const LeaseLimits limits_;
  const LeaseTokens tokens_;
  Metrics& metrics_;
  const Clock& clock_;

  mutable absl::Mutex mutex_;
  Leases leases_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, uint64_t> requests_ ABSL_GUARDED_BY(mutex_);  // owner + request
  std::vector<Ended> ended_ ABSL_GUARDED_BY(mutex_);  // [lease % kRemembered]
  uint64_t next_lease_ ABSL_GUARDED_BY(mutex_) = 1;
};

}  // namespace attnd
