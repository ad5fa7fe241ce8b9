#include "client/channels/connections.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
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

// Whose number does not count.
TEST(Connections, AreTakenByTheirOutstandingBytes) {
  FakeClock clock;
  auto connections = Create({"127.0.0.1:8", "127.0.0.1:9"}, clock, nullptr);
  std::vector<std::shared_ptr<Connection>> of_first;
  constexpr int64_t kLarge = int64_t{8} << 20;
  for (int n = 0; n < 2; ++n) of_first.push_back(connections->Acquire(kLarge, {false, true}));
  EXPECT_NE(of_first[0], of_first[1]);
  for (int n = 0; n < 10; ++n) {
    EXPECT_EQ(connections->Acquire(kLarge / 20, {})->address_index(), 1) << n;
  }
  connections->Release(*of_first[1], kLarge);
  EXPECT_EQ(connections->Acquire(kLarge / 20, {}), of_first[1]);
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
  picked.clear();
  for (int n = 0; n < 20; ++n) picked.insert(connections->Acquire(10, tried)->address_index());
  EXPECT_EQ(picked, std::set<int>({1, 2})) << "what it had stays";
  now = {"ipv4:127.0.0.1:3", "ipv4:127.0.0.1:2"};  // another comes in its place
  connections->LookUpNames();
  EXPECT_EQ(connections->address_count(), 3);
  EXPECT_EQ(connections->target(0), "ipv4:127.0.0.1:3");
  EXPECT_EQ(connections->Acquire(10, tried)->address_index(), 0);
}

TEST(Connections, AreToALimitedNumberOfAddresses) {
  FakeClock clock;
  Names now = {"ipv4:127.0.0.1:1"};
  auto connections = Create({"dns:///name:7"}, clock, [&](const ReplicaName&) { return now; });
  for (int port = 2; port <= 300; ++port) now.push_back("ipv4:127.0.0.1:" + std::to_string(port));
  connections->LookUpNames();
  EXPECT_EQ(connections->address_count(), 256);
}

TEST(Connections, LeaveAnAddressAloneForLongerEachTimeThatItIsAway) {
  FakeClock clock;
  auto connections = Create({"127.0.0.1:8", "127.0.0.1:9"}, clock, nullptr);
  // The other one is busy, so that this one is taken unless it is left alone.
  for (int n = 0; n < 10; ++n) connections->Acquire(int64_t{1} << 30, {true, false});
  auto first_is_taken = [&] {
    auto connection = connections->Acquire(10, {});
    connections->Release(*connection, 10);
    return connection->address_index() == 0;
  };
  const absl::Duration tick = absl::Milliseconds(1);
  for (int round = 0; round < 2; ++round) {
    EXPECT_TRUE(first_is_taken());
    for (int milliseconds : {100, 200, 400, 800, 1600, 3200, 5000, 5000}) {
      EXPECT_TRUE(connections->ReportUnavailable(0, clock.Now()));
      clock.Advance(absl::Milliseconds(milliseconds) - tick);
      EXPECT_FALSE(first_is_taken()) << milliseconds;
      clock.Advance(tick);
      EXPECT_TRUE(first_is_taken()) << milliseconds;
    }
    connections->ReportUnavailable(0, clock.Now());
    connections->ReportAlive(0);
  }
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

// What a client offers to a server that listens on this host, of which it is told `host`: the bytes
// that may be under way on a connection. (RFC 9113: the preface, SETTINGS, WINDOW_UPDATE, PING)
int64_t WindowOffered(const std::string& host) {
  constexpr absl::Duration kStep = absl::Milliseconds(20);
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(at);
  CHECK(bind(listener, reinterpret_cast<sockaddr*>(&at), size) == 0);
  CHECK(listen(listener, 1) == 0);
  CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&at), &size) == 0);
  RealClock clock;
  auto connections = Create({absl::StrCat(host, ":", ntohs(at.sin_port))}, clock, LookUpReplicas);
  std::atomic<bool> done{false};
  std::thread driver([&] {
    auto channel = connections->Of(0)->channel();
    while (!done) {
      channel->WaitForStateChange(channel->GetState(true), absl::ToChronoTime(absl::Now() + kStep));
    }
  });
  const int peer = accept(listener, nullptr, nullptr);
  auto send_all = [&](const std::string& bytes) {
    CHECK(send(peer, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  };
  const std::string settings("\0\0\0\4\0\0\0\0\0", 9);
  const std::string ping("\0\0\x8\6\0\0\0\0\0........", 9 + 8);
  send_all(settings + ping);
  std::string got(24, 0);
  auto take = [&](size_t bytes) {
    got.resize(bytes);
    CHECK(recv(peer, got.data(), bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes));
  };
  auto number = [&](size_t from, size_t bytes) {
    int64_t value = 0;
    for (size_t n = from; n < from + bytes; ++n) value = value << 8 | static_cast<uint8_t>(got[n]);
    return value;
  };
  take(24);  // preface
  int64_t window = 65535;
  for (int pongs = 0; pongs < 2;) {
    take(9);
    const int64_t type = number(3, 1);
    const bool connection = number(5, 4) == 0;
    take(static_cast<size_t>(number(0, 3)));
    if (type == 8 && connection) window += number(0, 4);
    if (type == 6 && ++pongs == 1) send_all(ping);  // behind what the settings have led to
  }
  done = true;
  driver.join();
  close(peer);
  close(listener);
  return window;
}

TEST(Connections, LetOtherHostsSendMegabytesAheadAndThisOneLittle) {
  EXPECT_EQ(WindowOffered("127.0.0.1"), 65535);
  EXPECT_GT(WindowOffered("0.0.0.0"), 4000000);  // which is this host, but another name
}

}  // namespace
}  // namespace attnd
