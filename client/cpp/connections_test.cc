#include "client/cpp/connections.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/check.h"

namespace attnd {
namespace {

using Names = std::vector<std::string>;

std::unique_ptr<Connections> Create(Names addresses, const Clock& clock, ReplicaLookup lookup) {
  auto connections = Connections::Create({.addresses = addresses, .channels_per_address = 2}, clock,
                                         std::move(lookup));
  CHECK(connections.ok()) << connections.status().message();
  return *std::move(connections);
}

TEST(ReplicaName, IsWhatGrpcWouldLookUp) {
  EXPECT_EQ(ReplicaNameOf("dns:///attnd.pods:7070")->host, "attnd.pods");
  EXPECT_EQ(ReplicaNameOf("dns:///attnd.pods:7070")->port, "7070");
  EXPECT_EQ(ReplicaNameOf("dns:attnd:1")->host, "attnd");
  for (const char* other : {"attnd:7070", "127.0.0.1:1", "unix:/a", "dns://8.8.8.8/attnd:1",
                            "dns:///attnd", "ipv4:1.2.3.4:5"}) {
    EXPECT_FALSE(ReplicaNameOf(other).has_value()) << other;
  }
}

TEST(LookUpReplicas, GivesEachAddressOnceAndNoneForAnUnknownName) {
  Names found = LookUpReplicas({"127.0.0.1", "7"});
  EXPECT_EQ(found, Names{"ipv4:127.0.0.1:7"});
  EXPECT_TRUE(LookUpReplicas({"no.such.name.invalid", "7"}).empty());
}

TEST(Connections, TakeEachAddressOfANameForAReplica) {
  FakeClock clock;
  auto connections = Create({"dns:///name:7", "127.0.0.1:9"}, clock, [](const ReplicaName& name) {
    EXPECT_EQ(name.host, "name");
    return Names{"ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2"};
  });
  EXPECT_EQ(connections->address_count(), 3);
  EXPECT_EQ(connections->count(), 6);
  // By least outstanding bytes: each replica in turn.
  std::set<int> picked;
  for (int n = 0; n < 3; ++n) {
    picked.insert(connections->Acquire(10, {false, false, false})->address_index());
  }
  EXPECT_EQ(picked.size(), 3u);
}

TEST(Connections, LeaveANameThatCannotBeLookedUpToGrpc) {
  FakeClock clock;
  auto connections = Create({"dns:///name:7"}, clock, [](const ReplicaName&) { return Names{}; });
  EXPECT_EQ(connections->address_count(), 1);
  EXPECT_EQ(connections->target(0), "dns:///name:7");
}

TEST(Connections, LookANameUpAgainWhenOneOfItsAddressesIsAway) {
  FakeClock clock;
  Names now = {"ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2"};
  int lookups = 0;
  auto connections = Create({"dns:///name:7"}, clock, [&](const ReplicaName&) {
    ++lookups;
    return now;
  });
  std::shared_ptr<Connection> old = connections->Of(1);
  connections->ReportUnavailable(1, clock.Now());  // it is away, and the name still has it
  EXPECT_EQ(lookups, 2);
  EXPECT_EQ(connections->target(1), "ipv4:127.0.0.1:2");
  now = {"ipv4:127.0.0.1:3", "ipv4:127.0.0.1:1"};
  connections->ReportUnavailable(1, clock.Now());  // not again at once
  EXPECT_EQ(lookups, 2);
  clock.Advance(absl::Seconds(2));
  connections->ReportUnavailable(1, clock.Now());
  EXPECT_EQ(lookups, 3);
  EXPECT_EQ(connections->target(0), "ipv4:127.0.0.1:1");
  EXPECT_EQ(connections->target(1), "ipv4:127.0.0.1:3");
  EXPECT_NE(connections->Of(1), old);
}

TEST(Connections, FollowTheAddressesOfAName) {
  FakeClock clock;
  Names now = {"ipv4:127.0.0.1:1"};
  auto connections =
      Create({"dns:///name:7", "127.0.0.1:9"}, clock, [&](const ReplicaName&) { return now; });
  EXPECT_EQ(connections->address_count(), 2);
  now = {"ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2", "127.0.0.1:9"};  // one joins
  connections->LookUpNames();
  ASSERT_EQ(connections->address_count(), 3);
  EXPECT_EQ(connections->count(), 6);
  EXPECT_EQ(connections->target(2), "ipv4:127.0.0.1:2");
  std::set<int> picked;
  const std::vector<bool> tried(2, false);  // of a call that began before
  for (int n = 0; n < 3; ++n) picked.insert(connections->Acquire(10, tried)->address_index());
  EXPECT_EQ(picked.size(), 3u);
  now = {"ipv4:127.0.0.1:2"};  // one leaves: the others come first
  connections->LookUpNames();
  EXPECT_EQ(connections->address_count(), 3);
  for (int n = 0; n < 20; ++n) EXPECT_NE(connections->Acquire(10, tried)->address_index(), 0);
  now = {};  // the name server is away
  connections->LookUpNames();
  now = {"ipv4:127.0.0.1:3", "ipv4:127.0.0.1:2"};  // another comes in its place
  connections->LookUpNames();
  EXPECT_EQ(connections->address_count(), 3);
  EXPECT_EQ(connections->target(0), "ipv4:127.0.0.1:3");
  EXPECT_EQ(connections->Acquire(10, tried)->address_index(), 0);
}

TEST(Connections, KeepOneForSmallCallsWhileTheOthersAreBusy) {
  constexpr int64_t kLarge = int64_t{8} << 20, kSmall = Connections::kSmallCallBytes;
  FakeClock clock;
  auto connections = Create({"127.0.0.1:9"}, clock, nullptr);
  const int count = connections->count();
  EXPECT_EQ(connections->idle_count(), count);
  std::set<std::shared_ptr<Connection>> busy;
  for (int n = 0; n < count; ++n) busy.insert(connections->Acquire(kLarge, {}));
  EXPECT_EQ(busy.size(), count);
  EXPECT_EQ(connections->idle_count(), 0);
  std::shared_ptr<Connection> spare = connections->Acquire(kSmall, {});
  EXPECT_EQ(busy.count(spare), 0);
  EXPECT_EQ(connections->Acquire(kSmall, {}), spare);
  EXPECT_EQ(busy.count(connections->Acquire(kSmall + 1, {})), 1);
  connections->Replace(spare);
  spare = connections->Acquire(kSmall, {});
  EXPECT_EQ(busy.count(spare), 0);
  connections->Release(*spare, kSmall);
  for (const auto& connection : busy) connections->Release(*connection, kLarge);
  EXPECT_EQ(busy.count(connections->Acquire(kSmall, {})), 1);  // not while one of them is idle
}

TEST(Connections, CountOneFailureForAllCallsThatItEnded) {
  FakeClock clock;
  auto connections = Create({"127.0.0.1:9"}, clock, nullptr);
  absl::Time begun = clock.Now();
  clock.Advance(absl::Seconds(1));
  EXPECT_TRUE(connections->ReportUnavailable(0, begun));
  EXPECT_FALSE(connections->ReportUnavailable(0, begun));
  clock.Advance(absl::Seconds(1));
  EXPECT_TRUE(connections->ReportUnavailable(0, clock.Now()));
}

}  // namespace
}  // namespace attnd
