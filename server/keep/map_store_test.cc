#include "server/keep/map_store.h"

#include <gtest/gtest.h>

#include "server/call/status_details.h"

namespace attnd {
namespace {

constexpr TokenIssuer kIssuer = {.replica = 1, .boot_epoch = 2};

KeptMap Map(int64_t rows, float value) {
  return {rows, rows, std::vector<float>(static_cast<size_t>(rows * rows), value)};
}

class MapStoreTest : public testing::Test {
 protected:
  // Room for four maps of 16 × 16, two of one caller.
  MapStore Store() {
    return MapStore({.bytes = 4096, .bytes_of_caller = 2048, .idle = absl::Minutes(10)}, kIssuer,
                    clock_);
  }
  static std::string Outcome(MapStore& store, const std::string& token, const std::string& owner) {
    const auto map = store.Find(token, owner, "capture.previous");
    return map.ok() ? "found" : ReasonOf(map.status());
  }
  FakeClock clock_;
};

TEST_F(MapStoreTest, FindsWhatItsOwnerKept) {
  MapStore store = Store();
  const std::string token = store.Keep(Map(16, 0.5f), "a");
  const auto map = store.Find(token, "a", "token");
  ASSERT_TRUE(map.ok());
  EXPECT_EQ((*map)->map, Map(16, 0.5f).map);
  EXPECT_EQ(store.stats().bytes, 1024);
  EXPECT_EQ(Outcome(store, token, "b"), "CAPTURE_LOST");
  EXPECT_EQ(Outcome(store, "no token", "a"), "BAD_FIELD");
  EXPECT_EQ(store.stats().lost, 2u);
}

TEST_F(MapStoreTest, AnotherServersAndAnEarlierStartsMapsAreLost) {
  MapStore store = Store();
  for (const TokenIssuer& issuer : {TokenIssuer{9, 2}, TokenIssuer{1, 9}}) {
    MapStore other({}, issuer, clock_);
    EXPECT_EQ(Outcome(store, other.Keep(Map(4, 1), "a"), "a"), "CAPTURE_LOST");
  }
}

TEST_F(MapStoreTest, ACallersOldestGoFirstThenEverybodys) {
  MapStore store = Store();
  const std::string first = store.Keep(Map(16, 1), "a"), second = store.Keep(Map(16, 2), "a");
  EXPECT_EQ(Outcome(store, first, "a"), "found");  // now the second is the longest unused
  const std::string third = store.Keep(Map(16, 3), "a");
  EXPECT_EQ(Outcome(store, second, "a"), "CAPTURE_LOST");
  EXPECT_EQ(Outcome(store, first, "a"), "found");
  store.Keep(Map(16, 4), "b");
  store.Keep(Map(16, 5), "b");
  EXPECT_EQ(Outcome(store, third, "a"), "found");
  store.Keep(Map(16, 6), "c");
  EXPECT_EQ(Outcome(store, first, "a"), "CAPTURE_LOST");
  EXPECT_EQ(store.stats().bytes, 4096);
}

TEST_F(MapStoreTest, ForgetsWhatNobodyUses) {
  MapStore store = Store();
  const std::string token = store.Keep(Map(16, 1), "a");
  clock_.Advance(absl::Minutes(9));
  EXPECT_EQ(Outcome(store, token, "a"), "found");
  clock_.Advance(absl::Minutes(9));
  EXPECT_EQ(Outcome(store, token, "a"), "found");
  clock_.Advance(absl::Minutes(11));
  EXPECT_EQ(Outcome(store, token, "a"), "CAPTURE_LOST");
  EXPECT_EQ(store.stats().bytes, 0);
}

TEST_F(MapStoreTest, Releases) {
  MapStore store = Store();
  const std::string token = store.Keep(Map(16, 1), "a");
  EXPECT_TRUE(store.Release(token, "b", "tokens[0]").ok());
  EXPECT_EQ(store.stats().maps, 1);
  EXPECT_TRUE(store.Release(token, "a", "tokens[0]").ok());
  EXPECT_TRUE(store.Release(token, "a", "tokens[0]").ok());
  EXPECT_EQ(store.stats().maps, 0);
  EXPECT_EQ(ReasonOf(store.Release("x", "a", "tokens[0]")), "BAD_FIELD");
}

TEST_F(MapStoreTest, SaysWhatItCannotKeep) {
  MapStore store = Store();
  EXPECT_TRUE(store.MayKeep(2048).ok());
  EXPECT_TRUE(absl::IsOutOfRange(store.MayKeep(2049)));
  MapStore none({.bytes = 0}, kIssuer, clock_);
  EXPECT_TRUE(absl::IsOutOfRange(none.MayKeep(4)));
}

}  // namespace
}  // namespace attnd
