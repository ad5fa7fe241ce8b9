// Which segments a block runs by what they take, measured. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "modules/segments/scheme.h"

namespace attnd {

// Microseconds of this segment; null: nothing more may be measured.
using MeasureSegment = std::function<std::optional<double>(int64_t first, int64_t end)>;

// [places]: whether each cover of the places runs the op there alone: its time decides nothing.
std::vector<bool> LonePlaces(int64_t places, absl::Span<const CostedSegment> segments);

// The cheapest cover. `segments` stand at their bounds: those of the best path are measured until
// all of them have been, so that it is the best of all as long as none takes less than its bound.
// Where measuring ends before that: the best of what was measured, or what bounds say.
SegmentEnds SearchScheme(int64_t places, absl::Span<const CostedSegment> segments,
                         const MeasureSegment& measure);

}  // namespace attnd
