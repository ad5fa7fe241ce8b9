#include "server/keep/mask_store.h"

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

class MaskStoreTest : public ::testing::Test {
 protected:
  std::shared_ptr<const MaskDescription> Keep(MaskStore& store, const MaskSpec& spec,
                                              absl::string_view caller) {
    auto mask = store.Keep(spec, kCall, caller);
    EXPECT_TRUE(mask.ok()) << mask.status();
    return mask.ok() ? *mask : nullptr;
  }
  static std::string IdOf(const MaskDescription& mask) {
    return {mask.id().begin(), mask.id().end()};
  }
  static bool Knows(MaskStore& store, const MaskDescription& mask, absl::string_view caller) {
    auto found = store.Find(IdOf(mask), caller);
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

TEST_F(MaskStoreTest, EqualMasksAreOneObject) {
  MaskStore store({}, clock_);
  auto a = Keep(store, Window(7), "ann"), b = Keep(store, Window(7), "bob");
  EXPECT_EQ(a, b);
  EXPECT_NE(a, Keep(store, Window(8), "ann"));
  EXPECT_EQ(store.stats().masks, 2);
}

TEST_F(MaskStoreTest, ACallerNamesOnlyWhatItHasSent) {
  MaskStore store({}, clock_);
  auto mask = Keep(store, Window(7), "ann");
  EXPECT_TRUE(Knows(store, *mask, "ann"));
  EXPECT_FALSE(Knows(store, *mask, "bob"));
  Keep(store, Window(7), "bob");
  EXPECT_TRUE(Knows(store, *mask, "bob"));
  EXPECT_EQ(store.stats().hits, 2u);
  EXPECT_EQ(store.stats().misses, 1u);
}

TEST_F(MaskStoreTest, AnIdHas32Bytes) {
  MaskStore store({}, clock_);
  for (size_t size : {0, 31, 33}) {
    absl::Status status = store.Find(std::string(size, 'x'), "ann").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("problem.mask.id: expected 32 bytes"), std::string::npos)
        << status;
  }
}

TEST_F(MaskStoreTest, TheOldestGoesWhenRoomIsShort) {
  const int64_t one =
      Keep(*std::make_unique<MaskStore>(MaskStoreLimits{}, clock_), Intervals(0), "ann")->bytes();
  MaskStore store({.bytes = 3 * one + one / 2, .bytes_of_caller = 3 * one + one / 2}, clock_);
  auto first = Keep(store, Intervals(1), "ann"), second = Keep(store, Intervals(2), "ann");
  auto third = Keep(store, Intervals(3), "bob");
  EXPECT_TRUE(Knows(store, *first, "ann"));  // used last
  auto fourth = Keep(store, Intervals(4), "bob");
  EXPECT_FALSE(Knows(store, *second, "ann"));
  EXPECT_TRUE(Knows(store, *first, "ann"));
  EXPECT_TRUE(Knows(store, *third, "bob"));
  EXPECT_TRUE(Knows(store, *fourth, "bob"));
  EXPECT_LE(store.stats().bytes, 3 * one + one / 2);
}

TEST_F(MaskStoreTest, ACallersQuotaTouchesNobodyElse) {
  const int64_t one =
      Keep(*std::make_unique<MaskStore>(MaskStoreLimits{}, clock_), Intervals(0), "ann")->bytes();
  MaskStore store({.bytes = 100 * one, .bytes_of_caller = 2 * one + one / 2}, clock_);
  auto shared = Keep(store, Intervals(100), "bob");
  Keep(store, Intervals(100), "ann");
  for (uint32_t n = 0; n < 4; ++n) Keep(store, Intervals(n), "ann");
  EXPECT_FALSE(Knows(store, *shared, "ann"));
  EXPECT_TRUE(Knows(store, *shared, "bob"));
  EXPECT_EQ(store.stats().masks, 3);
}

TEST_F(MaskStoreTest, MasksThatNobodyUsesAreForgotten) {
  MaskStore store({.idle = absl::Minutes(10)}, clock_);
  auto used = Keep(store, Window(1), "ann"), idle = Keep(store, Window(2), "ann");
  clock_.Advance(absl::Minutes(6));
  EXPECT_TRUE(Knows(store, *used, "ann"));
  clock_.Advance(absl::Minutes(6));
  EXPECT_TRUE(Knows(store, *used, "ann"));
  EXPECT_FALSE(Knows(store, *idle, "ann"));
  EXPECT_EQ(store.stats().masks, 1);
}

TEST_F(MaskStoreTest, AMaskAboveTheQuotaServesItsCallOnly) {
  MaskStore store({.bytes = 1000, .bytes_of_caller = 100}, clock_);
  auto mask = Keep(store, Intervals(0), "ann");
  ASSERT_NE(mask, nullptr);
  EXPECT_FALSE(Knows(store, *mask, "ann"));
  EXPECT_EQ(store.stats().bytes, 0);
}

TEST_F(MaskStoreTest, AWrongMaskIsRefusedAndNotKept) {
  MaskStore store({}, clock_);
  EXPECT_EQ(store.Keep(Window(-2), kCall, "ann").status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(store.stats().masks, 0);
}

}  // namespace
}  // namespace attnd
