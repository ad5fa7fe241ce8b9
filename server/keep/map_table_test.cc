#include "server/keep/map_table.h"

#include <gtest/gtest.h>

#include "server/call/status_details.h"

namespace attnd {
namespace {

constexpr TokenIssuer kIssuer = {.replica = 1, .boot_epoch = 2};

KeptMap Map(int64_t rows, float value) {
  return {rows, rows, std::vector<float>(static_cast<size_t>(rows * rows), value)};
}

class MapTableTest : public testing::Test {
 protected:
  // Room for four maps of 16 × 16, two of one caller.
  MapTable Table() {
    return MapTable({.bytes = 4096, .bytes_of_caller = 2048, .idle = absl::Minutes(10)}, kIssuer,
                    clock_);
  }
  static std::string Outcome(MapTable& table, const std::string& token, const std::string& owner) {
    const auto map = table.Find(token, owner, "capture.previous");
    return map.ok() ? "found" : ReasonOf(map.status());
  }
  FakeClock clock_;
};

TEST_F(MapTableTest, FindsWhatItsOwnerKept) {
  MapTable table = Table();
  const std::string token = table.Keep(Map(16, 0.5f), "a");
  const auto map = table.Find(token, "a", "token");
  ASSERT_TRUE(map.ok());
  EXPECT_EQ((*map)->map, Map(16, 0.5f).map);
  EXPECT_EQ(table.stats().bytes, 1024);
  EXPECT_EQ(Outcome(table, token, "b"), "CAPTURE_LOST");
  EXPECT_EQ(Outcome(table, "no token", "a"), "BAD_FIELD");
  EXPECT_EQ(table.stats().lost, 2u);
}

TEST_F(MapTableTest, AnotherServersAndAnEarlierStartsMapsAreLost) {
  MapTable table = Table();
  for (const TokenIssuer& issuer : {TokenIssuer{9, 2}, TokenIssuer{1, 9}}) {
    MapTable other({}, issuer, clock_);
    EXPECT_EQ(Outcome(table, other.Keep(Map(4, 1), "a"), "a"), "CAPTURE_LOST");
  }
}

TEST_F(MapTableTest, ACallersOldestGoFirstThenEverybodys) {
  MapTable table = Table();
  const std::string first = table.Keep(Map(16, 1), "a"), second = table.Keep(Map(16, 2), "a");
  EXPECT_EQ(Outcome(table, first, "a"), "found");  // now the second is the longest unused
  const std::string third = table.Keep(Map(16, 3), "a");
  EXPECT_EQ(Outcome(table, second, "a"), "CAPTURE_LOST");
  EXPECT_EQ(Outcome(table, first, "a"), "found");
  table.Keep(Map(16, 4), "b");
  table.Keep(Map(16, 5), "b");
  EXPECT_EQ(Outcome(table, third, "a"), "found");
  table.Keep(Map(16, 6), "c");
  EXPECT_EQ(Outcome(table, first, "a"), "CAPTURE_LOST");
  EXPECT_EQ(table.stats().bytes, 4096);
}

TEST_F(MapTableTest, ForgetsWhatNobodyUses) {
  MapTable table = Table();
  const std::string token = table.Keep(Map(16, 1), "a");
  clock_.Advance(absl::Minutes(9));
  EXPECT_EQ(Outcome(table, token, "a"), "found");
  clock_.Advance(absl::Minutes(9));
  EXPECT_EQ(Outcome(table, token, "a"), "found");
  clock_.Advance(absl::Minutes(11));
  EXPECT_EQ(Outcome(table, token, "a"), "CAPTURE_LOST");
  EXPECT_EQ(table.stats().bytes, 0);
}

TEST_F(MapTableTest, Releases) {
  MapTable table = Table();
  const std::string token = table.Keep(Map(16, 1), "a");
  EXPECT_TRUE(table.Release(token, "b", "tokens[0]").ok());
  EXPECT_EQ(table.stats().maps, 1);
  EXPECT_TRUE(table.Release(token, "a", "tokens[0]").ok());
  EXPECT_TRUE(table.Release(token, "a", "tokens[0]").ok());
  EXPECT_EQ(table.stats().maps, 0);
  EXPECT_EQ(ReasonOf(table.Release("x", "a", "tokens[0]")), "BAD_FIELD");
}

TEST_F(MapTableTest, SaysWhatItCannotKeep) {
  MapTable table = Table();
  EXPECT_TRUE(table.MayKeep(2048).ok());
  EXPECT_TRUE(absl::IsOutOfRange(table.MayKeep(2049)));
  MapTable none({.bytes = 0}, kIssuer, clock_);
  EXPECT_TRUE(absl::IsOutOfRange(none.MayKeep(4)));
}

}  // namespace
}  // namespace attnd
