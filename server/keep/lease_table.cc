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

}  // namespace

LeaseTable::LeaseTable(const LeaseLimits& limits, const TokenIssuer& issuer, Metrics& metrics,
                       const Clock& clock)
    : limits_(limits), tokens_(issuer), metrics_(metrics), clock_(clock), ended_(kRemembered) {
  places_.push_back({.limit = limits.memory_bytes, .by_use = {}});
  for (int64_t bytes : limits.device_bytes) places_.push_back({.limit = bytes, .by_use = {}});
}

absl::Duration LeaseTable::TtlOf(absl::Duration wished) const {
  if (wished <= absl::ZeroDuration()) return limits_.ttl;
  return std::min(wished, limits_.max_ttl);
}

LeaseGrant LeaseTable::GrantOf(uint64_t id, const Lease& lease) const {
  return {tokens_.Make(id, lease.owner), lease.expires, lease.residual->bytes()};
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
      End(leases_.find(earlier->second), LeaseEnd::kReplaced, gone);
    }
  }
  if (!MakeRoom(wish, *residual, now, gone)) {
    metrics_.LeaseRefused();
    return std::nullopt;
  }
  const int64_t bytes = residual->bytes();
  uint64_t id = next_lease_++;
  Place& place = PlaceAt(residual->place());
  Owner& own = owners_[wish.owner];
  Lease& lease = leases_[id];
  lease = {.owner = wish.owner,
           .request = wish.request,
           .residual = std::move(residual),
           .granted = now,
           .used = now,
           .expires = absl::InfinitePast(),
           .ttl = TtlOf(wish.ttl),
           .at = place.by_use.insert(place.by_use.end(), id),
           .own_at = own.by_use.insert(own.by_use.end(), id)};
  Prolong(id, lease);
  place.bytes += bytes;
  own.bytes += bytes;
  if (!wish.request.empty()) requests_[RequestKey(wish.owner, wish.request)] = id;
  metrics_.LeaseGranted(lease.residual->place());
  return GrantOf(id, lease);
}

bool LeaseTable::MakeRoom(const LeaseWish& wish, const ResidualTensors& residual, absl::Time now,
                          Held& gone) {
  const int64_t bytes = residual.bytes();
  Place& place = PlaceAt(residual.place());
  if (bytes > std::min(place.limit, limits_.caller_bytes)) return false;
  absl::Time before = now - limits_.min_hold;
  for (auto own = owners_.find(wish.owner);
       own != owners_.end() && own->second.bytes + bytes > limits_.caller_bytes;
       own = owners_.find(wish.owner)) {
    if (Evict(own->second.by_use, before, gone) == 0) return false;
  }
  while (place.bytes + bytes > place.limit) {
    if (Evict(place.by_use, before, gone) == 0) return false;
  }
  while (static_cast<int64_t>(leases_.size()) + 1 > limits_.max_leases) {
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

absl::StatusOr<LeaseTable::Leases::iterator> LeaseTable::Look(uint64_t id, Held& gone) {
  ExpireDue(clock_.Now(), gone);
  auto lease = leases_.find(id);
  if (lease != leases_.end()) return lease;
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
  ASSIGN_OR_RETURN(auto found, Look(id, gone));
  Lease& lease = found->second;
  if (!SameForward(lease.residual->problem(), problem)) {
    metrics_.LeaseLookedUp(LeaseLookup::kMismatch);
    return Mismatch();
  }
  Prolong(id, lease);
  MarkUsed(lease);
  metrics_.LeaseLookedUp(LeaseLookup::kHit);
  return lease.residual;
}

absl::StatusOr<LeaseGrant> LeaseTable::Renew(absl::string_view token, absl::string_view owner,
                                             absl::Duration ttl) {
  ASSIGN_OR_RETURN(uint64_t id, CheckToken(token, owner));
  Held gone;
  absl::MutexLock lock(&mutex_);
  ASSIGN_OR_RETURN(auto found, Look(id, gone));
  Lease& lease = found->second;
  if (ttl > absl::ZeroDuration()) lease.ttl = TtlOf(ttl);
  Prolong(id, lease);
  return GrantOf(id, lease);
}

absl::Status LeaseTable::Release(absl::string_view token, absl::string_view owner) {
  absl::StatusOr<uint64_t> id = tokens_.Check(token, owner);
  if (absl::IsFailedPrecondition(id.status())) return absl::OkStatus();  // went with its process
  RETURN_IF_ERROR(id.status());
  Held gone;
  absl::MutexLock lock(&mutex_);
  ExpireDue(clock_.Now(), gone);
  auto lease = leases_.find(*id);
  if (lease != leases_.end()) End(lease, LeaseEnd::kReleased, gone);
  return absl::OkStatus();
}

void LeaseTable::Prolong(uint64_t id, Lease& lease) {
  by_expiry_.erase({lease.expires, id});
  lease.expires = clock_.Now() + lease.ttl;
  by_expiry_.insert({lease.expires, id});
}

void LeaseTable::MarkUsed(Lease& lease) {
  lease.used = clock_.Now();
  ByUse& all = PlaceAt(lease.residual->place()).by_use;
  all.splice(all.end(), all, lease.at);
  ByUse& own = owners_.find(lease.owner)->second.by_use;
  own.splice(own.end(), own, lease.own_at);
}

void LeaseTable::End(Leases::iterator found, LeaseEnd how, Held& gone) {
  auto& [id, lease] = *found;
  int64_t bytes = lease.residual->bytes();
  Place& place = PlaceAt(lease.residual->place());
  place.bytes -= bytes;
  place.by_use.erase(lease.at);
  auto own = owners_.find(lease.owner);
  own->second.bytes -= bytes;
  own->second.by_use.erase(lease.own_at);
  if (own->second.by_use.empty()) owners_.erase(own);
  if (!lease.request.empty()) requests_.erase(RequestKey(lease.owner, lease.request));
  by_expiry_.erase({lease.expires, id});
  size_t slot = id % kRemembered;
  if (ended_.size() <= slot) ended_.resize(slot + 1);
  ended_[slot] = {id, how};
  metrics_.LeaseEnded(lease.residual->place(), how, clock_.Now() - lease.granted);
  gone.push_back(std::move(lease.residual));
  leases_.erase(found);
}

void LeaseTable::ExpireDue(absl::Time now, Held& gone) {
  while (!by_expiry_.empty() && by_expiry_.begin()->first <= now) {
    End(leases_.find(by_expiry_.begin()->second), LeaseEnd::kExpired, gone);
  }
}

int64_t LeaseTable::Evict(const ByUse& by_use, absl::Time before, Held& gone) {
  for (uint64_t id : by_use) {
    auto found = leases_.find(id);
    const Lease& lease = found->second;
    if (lease.used > before) return 0;  // and so are all that follow
    // Only this table hands out shares, under its lock, so a lease without a reader stays so.
    if (lease.residual.use_count() > 1) continue;
    int64_t bytes = lease.residual->bytes();
    End(found, LeaseEnd::kEvicted, gone);
    return bytes;
  }
  return 0;
}

int64_t LeaseTable::EvictAnywhere(absl::Time before, Held& gone) {
  std::vector<std::pair<absl::Time, const ByUse*>> lists;  // by their longest unused
  for (const Place& place : places_) {
    if (place.by_use.empty()) continue;
    lists.push_back({leases_.find(place.by_use.front())->second.used, &place.by_use});
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
    int64_t more = Evict(PlaceAt(place).by_use, now - limits_.min_hold, gone);
    if (more == 0) break;
    freed += more;
  }
  return freed;
}

bool LeaseTable::EvictOne(int place) {
  Held gone;
  absl::MutexLock lock(&mutex_);
  const ByUse& by_use = PlaceAt(place).by_use;
  if (Evict(by_use, clock_.Now() - limits_.min_hold, gone) != 0) return true;
  return Evict(by_use, absl::InfiniteFuture(), gone) != 0;
}

void LeaseTable::LoseDevice(int device) {
  Held gone;
  absl::MutexLock lock(&mutex_);
  Place& place = PlaceAt(device);
  place.limit = -1;  // even for a residual of no bytes
  while (!place.by_use.empty()) {
    End(leases_.find(place.by_use.front()), LeaseEnd::kDeviceLost, gone);
  }
}

bool LeaseTable::MayHold(int place, int64_t bytes) const {
  absl::MutexLock lock(&mutex_);
  const size_t index = static_cast<size_t>(place - kHostMemory);
  return index < places_.size() && bytes <= places_[index].limit;
}

void LeaseTable::Expire() {
  Held gone;
  absl::MutexLock lock(&mutex_);
  ExpireDue(clock_.Now(), gone);
}

LeaseUse LeaseTable::Use() const {
  absl::MutexLock lock(&mutex_);
  LeaseUse use{.leases = static_cast<int64_t>(leases_.size())};
  for (const Place& place : places_) use.bytes += place.bytes;
  if (!by_expiry_.empty()) use.next_end = by_expiry_.begin()->first;
  return use;
}

LeaseUse LeaseTable::Use(int place) const {
  absl::MutexLock lock(&mutex_);
  const Place& at = places_[static_cast<size_t>(place - kHostMemory)];
  return {.leases = static_cast<int64_t>(at.by_use.size()), .bytes = at.bytes};
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
