#include "server/keep/map_table.h"

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

MapTable::MapTable(const MapTableLimits& limits, const TokenIssuer& issuer, const Clock& clock)
    : limits_(limits),
      clock_(clock),
      tokens_(issuer),
      maps_({limits.bytes}, limits.bytes_of_caller) {}

absl::Status MapTable::MayKeep(int64_t bytes) const {
  const int64_t most = std::min(limits_.bytes, limits_.bytes_of_caller);
  if (bytes <= most) return absl::OkStatus();
  return Failure(
      absl::StatusCode::kOutOfRange, reason::kTooLargeForDevice,
      absl::StrCat("capture.keep: expected a map of at most ", most,
                   " bytes, half of --mask_memory_mib, got ", bytes,
                   "; without it the pooled map and the moments are captured"),
      {{"field", "capture.keep"}, {"limit", absl::StrCat(most)}, {"got", absl::StrCat(bytes)}});
}

std::string MapTable::Keep(KeptMap map, absl::string_view owner) {
  const std::string name(owner);
  const int64_t bytes = map.bytes();
  absl::MutexLock lock(&mutex_);
  DropIdle();
  maps_.MakeRoom(name, 0, bytes, [this](const Maps::ByUse& by_use) {
    mutex_.AssertHeld();
    maps_.Erase(*by_use.front());
    return true;
  });
  const uint64_t number = next_++;
  maps_.Insert({.key = number,
                .owner = name,
                .bytes = bytes,
                .idle = limits_.idle,
                .value = std::make_shared<const KeptMap>(std::move(map))},
               clock_.Now());
  return tokens_.Make(number, owner);
}

absl::StatusOr<std::shared_ptr<const KeptMap>> MapTable::Find(absl::string_view token,
                                                              absl::string_view owner,
                                                              absl::string_view field) {
  const absl::StatusOr<uint64_t> number = Check(token, owner, field);
  absl::MutexLock lock(&mutex_);
  DropIdle();
  Maps::Entry* found = number.ok() ? maps_.Find(*number) : nullptr;
  if (found == nullptr) {
    ++lost_;
    return number.ok() ? Lost(field) : number.status();
  }
  maps_.Touch(*found, clock_.Now());
  return found->value;
}

absl::Status MapTable::Release(absl::string_view token, absl::string_view owner,
                               absl::string_view field) {
  const absl::StatusOr<uint64_t> number = Check(token, owner, field);
  if (absl::IsFailedPrecondition(number.status())) return absl::OkStatus();
  RETURN_IF_ERROR(number.status());
  absl::MutexLock lock(&mutex_);
  if (Maps::Entry* found = maps_.Find(*number)) maps_.Erase(*found);
  return absl::OkStatus();
}

// Another server's, an earlier start's and another owner's map are as gone as an evicted one.
absl::StatusOr<uint64_t> MapTable::Check(absl::string_view token, absl::string_view owner,
                                         absl::string_view field) const {
  absl::StatusOr<uint64_t> number = tokens_.Check(token, owner);
  if (number.ok()) return number;
  if (absl::IsInvalidArgument(number.status())) {
    return FieldError(reason::kBadField, field, "a token of a kept map", "other bytes");
  }
  return Lost(field);
}

MapTableStats MapTable::stats() const {
  absl::MutexLock lock(&mutex_);
  return {maps_.size(), maps_.bytes(0), lost_};
}

void MapTable::DropIdle() {
  while (Maps::Entry* idle = maps_.Expired(clock_.Now())) maps_.Erase(*idle);
}

}  // namespace attnd
