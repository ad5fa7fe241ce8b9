// Held connections over real sockets: what is read late, and that nothing is lost.
#include "base/held_peers.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "base/check.h"
#include "base/payload_receiver.h"

namespace attnd {
namespace {

constexpr WastedWork::Limits kLimits = {.frames_per_second = 200,
                                        .crumb_hold = absl::Milliseconds(300)};
constexpr int kLongMs = 20000;
const std::string kGreeting =
    std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string("\0\0\0\4\0\0\0\0\0", 9);
// Costs one, and nothing.
const std::string kPing("\0\0\x08\6\0\0\0\0\0pingpong", 17);

const std::string kPong("\0\0\x08\6\1\0\0\0\0pingpong", 17);

const std::string kCrumb("\0\0\1\0\0\0\0\0\1x", 10);
// After a crumb exactly enough to be read.
const std::string kEnough = std::string("\0\3\xed\0\0\0\0\0\1", 9) + std::string(1005, 'x');

std::string Pings(int count) {
  std::string pings;
  for (int n = 0; n < count; ++n) pings += kPing;
  return pings;
}

// Two ends of a TCP connection; ours is read as gRPC does, after edges.
struct Connection {
  int there = -1, here = -1;
  size_t sent = 0, got = 0;
  bool ended = false;
};

class HeldPeersTest : public testing::Test {
 protected:
  HeldPeersTest() { Listen(AF_INET); }
  ~HeldPeersTest() override {
    held_->Stop();
    for (Connection& c : connections_) {
      if (c.there >= 0) close(c.there);
      if (c.here >= 0) close(c.here);
    }
    close(epoll_);
    close(listener_);
  }

  // On any address.
  void Listen(sa_family_t family) {
    if (listener_ >= 0) close(listener_);
    listener_ = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in6 at{};  // its port and zeros stand where IPv4's do
    at.sin6_family = family;
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(at);
    CHECK(bind(listener_, reinterpret_cast<sockaddr*>(&at), size) == 0);
    CHECK(listen(listener_, 100) == 0);
  }
  // From an address of this host's network.
  size_t Connect(const char* from = "127.0.0.1") {
    sockaddr_in6 at{};
    socklen_t size = sizeof(at);
    CHECK(getsockname(listener_, reinterpret_cast<sockaddr*>(&at), &size) == 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = at.sin6_port;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    Connection c;
    c.there = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in own{};
    own.sin_family = AF_INET;
    CHECK(inet_pton(AF_INET, from, &own.sin_addr) == 1);
    CHECK(bind(c.there, reinterpret_cast<sockaddr*>(&own), sizeof(own)) == 0);
    CHECK(connect(c.there, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0);
    const int yes = 1;
    CHECK(setsockopt(c.there, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes)) == 0);
    c.here = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    CHECK(c.here >= 0);
    PayloadReceiver::Attach(c.here, Http2Follower::Peer::kClient, held_);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLET;
    event.data.u64 = connections_.size();
    CHECK(epoll_ctl(epoll_, EPOLL_CTL_ADD, c.here, &event) == 0);
    connections_.push_back(c);
    Send(connections_.size() - 1, kGreeting);
    return connections_.size() - 1;
  }
  // gRPC's for it.
  std::string PeerName(size_t n) const {
    sockaddr_in own{};
    socklen_t size = sizeof(own);
    CHECK(getsockname(connections_[n].there, reinterpret_cast<sockaddr*>(&own), &size) == 0);
    return "ipv4:127.0.0.1:" + std::to_string(ntohs(own.sin_port));
  }
  void Send(size_t n, const std::string& bytes) {
    Connection& c = connections_[n];
    CHECK(send(c.there, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(bytes.size()));
    c.sent += bytes.size();
  }

  static ssize_t Read(int socket) {
    static char bytes[65536];
    return Read(socket, bytes, sizeof(bytes));
  }
  static ssize_t Read(int socket, char* bytes, size_t size) {
    iovec piece = {bytes, size};
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    return ReceiveMessage(socket, &message, 0);
  }
  // What the kernel tells of, read until there is nothing; how many it told of.
  int Poll(int timeout_ms) {
    epoll_event events[100];
    const int count = epoll_wait(epoll_, events, 100, timeout_ms);
    for (int n = 0; n < count; ++n) {
      Connection& c = connections_[events[n].data.u64];
      ssize_t got = 0;
      while ((got = Read(c.here)) > 0) c.got += static_cast<size_t>(got);
      if (got == 0 || errno != EAGAIN) c.ended = true;
    }
    return count;
  }
  void End(size_t n) { close(std::exchange(connections_[n].there, -1)); }
  void Reset(size_t n) {
    const linger at_once = {.l_onoff = 1, .l_linger = 0};
    setsockopt(connections_[n].there, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    End(n);
  }
  void Flood(size_t n) {
    Send(n, Pings(2000));
    while (Poll(0) > 0) {
    }
    ASSERT_EQ(held_->now(), 1);
  }

  // Until it is held.
  void SendCrumbs(size_t n) {
    while (held_->now() == 0) {
      Send(n, kCrumb);
      ASSERT_GT(Poll(kLongMs), 0);
    }
  }

  std::shared_ptr<HeldPeers> held_ = std::make_shared<HeldPeers>(kLimits, nullptr);
  const int epoll_ = epoll_create1(EPOLL_CLOEXEC);
  int listener_ = -1;
  std::vector<Connection> connections_;
};

TEST_F(HeldPeersTest, TellsNobodyOfWhatAHeldPeerSendsUntilItIsLetGo) {
  const size_t flood = Connect();
  Flood(flood);
  const size_t before = connections_[flood].got;
  for (int n = 0; n < 100; ++n) Send(flood, kPing);
  EXPECT_EQ(Poll(0), 0);
  EXPECT_EQ(Read(connections_[flood].here), -1);
  EXPECT_EQ(errno, EAGAIN);
  EXPECT_EQ(connections_[flood].got, before);
  held_->Stop();
  EXPECT_EQ(held_->now(), 0);
  EXPECT_EQ(Poll(kLongMs), 1) << "of what came while it was held";
  EXPECT_EQ(connections_[flood].got, connections_[flood].sent);
}

// Of padded DATA the follower of messages loses its way.
TEST_F(HeldPeersTest, CountsWhatComesWhenMessagesAreNotFollowed) {
  const size_t flood = Connect();
  Send(flood, std::string("\0\0\2\0\x08\0\0\0\1\1\0", 11));
  Poll(kLongMs);
  Flood(flood);
}

// Straight to its place, past whoever counts.
TEST_F(HeldPeersTest, CountsWhatComesAfterAMessageThatHasItsPlace) {
  class Place final : public MessagePlacer {
   public:
    std::byte* PlaceOf(int64_t, absl::Span<const uint8_t>, int64_t bytes, int64_t came) override {
      memory.resize(static_cast<size_t>(bytes - came));
      return memory.data();
    }
    void OnPlaced(int64_t) override { ++placed; }
    std::vector<std::byte> memory;
    int placed = 0;
  } place;
  const size_t flood = Connect();
  const std::string first =
      std::string("\0\0\1\1\4\0\0\0\1h\0\0\x0a\0\0\0\0\0\1\0\0\0\0\5first", 29);
  Send(flood, first);
  std::string memory(kGreeting.size() + first.size(), 0);
  ASSERT_EQ(Read(connections_[flood].here, memory.data(), memory.size()), memory.size());
  auto placing = PlaceMessagesFrom(PeerName(flood), &memory.back() - 4, place);
  ASSERT_NE(placing, nullptr);
  // A message of 60000 bytes in one frame.
  Send(flood, std::string("\0\xea\x65\0\0\0\0\0\1\0\0\0\xea\x60", 14) + std::string(60000, 'm'));
  while (place.placed == 0) ASSERT_GT(Poll(kLongMs), 0);
  EXPECT_EQ(held_->now(), 0);
  Flood(flood);
}

TEST_F(HeldPeersTest, ReadsOthersMeanwhile) {
  const size_t flood = Connect(), other = Connect("127.0.0.2");
  Flood(flood);
  Send(other, kPing);
  EXPECT_EQ(Poll(kLongMs), 1);
  EXPECT_EQ(connections_[other].got, connections_[other].sent);
}

TEST_F(HeldPeersTest, HoldsTheNextConnectionOfAnAddressFromItsStart) {
  const size_t before = Connect(), flood = Connect();
  while (connections_[before].got == 0) Poll(kLongMs);
  Flood(flood);
  End(flood);
  const size_t next = Connect(), other = Connect("127.0.0.2");
  Send(next, kPing);
  Send(other, kPing);
  Send(before, kPong);
  while (Poll(0) > 0) {
  }
  EXPECT_EQ(connections_[next].got, 0u);
  EXPECT_EQ(connections_[other].got, connections_[other].sent);
  EXPECT_EQ(connections_[before].got, connections_[before].sent) << "wastes nothing";
  held_->Stop();
  while (connections_[next].got < connections_[next].sent) ASSERT_GT(Poll(kLongMs), 0);
}

TEST_F(HeldPeersTest, TellsIpv4PeersApartThatComeToAnIpv6Socket) {
  Listen(AF_INET6);
  const size_t flood = Connect();
  Flood(flood);
  const size_t next = Connect(), other = Connect("127.0.0.2");
  while (Poll(0) > 0) {
  }
  EXPECT_EQ(connections_[next].got, 0u);
  EXPECT_EQ(connections_[other].got, connections_[other].sent);
}

TEST_F(HeldPeersTest, HoldsNobodyWithoutALimit) {
  held_ = std::make_shared<HeldPeers>(WastedWork::Limits{.frames_per_second = 0}, nullptr);
  const size_t peer = Connect();
  for (int n = 0; n < 100; ++n) {
    Send(peer, kCrumb);
    ASSERT_GT(Poll(kLongMs), 0);
  }
  EXPECT_EQ(connections_[peer].got, connections_[peer].sent);
  EXPECT_EQ(held_->total(), 0);
}

// Nothing would tell of what is there when it is let go.
TEST_F(HeldPeersTest, HoldsNobodyOfAUnixSocket) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair), 0);
  PayloadReceiver::Attach(pair[0], Http2Follower::Peer::kClient, held_);
  const std::string pings = Pings(1000);
  for (const std::string& bytes : {kGreeting, pings, pings}) {
    ASSERT_EQ(send(pair[1], bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    EXPECT_EQ(Read(pair[0]), static_cast<ssize_t>(bytes.size()));
  }
  EXPECT_EQ(held_->total(), 0);
  for (int one : pair) close(one);
}

TEST_F(HeldPeersTest, SeesAtOnceThatAHeldConnectionHasEnded) {
  const size_t closed = Connect();
  Flood(closed);
  ASSERT_EQ(connections_[closed].got, connections_[closed].sent);
  End(closed);
  EXPECT_EQ(Poll(kLongMs), 1);
  EXPECT_TRUE(connections_[closed].ended);
}

TEST_F(HeldPeersTest, SeesAtOnceThatAHeldConnectionWasReset) {
  const size_t reset = Connect();
  Flood(reset);
  Reset(reset);
  EXPECT_EQ(Poll(kLongMs), 1);
  EXPECT_TRUE(connections_[reset].ended);
}

TEST_F(HeldPeersTest, TellsOfAnEndAfterTheBytesThatCameBeforeIt) {
  const size_t closed = Connect(), reset = Connect("127.0.0.2");
  Flood(closed);
  Send(reset, Pings(2000));
  Poll(kLongMs);
  ASSERT_EQ(held_->now(), 2);
  for (size_t n : {closed, reset}) Send(n, kPing);
  End(closed);
  Reset(reset);
  Poll(0);
  for (size_t n : {closed, reset}) EXPECT_FALSE(connections_[n].ended);
  held_->Stop();
  while (Poll(0) > 0) {
  }
  for (size_t n : {closed, reset}) {
    EXPECT_TRUE(connections_[n].ended);
    EXPECT_EQ(connections_[n].got, connections_[n].sent);
  }
}

TEST_F(HeldPeersTest, ReadsWhoIsHeldForCrumbsAtOnceWhenHeSendsMore) {
  WastedWork::Limits limits = kLimits;
  limits.crumb_hold = absl::Hours(1);
  held_ = std::make_shared<HeldPeers>(limits, nullptr);
  const size_t peer = Connect();
  for (int round = 0; round < 20; ++round) {
    SendCrumbs(peer);
    EXPECT_EQ(Poll(0), 0);
    Send(peer, kCrumb);
    EXPECT_EQ(Poll(0), 0) << "not enough";
    Send(peer, kEnough);
    EXPECT_EQ(Poll(0), 1);
    EXPECT_EQ(connections_[peer].got, connections_[peer].sent);
    EXPECT_EQ(held_->now(), 0);
    Send(peer, kPong);
    EXPECT_EQ(Poll(0), 1) << "and whatever comes then";
  }
  EXPECT_EQ(held_->total(), 20);
}

TEST_F(HeldPeersTest, ReadsWhoIsHeldForCrumbsNowAndThen) {
  const size_t peer = Connect();
  SendCrumbs(peer);
  for (int round = 0; round < 5; ++round) {
    Send(peer, kCrumb);
    EXPECT_EQ(Poll(kLongMs), 1);
    EXPECT_EQ(connections_[peer].got, connections_[peer].sent);
  }
}

// Longer than that, and whatever comes.
TEST_F(HeldPeersTest, HoldsWhoFloodsWhileHeldForCrumbs) {
  const size_t peer = Connect();
  SendCrumbs(peer);
  Flood(peer);
  const size_t before = connections_[peer].got;
  Send(peer, Pings(500));
  EXPECT_EQ(Poll(static_cast<int>(absl::ToInt64Milliseconds(2 * kLimits.crumb_hold))), 0);
  EXPECT_EQ(connections_[peer].got, before);
}

TEST_F(HeldPeersTest, ForgetsThatAConnectionWasHeldWhenItsNumberIsAnothers) {
  const size_t flood = Connect();
  Flood(flood);
  const int number = connections_[flood].here;
  End(flood);
  close(std::exchange(connections_[flood].here, -1));
  const size_t other = Connect("127.0.0.2");
  ASSERT_TRUE(connections_[other].here == number || connections_[other].there == number);
  while (connections_[other].got < connections_[other].sent) Poll(kLongMs);
  held_->Stop();
  Send(other, kPing);
  while (connections_[other].got < connections_[other].sent) Poll(kLongMs);
}

// Of one that nobody has told of, since it is no server's.
TEST_F(HeldPeersTest, LeavesAnotherSocketOfTheSameNumberAlone) {
  for (bool was_held : {false, true}) {
    SCOPED_TRACE(was_held);
    const size_t gone = Connect(), other = Connect("127.0.0.2");
    while (connections_[other].got < connections_[other].sent) Poll(kLongMs);
    if (was_held) Flood(gone);
    const int number = connections_[gone].here;
    ASSERT_EQ(dup2(connections_[other].here, number), number);
    Send(other, Pings(2000));
    EXPECT_GT(Read(number), 0);
    EXPECT_EQ(held_->total(), was_held ? 1 : 0);
    while (Read(number) > 0) {
    }
  }
}

TEST_F(HeldPeersTest, HoldsNobodyOnceItHasStopped) {
  held_->Stop();
  const size_t flood = Connect();
  Send(flood, Pings(1000));
  while (connections_[flood].got < connections_[flood].sent) Poll(kLongMs);
  EXPECT_EQ(held_->total(), 0);
}

// All are held again and again, in the middle of anything; by their own time they are let go.
TEST_F(HeldPeersTest, LosesNothingOfAnybody) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int n = 0; n < 12; ++n) Connect(n % 2 == 0 ? "127.0.0.1" : "127.0.0.2");
  for (int step = 0; step < 1000; ++step) {
    Send(random() % 6, Pings(static_cast<int>(random() % 20)));
    Send(6 + random() % 6, random() % 20 == 0 ? kEnough : kCrumb);
    Poll(0);
  }
  auto waits = [](const Connection& c) { return c.got < c.sent; };
  while (std::any_of(connections_.begin(), connections_.end(), waits)) {
    ASSERT_GT(Poll(kLongMs), 0) << "nothing tells of what is there";
  }
  EXPECT_GT(held_->total(), 0);
}

TEST(HeldPeers, LetsAnAddressPayWithTimeForWhatItTookTooMuch) {
  HeldPeers held(kLimits, nullptr);
  const absl::Time now = HeldPeers::Time();
  EXPECT_EQ(held.Take(1, 400, now), absl::ZeroDuration());
  EXPECT_EQ(held.Take(1, 100, now), absl::Seconds(1)) << "half a second, and 100 at 200 a second";
  EXPECT_EQ(held.Take(1, 0, now), absl::Seconds(1));
  EXPECT_EQ(held.Take(2, 400, now), absl::ZeroDuration()) << "another's";
  EXPECT_EQ(held.Take(1, 0, now + absl::Milliseconds(500)), absl::ZeroDuration());
  EXPECT_EQ(held.Take(1, 1e9, now + absl::Hours(1)), absl::Seconds(5));
  EXPECT_EQ(held.FirstHold(1, now + absl::Hours(1)), absl::Milliseconds(500)) << "or a neighbour";
  EXPECT_EQ(held.FirstHold(1, now + absl::Hours(2)), absl::ZeroDuration());
  EXPECT_EQ(held.FirstHold(3, now), absl::ZeroDuration());
  EXPECT_EQ(held.Take(1, 100, now + absl::Hours(2)), absl::ZeroDuration());
}

TEST(HeldPeers, RemembersALimitedNumberOfAddresses) {
  HeldPeers held(kLimits, nullptr);
  const absl::Time now = HeldPeers::Time();
  for (uint64_t address = 0; address < 3 * HeldPeers::kMostAddresses; ++address) {
    EXPECT_GT(held.Take(address, 500, now), absl::ZeroDuration());
  }
  EXPECT_EQ(held.addresses(), HeldPeers::kMostAddresses);
  EXPECT_EQ(held.Take(uint64_t{1} << 40, 1, now + absl::Hours(1)), absl::ZeroDuration());
  EXPECT_EQ(held.addresses(), 1u) << "the others have paid";
}

TEST(HeldPeers, ForgetsAHoldThatEndsBeforeItsTime) {
  HeldPeers held(kLimits, nullptr);
  std::vector<HeldPeers::Key> released;
  auto release = [&](HeldPeers::Key key) { released.push_back(key); };
  const absl::Time end = HeldPeers::Time() + absl::Hours(1);
  const auto first = held.Hold(5, absl::Hours(1), release);
  EXPECT_GE(first->first, end);
  EXPECT_LE(first->first, HeldPeers::Time() + absl::Hours(1) + HeldPeers::kTick);
  const auto second = held.Hold(5, absl::Hours(1), release);
  for (int n = 0; n < 2; ++n) {
    held.End(*first);
    EXPECT_EQ(held.now(), 1);
  }
  held.Stop();
  EXPECT_EQ(released, std::vector<HeldPeers::Key>({*second}));
  held.End(*second);
  EXPECT_EQ(held.now(), 0);
}

TEST(HeldPeers, LetsGoOfWhoIsDueFirst) {
  HeldPeers held(kLimits, nullptr);
  held.Hold(5, absl::Hours(1), [](HeldPeers::Key) {});
  for (int n = 0; n < 5; ++n) {
    absl::Notification released;
    held.Hold(6, absl::Milliseconds(1), [&](HeldPeers::Key) { released.Notify(); });
    released.WaitForNotification();
  }
}

TEST(HeldPeers, TellsItsListenerOnceASecond) {
  std::vector<int> told;
  HeldPeers held(kLimits, [&](int socket, absl::Duration, int64_t) { told.push_back(socket); });
  int released = 0;
  auto release = [&](HeldPeers::Key) { ++released; };
  for (int socket : {5, 6, 7}) EXPECT_TRUE(held.Hold(socket, absl::Hours(1), release));
  EXPECT_EQ(held.now(), 3);
  held.Stop();
  EXPECT_EQ(told, std::vector<int>({5}));
  EXPECT_EQ(released, 3);
  EXPECT_EQ(held.total(), 3);
  EXPECT_FALSE(held.Hold(8, absl::Hours(1), release));
}

}  // namespace
}  // namespace attnd
