// MaskPlans: compiled masks, for engines and for what admission has to know of a call. A plan
// depends on the mask, its place, the sizes and diagonals of the problem, and the engine's tiles;
// calls that agree in these share it. Those used last stay, up to a limit in bytes; a plan that
// somebody holds is found whatever its size, so a call compiles its mask once.
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

  // Compiles the mask of a valid problem, or finds it compiled. OUT_OF_RANGE when it takes too long
  // to compile. The caller's pointer keeps the plan alive.
  absl::StatusOr<std::shared_ptr<const CompiledMask>> Get(const Problem& problem,
                                                          const MaskCompileOptions& options);
  // The same where it is compiled already; null otherwise. Never waits.
  std::shared_ptr<const CompiledMask> Find(const Problem& problem,
                                           const MaskCompileOptions& options);
  MaskPlansStats stats() const;

 private:
  struct Plan {
    absl::Mutex mutex;  // held while it is compiled
    // The rest under MaskPlans' mutex.
    std::shared_ptr<const CompiledMask> compiled;
    std::list<std::string>::iterator at;  // in order_
    int64_t bytes = 0;
  };
  // Finds the entry of that key, compiled or not.
  std::shared_ptr<const CompiledMask> FindCompiled(const std::string& key)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<Plan> FindOrAdd(const std::string& key);
  // `plan` has been compiled in so long; null: not.
  void Account(const std::string& key, const std::shared_ptr<Plan>& plan,
               std::shared_ptr<const CompiledMask> compiled, absl::Duration took);
  void DropOldest() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t max_bytes_;
  mutable absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<Plan>> plans_ ABSL_GUARDED_BY(mutex_);
  std::list<std::string> order_ ABSL_GUARDED_BY(mutex_);  // the latest used first
  // Dropped ones that somebody still held then.
  std::map<std::string, std::weak_ptr<const CompiledMask>> dropped_ ABSL_GUARDED_BY(mutex_);
  MaskPlansStats stats_ ABSL_GUARDED_BY(mutex_);
};

// Tiles of the CPU engine. Admission counts by them for every engine.
inline constexpr MaskTileSize kHostMaskTile = {.rows = 64, .keys = 64};
inline MaskCompileOptions HostMaskOptions() { return {.tile = kHostMaskTile, .by_keys = false}; }

// Adds up what a mask shows and costs, over all batch entries and heads.
struct MaskTotals {
  int64_t visible = 0, empty_rows = 0;
  int64_t tiles = 0, tiles_full = 0,
          tiles_partial = 0;  // of the plan's size; the rest show nothing
  int64_t distinct_bitmaps = 0;
};
MaskTotals TotalsOf(const CompiledMask& compiled, const Problem& problem);

// The share of all (b, h, i, j) that tiles of a plan hold: what an engine visits of a call whose
// other options hide nothing.
double VisitedShare(const CompiledMask& compiled, const Problem& problem);

// INVALID_ARGUMENT naming the first row that sees nothing, for a mask that rejects such rows
// (EmptyRow::kReject). Causal, window and lengths count; bias does not. OUT_OF_RANGE when that
// takes more than kMaxRowSteps.
inline constexpr int64_t kMaxRowSteps = int64_t{1} << 28;  // a tile of a row, 2 to 5 ns
absl::Status CheckEmptyRows(const CompiledMask& compiled, const Problem& problem);

}  // namespace attnd
