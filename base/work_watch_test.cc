#include "base/work_watch.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>

namespace attnd {
namespace {

TEST(WorkWatch, TellsTheFirstTimeAtWhichSomethingIsStuck) {
  WorkWatch watch;
  EXPECT_EQ(watch.stuck_at(), absl::InfiniteFuture());
  const absl::Time begin = absl::FromUnixSeconds(1000);
  std::optional<WorkWatch::Work> soon(watch.Begin(begin));
  const WorkWatch::Work later = watch.Begin(begin + absl::Seconds(5));
  const WorkWatch::Work never = watch.Begin(absl::InfiniteFuture());
  EXPECT_EQ(watch.stuck_at(), begin + kStuckAfter);
  soon.reset();
  EXPECT_EQ(watch.stuck_at(), begin + absl::Seconds(5) + kStuckAfter);
}

TEST(WorkWatch, CountsEqualTimesEachAndMovedWorkOnce) {
  WorkWatch watch;
  const absl::Time end = absl::FromUnixSeconds(1000);
  {
    WorkWatch::Work first = watch.Begin(end);
    {
      const WorkWatch::Work second = watch.Begin(end);
      const WorkWatch::Work moved = std::move(first);
    }
    EXPECT_EQ(watch.stuck_at(), absl::InfiniteFuture());
  }
  EXPECT_EQ(watch.stuck_at(), absl::InfiniteFuture());
}

}  // namespace
}  // namespace attnd
