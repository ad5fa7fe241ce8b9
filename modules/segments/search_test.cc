#include "modules/segments/search.h"

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "attention/random_problem.h"
#include "gtest/gtest.h"

namespace attnd {
namespace {

using Costs = std::map<std::pair<int64_t, int64_t>, double>;

struct RandomTable {
  explicit RandomTable(Random& random) : places(random.Between(1, 9)) {
    for (int64_t first = 0; first < places; ++first) {
      for (int64_t end = first + 1; end <= places; ++end) {
        if (end > first + 1 && random.Chance(0.4)) continue;
        const auto cost = static_cast<double>(random.Between(1, 20));
        took[{first, end}] = cost;
        bounds.push_back({first, end, cost * random.Uniform()});
      }
    }
  }
  double CostOf(const SegmentEnds& ends) const {
    double sum = 0;
    int64_t first = 0;
    for (int64_t end : ends) {
      sum += took.at({first, end});
      first = end;
    }
    EXPECT_EQ(first, places);
    return sum;
  }
  // By trying all.
  double CheapestFrom(int64_t place) const {
    if (place == places) return 0;
    double best = std::numeric_limits<double>::infinity();
    for (const auto& [segment, cost] : took) {
      if (segment.first == place) best = std::min(best, cost + CheapestFrom(segment.second));
    }
    return best;
  }

  const int64_t places;
  Costs took;
  std::vector<CostedSegment> bounds;
};

TEST(SearchScheme, FindsTheCheapestOfAllAndMeasuresNothingTwice) {
  int64_t measured = 0, all = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const RandomTable table(random);
    const std::vector<bool> lone = LonePlaces(table.places, table.bounds);
    std::set<std::pair<int64_t, int64_t>> seen;
    const SegmentEnds best =
        SearchScheme(table.places, table.bounds, [&](int64_t first, int64_t end) {
          EXPECT_TRUE(seen.emplace(first, end).second) << seed;
          EXPECT_FALSE(lone[first]) << seed;
          return table.took.at({first, end});
        });
    // Ops that are alone in each cover stand at their bounds.
    RandomTable with_lone = table;
    for (const CostedSegment& of : table.bounds) {
      if (lone[of.first]) with_lone.took[{of.first, of.end}] = of.microseconds;
    }
    EXPECT_NEAR(with_lone.CostOf(best), with_lone.CheapestFrom(0), 1e-9) << seed;
    measured += static_cast<int64_t>(seen.size());
    all += static_cast<int64_t>(table.took.size());
  }
  EXPECT_LT(measured, all * 9 / 10);
}

TEST(SearchScheme, TakesTheBestOfWhatWasMeasuredWhenMeasuringEnds) {
  const std::vector<CostedSegment> bounds = {{0, 1, 1}, {1, 2, 1}, {2, 3, 1}, {0, 2, 1}, {1, 3, 2}};
  const Costs took = {{{0, 1}, 5}, {{1, 2}, 5}, {{2, 3}, 5}, {{0, 2}, 30}, {{1, 3}, 4}};
  const auto search = [&](int most) {
    return SearchScheme(3, bounds, [&, left = most](int64_t first, int64_t end) mutable {
      return left-- > 0 ? std::optional<double>(took.at({first, end})) : std::nullopt;
    });
  };
  const SegmentEnds by_bounds = {2, 3};
  EXPECT_EQ(search(0), by_bounds);
  EXPECT_EQ(search(1), by_bounds);
  EXPECT_EQ(search(3), by_bounds);  // {1, 3} is half measured
  EXPECT_EQ(search(9), (SegmentEnds{1, 3}));
}

TEST(SearchScheme, EndsWithACoverWhateverTimesSay) {
  constexpr double kLies[] = {0, 1e9, -1, std::numeric_limits<double>::quiet_NaN(),
                              std::numeric_limits<double>::infinity()};
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const RandomTable table(random);
    const SegmentEnds best = SearchScheme(table.places, table.bounds, [&](int64_t, int64_t) {
      return random.Chance(0.05) ? std::nullopt : std::optional(kLies[random.Between(0, 4)]);
    });
    EXPECT_GT(table.CostOf(best), 0) << seed;
  }
}

}  // namespace
}  // namespace attnd
