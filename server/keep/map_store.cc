#include "server/keep/map_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

absl::Status Lost(absl::string_view field) {
  return Failure(absl::StatusCode::kFailedPrecondition, reason::kCaptureLost,
                 absl::StrCat(field, ": this map is not kept any more; capture it again"),
                 {{"field", field}});
}

}  // namespace

MapStore::MapStore(const MapStoreLimits& limits, const TokenIssuer& issuer, const Clock& clock)
    : limits_(limits), clock_(clock), tokens_(issuer) {}

absl::Status MapStore::MayKeep(int64_t bytes) const {
  const int64_t most = std::min(limits_.bytes, limits_.bytes_of_caller);
  if (bytes <= most) return absl::OkStatus();
  return Failure(
      absl::StatusCode::kOutOfRange, reason::kTooLargeForDevice,
      absl::StrCat("capture.keep: expected a map of at most ", most,
                   " bytes, half of --mask_memory_mib, got ", bytes,
                   "; without it the pooled map and the moments are captured"),
      {{"field", "capture.keep"}, {"limit", absl::StrCat(most)}, {"got", absl::StrCat(bytes)}});
}

std::string MapStore::Keep(KeptMap map, absl::string_view owner) {
  const std::string name(owner);
  absl::MutexLock lock(&mutex_);
  DropIdle();
  MakeRoom(map.bytes(), name);
  const uint64_t number = next_++;
  bytes_ += map.bytes();
  bytes_of_[name] += map.bytes();
  entries_[number] = {name, std::make_shared<const KeptMap>(std::move(map)), clock_.Now(),
                      by_use_.insert(by_use_.end(), number)};
  return tokens_.Make(number, owner);
}

absl::StatusOr<std::shared_ptr<const KeptMap>> MapStore::Find(absl::string_view token,
                                                              absl::string_view owner,
                                                              absl::string_view field) {
  const absl::StatusOr<uint64_t> number = Check(token, owner, field);
  absl::MutexLock lock(&mutex_);
  DropIdle();
  const auto found = number.ok() ? entries_.find(*number) : entries_.end();
  if (found == entries_.end()) {
    ++lost_;
    return number.ok() ? Lost(field) : number.status();
  }
  found->second.used = clock_.Now();
  by_use_.splice(by_use_.end(), by_use_, found->second.at);
  return found->second.map;
}

absl::Status MapStore::Release(absl::string_view token, absl::string_view owner,
                               absl::string_view field) {
  const absl::StatusOr<uint64_t> number = Check(token, owner, field);
  if (absl::IsFailedPrecondition(number.status())) return absl::OkStatus();
  RETURN_IF_ERROR(number.status());
  absl::MutexLock lock(&mutex_);
  if (entries_.contains(*number)) Erase(*number);
  return absl::OkStatus();
}

// Another server's, an earlier start's and another owner's map are as gone as an evicted one.
absl::StatusOr<uint64_t> MapStore::Check(absl::string_view token, absl::string_view owner,
                                         absl::string_view field) const {
  absl::StatusOr<uint64_t> number = tokens_.Check(token, owner);
  if (number.ok()) return number;
  if (absl::IsInvalidArgument(number.status())) {
    return FieldError(reason::kBadField, field, "a token of a kept map", "other bytes");
  }
  return Lost(field);
}

MapStoreStats MapStore::stats() const {
  absl::MutexLock lock(&mutex_);
  return {static_cast<int64_t>(entries_.size()), bytes_, lost_};
}

void MapStore::Erase(uint64_t number) {
  const auto found = entries_.find(number);
  const int64_t bytes = found->second.map->bytes();
  bytes_ -= bytes;
  const auto owned = bytes_of_.find(found->second.owner);
  owned->second -= bytes;
  if (owned->second == 0) bytes_of_.erase(owned);
  by_use_.erase(found->second.at);
  entries_.erase(found);
}

void MapStore::DropIdle() {
  const absl::Time oldest = clock_.Now() - limits_.idle;
  while (!by_use_.empty() && entries_[by_use_.front()].used < oldest) Erase(by_use_.front());
}

void MapStore::MakeRoom(int64_t bytes, const std::string& owner) {
  for (auto at = by_use_.begin();
       at != by_use_.end() && bytes_of_[owner] + bytes > limits_.bytes_of_caller;) {
    const uint64_t number = *at++;
    if (entries_[number].owner == owner) Erase(number);
  }
  while (!by_use_.empty() && bytes_ + bytes > limits_.bytes) Erase(by_use_.front());
}

}  // namespace attnd
