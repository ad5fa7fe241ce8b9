#include "client/channels/connections.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "client/types/error_detail.h"

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
  EXPECT_EQ(ReplicaNameOf("srv:_attnd._tcp.example.org")->host, "_attnd._tcp.example.org");
  EXPECT_EQ(ReplicaNameOf("srv:///_attnd._tcp.example.org")->host, "_attnd._tcp.example.org");
  EXPECT_EQ(ReplicaNameOf("file:///a/b")->host, "/a/b");
  EXPECT_EQ(ReplicaNameOf("dir:a")->host, "a");
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

// The number of outstanding calls does not count. At an address the connection with the fewest is
// taken.
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
  EXPECT_EQ(connections->Acquire(kLarge / 20, {})->address_index(), 1);
  EXPECT_EQ(connections->Acquire(kLarge / 20, {false, true}), of_first[1]);
}

// A slow server that others keep busy gets what it can finish as soon.
TEST(Connections, AreTakenByTheQueueThatTheirServerTellsOf) {
  FakeClock clock;
  auto connections = Create({"127.0.0.1:8", "127.0.0.1:9"}, clock, nullptr);
  constexpr int64_t kMegabyte = 1'000'000;
  connections->ReportMoved(0, 100 * kMegabyte, absl::Seconds(1));
  connections->ReportQueue(0, absl::Milliseconds(150));  // as long as 15 MB take
  connections->ReportQueue(1, absl::ZeroDuration());
  std::vector<std::shared_ptr<Connection>> taken;
  auto next = [&] {
    return taken.emplace_back(connections->Acquire(10 * kMegabyte, {}))->address_index();
  };
  for (int n = 0; n < 2; ++n) EXPECT_EQ(next(), 1) << n;
  EXPECT_EQ(next(), 0) << "20 MB are on their way to the other";
  for (const auto& connection : taken) connections->Release(*connection, 10 * kMegabyte);
  clock.Advance(absl::Milliseconds(150));  // it has been worked off
  EXPECT_NE(next(), next());
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

Names Ports(int first, int last) {
  Names names;
  for (int port = first; port <= last; ++port)
    names.push_back(absl::StrCat("ipv4:127.0.0.1:", port));
  return names;
}

std::set<std::string> TargetsOf(Connections& connections) {
  std::set<std::string> targets;
  for (int a : connections.usable_addresses()) targets.insert(connections.target(a));
  return targets;
}

TEST(Connections, LeaveAnAddressToItsModulesForAWhile) {
  FakeClock clock;
  Names now = Ports(1, 1);
  auto connections = Create({"dns:///name:7"}, clock, [&](const ReplicaName&) { return now; });
  connections->ReportModules(0, {});
  now = Ports(2, 2);  // another comes in its place
  connections->LookUpNames();
  ASSERT_EQ(connections->address_count(), 2);
  EXPECT_EQ(connections->target(0), "ipv4:127.0.0.1:1") << "its modules are to be found there";
  EXPECT_TRUE(connections->IsGone(0));
  EXPECT_EQ(TargetsOf(*connections), std::set<std::string>({"ipv4:127.0.0.1:2"}));
  clock.Advance(absl::Minutes(3));
  now = Ports(2, 3);
  connections->LookUpNames();
  EXPECT_EQ(connections->address_count(), 2);
  EXPECT_EQ(connections->target(0), "ipv4:127.0.0.1:3");
}

int SocketsOf(Connections& connections) {
  return connections.count() + connections.address_count();  // each has a spare one
}

// Rendezvous hashing: what a client keeps does not depend on who else joins.
TEST(Connections, AreToALimitedNumberOfAddressesThatStay) {
  FakeClock clock;
  Names now = Ports(1, 1);
  auto connections = Create({"dns:///name:7"}, clock, [&](const ReplicaName&) { return now; });
  now = Ports(1, 300);
  connections->LookUpNames();
  EXPECT_EQ(connections->address_count(), 16);
  EXPECT_LE(SocketsOf(*connections), 32);
  const std::set<std::string> kept = TargetsOf(*connections);
  EXPECT_EQ(kept.size(), 16u);
  now.erase(std::find(now.begin(), now.end(), *kept.begin()));  // one of them leaves
  now.push_back("ipv4:127.0.0.1:301");
  connections->LookUpNames();
  EXPECT_EQ(connections->address_count(), 16);
  std::set<std::string> after = TargetsOf(*connections);
  after.insert(kept.begin(), kept.end());
  EXPECT_EQ(after.size(), 17u) << "one has taken its place, the others stay";
}

TEST(Connections, AreToOtherAddressesForEachClient) {
  FakeClock clock;
  std::map<std::string, int> clients_of;
  for (int client = 0; client < 100; ++client) {
    auto connections = Create({"dns:///name:7"}, clock, [](auto&) { return Ports(1, 100); });
    for (const std::string& target : TargetsOf(*connections)) ++clients_of[target];
  }
  EXPECT_EQ(clients_of.size(), 100u);
  for (const auto& [target, count] : clients_of) EXPECT_LE(count, 40) << target;  // 16 expected
}

TEST(Connections, AreFewerForEachAddressWhereThereAreMany) {
  FakeClock clock;
  Names now = Ports(1, 1);
  auto many = Connections::Create({.addresses = {"dns:///name:7"}, .channels_per_address = 40},
                                  clock, [&](const ReplicaName&) { return now; });
  EXPECT_EQ((*many)->count(), 40) << "of one address, as many as are asked for";
  for (int last : {2, 5, 16}) {
    now = Ports(1, last);
    (*many)->LookUpNames();
    EXPECT_EQ((*many)->address_count(), last);
    EXPECT_LE(SocketsOf(**many), 32) << last;
    EXPECT_GE(SocketsOf(**many), 26) << last;
  }
  EXPECT_EQ((*Connections::Create({.addresses = Ports(1, 40)}, clock, nullptr))->address_count(),
            16);
}

// A herd of clients that starts together spreads.
TEST(Connections, BeginAtARandomAddress) {
  FakeClock clock;
  std::set<int> first;
  for (int client = 0; client < 64; ++client) {
    first.insert(Create(Ports(1, 3), clock, nullptr)->Acquire(10, {})->address_index());
  }
  EXPECT_EQ(first, std::set<int>({0, 1, 2}));
}

TEST(LookUpReplicas, ReadsFilesAndFolders) {
  const std::string folder = testing::TempDir() + "/addresses";
  std::filesystem::create_directories(folder);
  auto write = [&](const std::string& name, const std::string& text) {
    std::ofstream(folder + "/" + name) << text;
  };
  EXPECT_TRUE(LookUpReplicas(*ReplicaNameOf("dir:" + folder)).empty());
  write("b.addr", "node7:7071\n");
  write("a.addr", "10.0.0.1:7070");
  write("half.addr", "node8:");
  write(".being-written", "node9:7070");
  EXPECT_EQ(LookUpReplicas(*ReplicaNameOf("dir:" + folder)),
            Names({"10.0.0.1:7070", "node7:7071"}));
  write("list", "# comment\nunix:/run/attnd.sock\n\n  node1:1 \nnode1:1\nfile:/list\n");
  EXPECT_EQ(LookUpReplicas(*ReplicaNameOf("file:" + folder + "/list")),
            Names({"unix:/run/attnd.sock", "node1:1"}));
  EXPECT_TRUE(LookUpReplicas(*ReplicaNameOf("file:/no/such")).empty());
  std::filesystem::remove_all(folder);
}

TEST(LookUpReplicas, PassesOverWhatIsNoFileOfAddresses) {
  const std::string folder = testing::TempDir() + "/garbage";
  std::filesystem::create_directories(folder + "/folder");
  ASSERT_EQ(mkfifo((folder + "/pipe").c_str(), 0600), 0);  // reading it would never end
  std::filesystem::create_symlink("/no/such", folder + "/dangling");
  std::filesystem::create_symlink("/dev/zero", folder + "/device");
  auto write = [&](const std::string& name, const std::string& text) {
    std::ofstream(folder + "/" + name, std::ios::binary) << text;
  };
  std::mt19937 random(7);
  std::string noise;
  while (noise.size() < 100'000) noise += static_cast<char>(random());
  write("noise", noise);
  write("too_long", std::string(2 << 20, '\n') + "node9:7070");
  write("text",
        "level: 3\n{\"port\": 7070}\nno\x01"
        "de:7070\nnode:99999\nhttp://node:7070\n");
  write("good", "node7:7070\n\n");
  EXPECT_EQ(LookUpReplicas(*ReplicaNameOf("dir:" + folder)), Names({"node7:7070"}));
  EXPECT_TRUE(LookUpReplicas(*ReplicaNameOf("file:" + folder + "/pipe")).empty());
  std::filesystem::remove_all(folder);
}

// Jobs may write their addresses after their client has started.
TEST(Connections, FindAddressesThatAreWrittenLater) {
  FakeClock clock;
  Names now;
  auto connections = Create({"dir:/addresses"}, clock, [&](const ReplicaName& name) {
    EXPECT_EQ(name.host, "/addresses");
    return now;
  });
  EXPECT_EQ(connections->address_count(), 1);
  EXPECT_TRUE(TargetsOf(*connections).empty());
  const absl::Status nobody =
      connections->StatusOf(*connections->Of(0), absl::UnavailableError("DNS"), false);
  EXPECT_EQ(nobody.message(), "there is no folder /addresses on this host");
  EXPECT_EQ(DetailOf(nobody)->reason, "NO_ADDRESS");
  now = Ports(1, 2);
  connections->ReportUnavailable(connections->Acquire(10, {})->address_index(), clock.Now());
  EXPECT_EQ(TargetsOf(*connections), std::set<std::string>(now.begin(), now.end()));
}

TEST(Connections, CallACallUnavailableWhoseConnectionHasEnded) {
  FakeClock clock;
  auto connections = Create({"127.0.0.1:8"}, clock, nullptr);
  const auto status_of = [&](const absl::Status& status) {
    return connections->StatusOf(*connections->Of(0), status, false);
  };
  EXPECT_TRUE(absl::IsUnavailable(status_of(absl::UnknownError("Stream removed"))));
  EXPECT_TRUE(absl::IsUnknown(status_of(absl::UnknownError("something else"))));
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
  constexpr int64_t kLarge = int64_t{8} << 20, kSmall = Picker::kSmallCallBytes;
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

// Returns the window that a client offers to a server on this host, of which it is told `host`: the
// bytes that may be under way on a connection. (RFC 9113: the preface, SETTINGS, WINDOW_UPDATE,
// PING)
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
