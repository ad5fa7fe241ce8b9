#include "server/keep/kept_table.h"

#include <gtest/gtest.h>

#include <string>

namespace attnd {
namespace {

using Table = KeptTable<std::string, int>;
constexpr absl::Time kNow = absl::UnixEpoch();
constexpr absl::Duration kIdle = absl::Minutes(10);

// A table of two places, 100 and 50 bytes; an owner may have 60. Who is evicted stands in `gone`.
struct Kept {
  Table::Entry& Add(const std::string& key, const std::string& owner, int64_t bytes,
                    size_t place = 0, absl::Time now = kNow) {
    return table.Insert({.key = key,
                         .owner = owner,
                         .place = place,
                         .bytes = bytes,
                         .idle = kIdle,
                         .value = static_cast<int>(bytes)},
                        now);
  }
  bool MakeRoom(const std::string& owner, int64_t bytes, size_t place = 0) {
    return table.MakeRoom(owner, place, bytes, [this](const Table::ByUse& by_use) {
      for (Table::Entry* entry : by_use) {
        if (entry->key == spared) continue;
        gone += entry->key;
        table.Erase(*entry);
        return true;
      }
      return false;
    });
  }

  Table table{{100, 50}, 60};
  std::string spared, gone;
};

TEST(KeptTable, FindsWhatWasInsertedUntilItIsErased) {
  Kept kept;
  Table::Entry& entry = kept.Add("k", "ann", 7);
  EXPECT_EQ(kept.table.Find("k"), &entry);
  EXPECT_EQ(entry.value, 7);
  EXPECT_EQ(kept.table.Find("other"), nullptr);
  EXPECT_EQ(kept.table.bytes(0), 7);
  kept.table.Erase(entry);
  EXPECT_EQ(kept.table.Find("k"), nullptr);
  EXPECT_EQ(kept.table.bytes(0), 0);
  EXPECT_EQ(kept.table.size(), 0);
  EXPECT_EQ(kept.table.next_expiry(), absl::InfiniteFuture());
}

TEST(KeptTable, ExpiresAtTheEndOfTheIdleTimeTheEarliestFirst) {
  Kept kept;
  kept.Add("a", "ann", 1);
  kept.Add("b", "bob", 1, 0, kNow + absl::Minutes(1));
  EXPECT_EQ(kept.table.Expired(kNow + kIdle - absl::Nanoseconds(1)), nullptr);
  kept.table.Touch(*kept.table.Find("a"), kNow + absl::Minutes(2));
  EXPECT_EQ(kept.table.Expired(kNow + kIdle), nullptr);
  Table::Entry* expired = kept.table.Expired(kNow + absl::Minutes(12));
  ASSERT_NE(expired, nullptr);
  EXPECT_EQ(expired->key, "b");
  kept.table.Erase(*expired);
  EXPECT_EQ(kept.table.Expired(kNow + absl::Minutes(12)), kept.table.Find("a"));
}

TEST(KeptTable, ATouchedEntryIsTheLastToGoAndAProlongedOneIsNot) {
  Kept kept;
  kept.Add("a", "ann", 30);
  kept.Add("b", "bob", 30);
  kept.Add("c", "cid", 30);
  kept.table.Touch(*kept.table.Find("a"), kNow + absl::Minutes(1));
  kept.table.Prolong(*kept.table.Find("b"), kNow + absl::Minutes(2));
  EXPECT_EQ(kept.table.Find("b")->expires, kNow + absl::Minutes(12));
  EXPECT_EQ(kept.table.Find("b")->used, kNow);
  EXPECT_TRUE(kept.MakeRoom("dan", 60));
  EXPECT_EQ(kept.gone, "bc");
}

TEST(KeptTable, MakesRoomForTheLastByteOfAPlaceAndNotForOneMore) {
  Kept kept;
  kept.Add("a", "ann", 60);
  EXPECT_TRUE(kept.MakeRoom("bob", 40));
  EXPECT_EQ(kept.gone, "");
  EXPECT_TRUE(kept.MakeRoom("bob", 41));
  EXPECT_EQ(kept.gone, "a");
}

TEST(KeptTable, AnOwnerAtItsLimitLosesItsOwnInWhateverPlace) {
  Kept kept;
  kept.Add("other", "bob", 10);
  kept.Add("a", "ann", 30, 1);
  kept.Add("b", "ann", 30);
  EXPECT_TRUE(kept.MakeRoom("ann", 30));
  EXPECT_EQ(kept.gone, "a");
  EXPECT_EQ(kept.table.bytes(0), 40);
  EXPECT_EQ(kept.table.bytes(1), 0);
}

TEST(KeptTable, APlaceThatIsFullLosesItsOwnEntriesOnly) {
  Kept kept;
  kept.Add("elsewhere", "ann", 50);
  kept.Add("here", "bob", 50, 1);
  EXPECT_TRUE(kept.MakeRoom("cid", 50, 1));
  EXPECT_EQ(kept.gone, "here");
}

TEST(KeptTable, ErasesNothingForBytesThatNeverFit) {
  Kept kept;
  kept.Add("a", "ann", 50);
  EXPECT_FALSE(kept.MakeRoom("bob", 61));     // an owner's limit
  EXPECT_FALSE(kept.MakeRoom("bob", 51, 1));  // the place's
  kept.table.SetLimit(1, -1);
  EXPECT_FALSE(kept.MakeRoom("bob", 0, 1));
  EXPECT_EQ(kept.gone, "");
}

TEST(KeptTable, SaysSoWhereEvictionFindsNone) {
  Kept kept;
  kept.spared = "a";
  kept.Add("a", "ann", 50);
  kept.Add("b", "bob", 50);
  EXPECT_FALSE(kept.MakeRoom("ann", 20));
  EXPECT_EQ(kept.gone, "");
  EXPECT_FALSE(kept.MakeRoom("cid", 60));
  EXPECT_EQ(kept.gone, "b");
}

}  // namespace
}  // namespace attnd
