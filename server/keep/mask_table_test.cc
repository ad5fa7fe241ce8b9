#include "server/keep/mask_table.h"

#include <gtest/gtest.h>

#include <string>

#include "server/call/status_details.h"

namespace attnd {
namespace {

const MaskCall kCall{.batch = 1, .q_heads = 2, .rows = 64, .keys = 64, .offsets = {0}};

MaskSpec Window(int32_t left) {
  return {.pattern = {MaskExpr{.op = RelativeWindow{left, 0}, .of = {}}}, .pattern_of = {0}};
}

// A list of some kilobytes.
MaskSpec Intervals(uint32_t end) {
  std::vector<uint32_t> begins(64 * 8), ends(64 * 8);
  for (uint32_t n = 0; n < 64 * 8; ++n) {
    begins[n] = n % 8 * 8;
    ends[n] = begins[n] + 1 + (n + end) % 5;
  }
  return {.pattern = {RowIntervals{8, begins, ends}}, .pattern_of = {0}};
}

class MaskTableTest : public ::testing::Test {
 protected:
  std::shared_ptr<const MaskDescription> Keep(MaskTable& table, const MaskSpec& spec,
                                              absl::string_view caller) {
    auto mask = table.Keep(spec, kCall, caller);
    EXPECT_TRUE(mask.ok()) << mask.status();
    return mask.ok() ? *mask : nullptr;
  }
  static std::string IdOf(const MaskDescription& mask) {
    return {mask.id().begin(), mask.id().end()};
  }
  static bool Knows(MaskTable& table, const MaskDescription& mask, absl::string_view caller) {
    auto found = table.Find(IdOf(mask), caller);
    if (found.ok()) {
      EXPECT_EQ((*found)->id(), mask.id());
    } else {
      EXPECT_EQ(found.status().code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_EQ(ReasonOf(found.status()), reason::kMaskUnknown);
    }
    return found.ok();
  }

  FakeClock clock_;
};

TEST_F(MaskTableTest, EqualMasksAreOneObject) {
  MaskTable table({}, clock_);
  auto a = Keep(table, Window(7), "ann"), b = Keep(table, Window(7), "bob");
  EXPECT_EQ(a, b);
  EXPECT_NE(a, Keep(table, Window(8), "ann"));
  EXPECT_EQ(table.stats().masks, 2);
}

TEST_F(MaskTableTest, ACallerNamesOnlyWhatItHasSent) {
  MaskTable table({}, clock_);
  auto mask = Keep(table, Window(7), "ann");
  EXPECT_TRUE(Knows(table, *mask, "ann"));
  EXPECT_FALSE(Knows(table, *mask, "bob"));
  Keep(table, Window(7), "bob");
  EXPECT_TRUE(Knows(table, *mask, "bob"));
  EXPECT_EQ(table.stats().hits, 2u);
  EXPECT_EQ(table.stats().misses, 1u);
}

TEST_F(MaskTableTest, AnIdHas32Bytes) {
  MaskTable table({}, clock_);
  for (size_t size : {0, 31, 33}) {
    absl::Status status = table.Find(std::string(size, 'x'), "ann").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("problem.mask.id: expected 32 bytes"), std::string::npos)
        << status;
  }
}

TEST_F(MaskTableTest, TheOldestGoesWhenRoomIsShort) {
  const int64_t one =
      Keep(*std::make_unique<MaskTable>(MaskTableLimits{}, clock_), Intervals(0), "ann")->bytes();
  MaskTable table({.bytes = 3 * one + one / 2, .bytes_of_caller = 3 * one + one / 2}, clock_);
  auto first = Keep(table, Intervals(1), "ann"), second = Keep(table, Intervals(2), "ann");
  auto third = Keep(table, Intervals(3), "bob");
  EXPECT_TRUE(Knows(table, *first, "ann"));  // used last
  auto fourth = Keep(table, Intervals(4), "bob");
  EXPECT_FALSE(Knows(table, *second, "ann"));
  EXPECT_TRUE(Knows(table, *first, "ann"));
  EXPECT_TRUE(Knows(table, *third, "bob"));
  EXPECT_TRUE(Knows(table, *fourth, "bob"));
  EXPECT_LE(table.stats().bytes, 3 * one + one / 2);
}

TEST_F(MaskTableTest, ACallersQuotaTouchesNobodyElse) {
  const int64_t one =
      Keep(*std::make_unique<MaskTable>(MaskTableLimits{}, clock_), Intervals(0), "ann")->bytes();
  MaskTable table({.bytes = 100 * one, .bytes_of_caller = 2 * one + one / 2}, clock_);
  auto shared = Keep(table, Intervals(100), "bob");
  Keep(table, Intervals(100), "ann");
  for (uint32_t n = 0; n < 4; ++n) Keep(table, Intervals(n), "ann");
  EXPECT_FALSE(Knows(table, *shared, "ann"));
  EXPECT_TRUE(Knows(table, *shared, "bob"));
  EXPECT_EQ(table.stats().masks, 3);
}

TEST_F(MaskTableTest, MasksThatNobodyUsesAreForgotten) {
  MaskTable table({.idle = absl::Minutes(10)}, clock_);
  auto used = Keep(table, Window(1), "ann"), idle = Keep(table, Window(2), "ann");
  clock_.Advance(absl::Minutes(6));
  EXPECT_TRUE(Knows(table, *used, "ann"));
  clock_.Advance(absl::Minutes(6));
  EXPECT_TRUE(Knows(table, *used, "ann"));
  EXPECT_FALSE(Knows(table, *idle, "ann"));
  EXPECT_EQ(table.stats().masks, 1);
}

TEST_F(MaskTableTest, AMaskAboveTheQuotaServesItsCallOnly) {
  MaskTable table({.bytes = 1000, .bytes_of_caller = 100}, clock_);
  auto mask = Keep(table, Intervals(0), "ann");
  ASSERT_NE(mask, nullptr);
  EXPECT_FALSE(Knows(table, *mask, "ann"));
  EXPECT_EQ(table.stats().bytes, 0);
}

TEST_F(MaskTableTest, AWrongMaskIsRefusedAndNotKept) {
  MaskTable table({}, clock_);
  EXPECT_EQ(table.Keep(Window(-2), kCall, "ann").status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(table.stats().masks, 0);
}

}  // namespace
}  // namespace attnd
