#include "server/keep/lease_table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

absl::Status Mismatch() {
  return Failure(absl::StatusCode::kFailedPrecondition, reason::kLeaseMismatch,
                 "residual_token: made by a forward of another problem; send the tensors",
                 {{"field", "problem"}});
}

LeaseLookup LookupOf(LeaseEnd how) {
  if (how == LeaseEnd::kExpired) return LeaseLookup::kExpired;
  if (how == LeaseEnd::kDeviceLost) return LeaseLookup::kDeviceLost;
  return how == LeaseEnd::kEvicted ? LeaseLookup::kEvicted : LeaseLookup::kReleased;
}

std::string RequestKey(const std::string& owner, const std::string& request) {
  return absl::StrCat(owner, absl::string_view("\0", 1), request);
}

std::vector<int64_t> LimitsOfPlaces(const LeaseLimits& limits) {
  std::vector<int64_t> bytes = {limits.memory_bytes};
  bytes.insert(bytes.end(), limits.device_bytes.begin(), limits.device_bytes.end());
  return bytes;
}

}  // namespace

LeaseTable::LeaseTable(const LeaseLimits& limits, const TokenIssuer& issuer, Metrics& metrics,
                       const Clock& clock)
    : limits_(limits),
      tokens_(issuer),
      metrics_(metrics),
      clock_(clock),
      leases_(LimitsOfPlaces(limits), limits.caller_bytes),
      ended_(kRemembered) {}

absl::Duration LeaseTable::TtlOf(absl::Duration wished) const {
  if (wished <= absl::ZeroDuration()) return limits_.ttl;
  return std::min(wished, limits_.max_ttl);
}

LeaseGrant LeaseTable::GrantOf(const Leases::Entry& lease) const {
  return {tokens_.Make(lease.key, lease.owner), lease.expires, lease.bytes};
}

std::optional<LeaseGrant> LeaseTable::Grant(const LeaseWish& wish,
                                            std::shared_ptr<const ResidualTensors> residual) {
  absl::Time now = clock_.Now();
  Held gone;
  absl::MutexLock lock(&mutex_);
  ExpireDue(now, gone);
  if (!wish.request.empty()) {
    auto earlier = requests_.find(RequestKey(wish.owner, wish.request));
    if (earlier != requests_.end()) {
      End(*leases_.Find(earlier->second), LeaseEnd::kReplaced, gone);
    }
  }
  if (!MakeRoom(wish, *residual, now, gone)) {
    metrics_.LeaseRefused();
    return std::nullopt;
  }
  const uint64_t id = next_lease_++;
  if (!wish.request.empty()) requests_[RequestKey(wish.owner, wish.request)] = id;
  metrics_.LeaseGranted(residual->place());
  return GrantOf(leases_.Insert(
      {.key = id,
       .owner = wish.owner,
       .place = Index(residual->place()),
       .bytes = residual->bytes(),
       .idle = TtlOf(wish.ttl),
       .value = {.request = wish.request, .residual = std::move(residual), .granted = now}},
      now));
}

bool LeaseTable::MakeRoom(const LeaseWish& wish, const ResidualTensors& residual, absl::Time now,
                          Held& gone) {
  const absl::Time before = now - limits_.min_hold;
  const auto evict = [&](const Leases::ByUse& by_use) {
    mutex_.AssertHeld();
    return Evict(by_use, before, gone) != 0;
  };
  if (!leases_.MakeRoom(wish.owner, Index(residual.place()), residual.bytes(), evict)) return false;
  while (leases_.size() >= limits_.max_leases) {
    if (EvictAnywhere(before, gone) == 0) return false;
  }
  return true;
}

absl::StatusOr<uint64_t> LeaseTable::CheckToken(absl::string_view token, absl::string_view owner) {
  absl::StatusOr<uint64_t> id = tokens_.Check(token, owner);
  if (id.ok()) return id;
  const std::string why = ReasonOf(id.status());
  metrics_.LeaseLookedUp(why == reason::kLeaseNotOwned  ? LeaseLookup::kForbidden
                         : why == reason::kWrongReplica ? LeaseLookup::kWrongReplica
                         : why == reason::kEpochChanged ? LeaseLookup::kEpochChanged
                                                        : LeaseLookup::kUnknown);
  return id;
}

absl::StatusOr<LeaseTable::Leases::Entry*> LeaseTable::Look(uint64_t id, Held& gone) {
  ExpireDue(clock_.Now(), gone);
  Leases::Entry* lease = leases_.Find(id);
  if (lease != nullptr) return lease;
  size_t slot = id % kRemembered;
  bool known = slot < ended_.size() && ended_[slot].lease == id;
  metrics_.LeaseLookedUp(known ? LookupOf(ended_[slot].how) : LeaseLookup::kUnknown);
  return LeaseLost(known ? LeaseEndName(ended_[slot].how) : "unknown");
}

absl::StatusOr<std::shared_ptr<const ResidualTensors>> LeaseTable::Find(absl::string_view token,
                                                                        absl::string_view owner,
                                                                        const Problem& problem) {
  ASSIGN_OR_RETURN(uint64_t id, CheckToken(token, owner));
  Held gone;
  absl::MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(Leases::Entry * lease, Look(id, gone));
  if (!SameForward(lease->value.residual->problem(), problem)) {
    metrics_.LeaseLookedUp(LeaseLookup::kMismatch);
    return Mismatch();
  }
  leases_.Touch(*lease, clock_.Now());
  metrics_.LeaseLookedUp(LeaseLookup::kHit);
  return lease->value.residual;
}

absl::StatusOr<LeaseGrant> LeaseTable::Renew(absl::string_view token, absl::string_view owner,
                                             absl::Duration ttl) {
  ASSIGN_OR_RETURN(uint64_t id, CheckToken(token, owner));
  Held gone;
  absl::MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(Leases::Entry * lease, Look(id, gone));
  if (ttl > absl::ZeroDuration()) lease->idle = TtlOf(ttl);
  leases_.Prolong(*lease, clock_.Now());
  return GrantOf(*lease);
}

absl::Status LeaseTable::Release(absl::string_view token, absl::string_view owner) {
  absl::StatusOr<uint64_t> id = tokens_.Check(token, owner);
  if (absl::IsFailedPrecondition(id.status())) return absl::OkStatus();  // went with its process
  RETURN_IF_ERROR(id.status());
  Held gone;
  absl::MutexLock lock(&mutex_);
  ExpireDue(clock_.Now(), gone);
  if (Leases::Entry* lease = leases_.Find(*id)) End(*lease, LeaseEnd::kReleased, gone);
  return absl::OkStatus();
}

void LeaseTable::End(Leases::Entry& ending, LeaseEnd how, Held& gone) {
  Lease& lease = ending.value;
  if (!lease.request.empty()) requests_.erase(RequestKey(ending.owner, lease.request));
  const size_t slot = ending.key % kRemembered;
  if (ended_.size() <= slot) ended_.resize(slot + 1);
  ended_[slot] = {ending.key, how};
  metrics_.LeaseEnded(lease.residual->place(), how, clock_.Now() - lease.granted);
  gone.push_back(std::move(lease.residual));
  leases_.Erase(ending);
}

void LeaseTable::ExpireDue(absl::Time now, Held& gone) {
  while (Leases::Entry* expired = leases_.Expired(now)) End(*expired, LeaseEnd::kExpired, gone);
}

int64_t LeaseTable::Evict(const Leases::ByUse& by_use, absl::Time before, Held& gone) {
  for (Leases::Entry* lease : by_use) {
    if (lease->used > before) return 0;  // and so are all that follow
    // Only this table hands out shares, under its lock, so a lease without a reader stays so.
    if (lease->value.residual.use_count() > 1) continue;
    const int64_t bytes = lease->bytes;
    End(*lease, LeaseEnd::kEvicted, gone);
    return bytes;
  }
  return 0;
}

int64_t LeaseTable::EvictAnywhere(absl::Time before, Held& gone) {
  std::vector<std::pair<absl::Time, const Leases::ByUse*>> lists;  // by their longest unused
  for (size_t place = 0; place < leases_.places(); ++place) {
    const Leases::ByUse& by_use = leases_.by_use(place);
    if (!by_use.empty()) lists.push_back({by_use.front()->used, &by_use});
  }
  std::sort(lists.begin(), lists.end());
  for (const auto& [used, by_use] : lists) {
    const int64_t bytes = Evict(*by_use, before, gone);
    if (bytes > 0) return bytes;
  }
  return 0;
}

int64_t LeaseTable::Reclaim(int place, int64_t bytes) {
  Held gone;
  absl::MutexLock lock(&mutex_);
  absl::Time now = clock_.Now();
  int64_t freed = 0;
  ExpireDue(now, gone);
  for (const auto& residual : gone) {
    if (residual->place() == place) freed += residual->bytes();
  }
  while (freed < bytes) {
    int64_t more = Evict(leases_.by_use(Index(place)), now - limits_.min_hold, gone);
    if (more == 0) break;
    freed += more;
  }
  return freed;
}

bool LeaseTable::EvictOne(int place) {
  Held gone;
  absl::MutexLock lock(&mutex_);
  const Leases::ByUse& by_use = leases_.by_use(Index(place));
  if (Evict(by_use, clock_.Now() - limits_.min_hold, gone) != 0) return true;
  return Evict(by_use, absl::InfiniteFuture(), gone) != 0;
}

void LeaseTable::LoseDevice(int device) {
  Held gone;
  absl::MutexLock lock(&mutex_);
  leases_.SetLimit(Index(device), -1);  // even for a residual of no bytes
  const Leases::ByUse& there = leases_.by_use(Index(device));
  while (!there.empty()) End(*there.front(), LeaseEnd::kDeviceLost, gone);
}

bool LeaseTable::MayHold(int place, int64_t bytes) const {
  absl::MutexLock lock(&mutex_);
  return Index(place) < leases_.places() && bytes <= leases_.limit(Index(place));
}

void LeaseTable::Expire() {
  Held gone;
  absl::MutexLock lock(&mutex_);
  ExpireDue(clock_.Now(), gone);
}

LeaseUse LeaseTable::Use() const {
  absl::MutexLock lock(&mutex_);
  LeaseUse use{.leases = leases_.size(), .next_end = leases_.next_expiry()};
  for (size_t place = 0; place < leases_.places(); ++place) use.bytes += leases_.bytes(place);
  return use;
}

LeaseUse LeaseTable::Use(int place) const {
  absl::MutexLock lock(&mutex_);
  return {.leases = static_cast<int64_t>(leases_.by_use(Index(place)).size()),
          .bytes = leases_.bytes(Index(place))};
}

absl::Status LeaseTable::FindFor(const AttentionCall& call, absl::string_view caller,
                                 CallMemory& memory) {
  if (call.residual_token().empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(memory.residual, Find(call.residual_token(), caller, call.problem()));
  memory.residual_place = memory.residual->place();
  metrics_.UploadSaved(call.kept_bytes());
  return absl::OkStatus();
}

}  // namespace attnd
