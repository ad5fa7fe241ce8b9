// MapTable: attention maps that callers asked to keep (Capture.keep), by token, so that a later
// capture learns its distance and a pattern can be built. Best effort: the least recently used
// go when room is short or nobody has used them for a while. A map that a call has found lives as
// long as the call. Any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "server/keep/kept_table.h"
#include "server/keep/lease_token.h"

namespace attnd {

struct MapTableLimits {
  int64_t bytes = int64_t{256} << 20;  // 0: none are kept
  int64_t bytes_of_caller = int64_t{128} << 20;
  absl::Duration idle = absl::Minutes(30);  // forgotten after
};

struct MapTableStats {
  int64_t maps = 0, bytes = 0;
  uint64_t lost = 0;  // lookups of maps that are gone
};

struct KeptMap {
  int64_t rows = 0, keys = 0;
  std::vector<float> map;  // [rows, keys]
  int64_t bytes() const { return static_cast<int64_t>(map.size() * sizeof(float)); }
};

class MapTable {
 public:
  // `clock` outlives it.
  MapTable(const MapTableLimits& limits, const TokenIssuer& issuer, const Clock& clock);

  // Whether a map of so many bytes could be kept for a caller. OUT_OF_RANGE naming the limit and
  // what to do instead.
  absl::Status MayKeep(int64_t bytes) const;
  // Its token. Forgets its owner's longest unused maps, then others', where there is no room.
  std::string Keep(KeptMap map, absl::string_view owner);
  // FAILED_PRECONDITION CAPTURE_LOST when it is gone; INVALID_ARGUMENT naming `field` when `token`
  // is none.
  absl::StatusOr<std::shared_ptr<const KeptMap>> Find(absl::string_view token,
                                                      absl::string_view owner,
                                                      absl::string_view field);
  // OK also for one that is gone.
  absl::Status Release(absl::string_view token, absl::string_view owner, absl::string_view field);
  MapTableStats stats() const;

 private:
  using Maps = KeptTable<uint64_t, std::shared_ptr<const KeptMap>>;

  absl::StatusOr<uint64_t> Check(absl::string_view token, absl::string_view owner,
                                 absl::string_view field) const;
  void DropIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const MapTableLimits limits_;
  const Clock& clock_;
  const LeaseTokens tokens_;
  mutable absl::Mutex mutex_;
  Maps maps_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t lost_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd
