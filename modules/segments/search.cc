#include "modules/segments/search.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

namespace attnd {
namespace {

// CostTable: what is known of the segments of one block in one direction.
class CostTable {
 public:
  CostTable(int64_t places, absl::Span<const CostedSegment> segments)
      : places_(places), costs_(segments.begin(), segments.end()) {
    const std::vector<bool> lone = LonePlaces(places, segments);
    for (size_t n = 0; n < costs_.size(); ++n) {
      numbers_[{costs_[n].first, costs_[n].end}] = n;
      is_known_.push_back(lone[costs_[n].first]);
    }
  }

  SegmentEnds Best() const { return ShortestScheme(places_, costs_); }
  // Measures what is not known of this cover. False: nothing more may be measured.
  bool Measure(const SegmentEnds& ends, const MeasureSegment& measure) {
    int64_t first = 0;
    for (int64_t end : ends) {
      const size_t number = numbers_.at({first, end});
      if (!is_known_[number]) {
        const std::optional<double> took = measure(first, end);
        if (!took.has_value()) return false;
        costs_[number].microseconds = *took;
        is_known_[number] = true;
      }
      first = end;
    }
    return true;
  }
  bool IsKnown(const SegmentEnds& ends) {
    return Measure(ends, [](int64_t, int64_t) { return std::nullopt; });
  }
  void LeaveOutUnknown() {
    for (size_t n = 0; n < costs_.size(); ++n) {
      if (!is_known_[n]) costs_[n].microseconds = std::numeric_limits<double>::infinity();
    }
  }

 private:
  const int64_t places_;
  std::vector<CostedSegment> costs_;
  std::map<std::pair<int64_t, int64_t>, size_t> numbers_;  // by first and end
  std::vector<bool> is_known_;
};

}  // namespace

std::vector<bool> LonePlaces(int64_t places, absl::Span<const CostedSegment> segments) {
  std::vector<bool> lone(places, true);
  for (const CostedSegment& segment : segments) {
    if (segment.end == segment.first + 1) continue;
    std::fill(lone.begin() + segment.first, lone.begin() + segment.end, false);
  }
  return lone;
}

SegmentEnds SearchScheme(int64_t places, absl::Span<const CostedSegment> segments,
                         const MeasureSegment& measure) {
  CostTable table(places, segments);
  const SegmentEnds by_bounds = table.Best();
  for (SegmentEnds best = by_bounds; !table.IsKnown(best); best = table.Best()) {
    if (table.Measure(best, measure)) continue;
    table.LeaveOutUnknown();
    return table.IsKnown(by_bounds) ? table.Best() : by_bounds;
  }
  return table.Best();
}

}  // namespace attnd
