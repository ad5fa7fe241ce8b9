// MaskPlans: compiled masks, for engines and for what admission has to know of a call. A plan
// depends on the mask, its place, the sizes and diagonals of the problem, and the engine's tiles;
// calls that agree in these share it. Those used last stay, up to a limit in bytes.
// Threads: any. Who asks for a plan that another is compiling waits for it.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "attention/masks/compiled_mask.h"
#include "attention/problem.h"

namespace attnd {

struct MaskPlansStats {
  int64_t plans = 0, bytes = 0;
  uint64_t hits = 0, misses = 0;
  double compile_seconds = 0;
};

class MaskPlans {
 public:
  static constexpr int64_t kUsualBytes = int64_t{256} << 20;
  explicit MaskPlans(int64_t max_bytes = kUsualBytes) : max_bytes_(max_bytes) {}

  // Of a valid problem with a mask. OUT_OF_RANGE when it takes too long to compile. Whoever holds
  // the plan keeps it alive.
  absl::StatusOr<std::shared_ptr<const CompiledMask>> Get(const Problem& problem,
                                                          const MaskCompileOptions& options);
  MaskPlansStats stats() const;

 private:
  struct Plan {
    absl::Mutex mutex;  // held while it is compiled
    std::shared_ptr<const CompiledMask> compiled ABSL_GUARDED_BY(mutex);
    std::list<std::string>::iterator at;  // in order_; of MaskPlans' mutex, as is bytes
    int64_t bytes = 0;
  };
  std::shared_ptr<Plan> Find(const std::string& key);
  // The plan has been compiled in so long, or not (0 bytes).
  void Account(const std::string& key, const std::shared_ptr<Plan>& plan, int64_t bytes,
               absl::Duration took);

  const int64_t max_bytes_;
  mutable absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<Plan>> plans_ ABSL_GUARDED_BY(mutex_);
  std::list<std::string> order_ ABSL_GUARDED_BY(mutex_);  // the latest used first
  MaskPlansStats stats_ ABSL_GUARDED_BY(mutex_);
};

// Tiles of the CPU engine. Admission counts by them for every engine.
inline constexpr MaskTileSize kHostMaskTile = {.rows = 64, .keys = 64};
inline MaskCompileOptions HostMaskOptions() { return {.tile = kHostMaskTile, .by_keys = false}; }

// The share of all (b, h, i, j) that tiles of a plan hold: what an engine visits of a call whose
// other options hide nothing.
double VisitedShare(const CompiledMask& compiled, const Problem& problem);

// INVALID_ARGUMENT naming the first row that sees nothing, for a mask that rejects such rows
// (EmptyRow::kReject). Causal, window and lengths count; bias does not.
absl::Status CheckEmptyRows(const CompiledMask& compiled, const Problem& problem);

}  // namespace attnd
