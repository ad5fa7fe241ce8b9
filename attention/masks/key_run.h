// KeyRun: keys [begin, end) of one row, and the sums of lists of them. Lists are ascending and
// disjoint; those that these functions give do not touch either. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

namespace attnd {

struct KeyRun {
  int64_t begin, end;
  friend auto operator<=>(const KeyRun&, const KeyRun&) = default;
};

// Any order and overlaps → ascending, without what is empty.
std::vector<KeyRun> Union(std::vector<KeyRun> runs);
std::vector<KeyRun> Intersection(const std::vector<KeyRun>& a, const std::vector<KeyRun>& b);
// Returns the part of `whole` that no run covers.
std::vector<KeyRun> Complement(const std::vector<KeyRun>& runs, KeyRun whole);

// Appends the part of `run` that lies in [begin, end), if any.
inline void AppendClipped(KeyRun run, int64_t begin, int64_t end, std::vector<KeyRun>& runs) {
  if (run.begin < begin) run.begin = begin;
  if (run.end > end) run.end = end;
  if (run.begin < run.end) runs.push_back(run);
}

}  // namespace attnd
