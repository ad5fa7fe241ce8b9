#include "modules/segments/scheme.h"

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "base/check.h"

namespace attnd {
namespace {

constexpr double kWorst = 1e15;  // sums of it stay exact enough to count them

double Cleaned(double microseconds) {
  return microseconds >= 0 && microseconds < kWorst ? microseconds : kWorst;
}

// The best way to a place.
struct Way {
  double microseconds = std::numeric_limits<double>::infinity();
  int64_t segments = 0;
  int64_t from = -1;
};

}  // namespace

SegmentEnds ShortestScheme(int64_t places, absl::Span<const CostedSegment> segments) {
  std::vector<CostedSegment> in_order(segments.begin(), segments.end());
  std::sort(in_order.begin(), in_order.end(), [](const auto& a, const auto& b) {
    return std::tie(a.first, a.end) < std::tie(b.first, b.end);
  });
  std::vector<Way> ways(places + 1);
  ways[0].microseconds = 0;
  for (const CostedSegment& segment : in_order) {
    const Way& before = ways[segment.first];
    const Way way = {before.microseconds + Cleaned(segment.microseconds), before.segments + 1,
                     segment.first};
    Way& best = ways[segment.end];
    if (std::tie(way.microseconds, way.segments) < std::tie(best.microseconds, best.segments)) {
      best = way;
    }
  }
  SegmentEnds ends;
  for (int64_t place = places; place > 0; place = ways[place].from) {
    CHECK(ways[place].from >= 0) << place;
    ends.push_back(place);
  }
  std::reverse(ends.begin(), ends.end());
  return ends;
}

std::vector<CostedSegment> BoundCosts(const ModuleGraph& graph, int64_t block, Direction direction,
                                      const RowCounts& rows, const GpuRates& gpu) {
  const BlockWork work(graph, block, direction, rows);
  std::vector<CostedSegment> costs;
  const bool joins_products = JoinsProducts(gpu, graph.layout().element);
  for (const OpSegment& segment : SegmentMatcher(graph, block, direction).All()) {
    if (segment.of == SegmentTemplate::kProduct && !joins_products) continue;
    costs.push_back({segment.first, segment.end, work.Of(segment).Microseconds(gpu)});
  }
  return costs;
}

BlockEnds BoundScheme(const ModuleGraph& graph, int64_t block, const RowCounts& rows,
                      const GpuRates& gpu) {
  const auto places = static_cast<int64_t>(graph.layout().blocks[block].ops.size());
  const auto best = [&](Direction direction) {
    return ShortestScheme(places, BoundCosts(graph, block, direction, rows, gpu));
  };
  return {best(Direction::kForward), best(Direction::kBackward)};
}

namespace {

// From the place on.
void AddSchemes(const SegmentMatcher& matcher, size_t most, SegmentEnds& so_far,
                std::vector<SegmentEnds>& all) {
  const int64_t first = so_far.empty() ? 0 : so_far.back();
  if (first == matcher.places()) return all.push_back(so_far);
  for (int64_t end = first + 1; all.size() < most && matcher.Match(first, end).ok(); ++end) {
    so_far.push_back(end);
    AddSchemes(matcher, most, so_far, all);
    so_far.pop_back();
  }
}

}  // namespace

std::vector<SegmentEnds> AllSchemes(const SegmentMatcher& matcher, size_t most) {
  std::vector<SegmentEnds> all;
  SegmentEnds none;
  AddSchemes(matcher, most, none, all);
  return all;
}

std::vector<BlockEnds> CutsOf(Fusion fusion, const ModuleGraph& graph, const RowCounts& rows,
                              const GpuRates& gpu) {
  std::vector<BlockEnds> blocks;
  for (size_t block = 0; block < graph.layout().blocks.size(); ++block) {
    blocks.push_back(fusion == Fusion::kOff ? SingleOps(graph, block)
                                            : BoundScheme(graph, block, rows, gpu));
  }
  return blocks;
}

}  // namespace attnd
