// Which of the legal segments a block runs: the cheapest that cover it, exactly, as a shortest path
// over the places of its ops. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "modules/segments/bound.h"
#include "modules/segments/segment.h"

namespace attnd {

// A cost that is no number, or below 0, counts as more than any other.
struct CostedSegment {
  int64_t first = 0, end = 0;
  double microseconds = 0;
};
// Segments must cover each place alone, so that there is a path. Of equal ones the one of fewer
// segments.
SegmentEnds ShortestScheme(int64_t places, absl::Span<const CostedSegment> segments);

// Every legal segment that the GPU can join, at its bound.
std::vector<CostedSegment> BoundCosts(const ModuleGraph& graph, int64_t block, Direction direction,
                                      const RowCounts& rows, const GpuRates& gpu);

// Every way to cut a block, or the first `most`.
std::vector<SegmentEnds> AllSchemes(const SegmentMatcher& matcher, size_t most);

// Which ops of a layer run as one kernel. No bit depends on it.
enum class Fusion : uint8_t {
  kOff,       // none: op by op
  kBound,     // what takes the least time by its bound
  kMeasured,  // what takes the least time where it is measured; else kBound
};
// Cuts each block, without measuring.
std::vector<BlockEnds> CutsOf(Fusion fusion, const ModuleGraph& graph, const RowCounts& rows,
                              const GpuRates& gpu);

// By bounds alone.
BlockEnds BoundScheme(const ModuleGraph& graph, int64_t block, const RowCounts& rows,
                      const GpuRates& gpu);

}  // namespace attnd
