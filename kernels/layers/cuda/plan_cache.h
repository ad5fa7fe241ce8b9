// PlanCache: what searches found, kept on disk beside the kernels compiled at run time:
// plans.jsonl, one line a block and key. A line that cannot be read, or says what no search can
// say, counts as absent. A new line replaces the whole file, by renaming; several daemons may share
// it, and may lose each other's last line. Without a usable folder nothing is kept. Any thread.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/layers/cuda/product_tuning.h"
#include "modules/segments/segment.h"

namespace attnd {

// How one block runs. Segments may still be illegal.
struct BlockChoice {
  BlockEnds ends;
  ProductChoices products;
};

// A line without its end, and what it says.
std::string FormatPlanLine(const std::string& key, const BlockChoice& choice);
std::optional<std::pair<std::string, BlockChoice>> ParsePlanLine(absl::string_view line);

class PlanCache {
 public:
  static constexpr size_t kMostLines = 256, kMostLineBytes = 1 << 14;

  // The folder, as KernelCache's.
  explicit PlanCache(const std::string& directory);

  std::optional<BlockChoice> Get(const std::string& key) const;
  // Before the others, the oldest of which go. INTERNAL when the file cannot be written.
  absl::Status Put(const std::string& key, const BlockChoice& choice);

 private:
  std::string Lines() const;

  const std::string path_;  // empty: no folder
  absl::Mutex mutex_;       // of who replaces the file
};

}  // namespace attnd
