#include "attention/masks/key_run.h"

#include <algorithm>

namespace attnd {

std::vector<KeyRun> Union(std::vector<KeyRun> runs) {
  std::sort(runs.begin(), runs.end());
  std::vector<KeyRun> merged;
  for (const KeyRun& run : runs) {
    if (run.begin >= run.end) continue;
    if (!merged.empty() && run.begin <= merged.back().end) {
      merged.back().end = std::max(merged.back().end, run.end);
    } else {
      merged.push_back(run);
    }
  }
  return merged;
}

std::vector<KeyRun> Intersection(const std::vector<KeyRun>& a, const std::vector<KeyRun>& b) {
  std::vector<KeyRun> common;
  for (size_t n = 0, m = 0; n < a.size() && m < b.size();) {
    AppendClipped(a[n], b[m].begin, b[m].end, common);
    a[n].end < b[m].end ? ++n : ++m;
  }
  return Union(std::move(common));
}

std::vector<KeyRun> Complement(const std::vector<KeyRun>& runs, KeyRun whole) {
  std::vector<KeyRun> rest;
  for (const KeyRun& run : Union(runs)) {
    AppendClipped({whole.begin, run.begin}, whole.begin, whole.end, rest);
    whole.begin = std::max(whole.begin, run.end);
  }
  if (whole.begin < whole.end) rest.push_back(whole);
  return rest;
}

}  // namespace attnd
