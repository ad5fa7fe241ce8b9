#include "attention/strided_runs.h"

#include <gtest/gtest.h>

#include <vector>

namespace attnd {
namespace {

using Loop = StridedRuns::Loop;

TEST(StridedRuns, FoldsLoopsWhoseRunsTouch) {
  StridedRuns whole = StridedRuns::Make(5, {Loop{2, 24}, Loop{3, 8}, Loop{4, 2}}, 2);
  EXPECT_EQ(whole.run_count(), 1);
  EXPECT_EQ(whole.run_bytes, 48);
  EXPECT_EQ(whole.RunOffset(0), 5);
  // The middle loop leaves gaps, so the outer one cannot be folded either.
  StridedRuns gaps = StridedRuns::Make(0, {Loop{2, 30}, Loop{3, 10}, Loop{4, 2}}, 2);
  EXPECT_EQ(gaps.run_count(), 6);
  EXPECT_EQ(gaps.run_bytes, 8);
  EXPECT_EQ(gaps.RunOffset(5), 50);
  // Loops of one are no loops, wherever they stand.
  EXPECT_EQ(StridedRuns::Make(0, {Loop{2, 8}, Loop{1, 99}, Loop{1, 7}}, 8).run_count(), 1);
}

TEST(StridedRuns, RepeatsARunWhenTheStrideIsZero) {
  StridedRuns runs = StridedRuns::Make(1, {Loop{}, Loop{3, 0}, Loop{2, 2}}, 2);
  EXPECT_EQ(runs.run_count(), 3);
  EXPECT_EQ(runs.total_bytes(), 12);
  for (int run = 0; run < 3; ++run) EXPECT_EQ(runs.RunOffset(run), 1);
}

TEST(StridedRuns, ScattersWhatItGatheredInPiecesOfAnySize) {
  StridedRuns runs = StridedRuns::Make(3, {Loop{2, 40}, Loop{2, 15}, Loop{3, 4}}, 3);
  std::vector<std::byte> tensor(100);
  for (size_t n = 0; n < tensor.size(); ++n) tensor[n] = static_cast<std::byte>(n);
  std::vector<std::byte> wire(runs.total_bytes());
  Gather(runs, tensor.data(), wire.data());
  EXPECT_EQ(static_cast<int>(wire[9]), 3 + 15);  // the second run of the middle loop
  for (int64_t piece : {1, 2, 7, 36}) {
    std::vector<std::byte> back(100, std::byte{0xff});
    RunCursor cursor(runs, back.data());
    for (int64_t at = 0; at < runs.total_bytes(); at += piece) {
      cursor.Scatter(wire.data() + at, std::min(piece, runs.total_bytes() - at));
    }
    int64_t written = 0;
    for (size_t n = 0; n < back.size(); ++n) {
      if (back[n] == std::byte{0xff}) continue;
      EXPECT_EQ(back[n], tensor[n]);
      ++written;
    }
    EXPECT_EQ(written, runs.total_bytes());
  }
}

}  // namespace
}  // namespace attnd
