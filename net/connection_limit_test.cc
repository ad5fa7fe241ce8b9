#include "net/connection_limit.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "base/check.h"

namespace attnd {
namespace {

// Two connected sockets.
class ConnectedPair {
 public:
  ConnectedPair() { CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends_) == 0); }
  ~ConnectedPair() {
    CloseOurs();
    close(ends_[1]);
  }
  int ours() const { return ends_[0]; }
  void CloseOurs() {
    if (ends_[0] >= 0) close(std::exchange(ends_[0], -1));
  }

 private:
  int ends_[2];
};

TEST(ConnectionLimit, RefusesTheOneAboveTheLimit) {
  FakeClock clock;
  ConnectionLimit limit(2, clock);
  ConnectedPair a, b, c;
  EXPECT_TRUE(limit.Take(a.ours()));
  EXPECT_TRUE(limit.Take(b.ours()));
  EXPECT_FALSE(limit.Take(c.ours()));
  EXPECT_EQ(limit.open().all(), 2);
  EXPECT_EQ(limit.refused(), 1);
}

TEST(ConnectionLimit, TakesAnotherWhenOneWasClosed) {
  FakeClock clock;
  ConnectionLimit limit(2, clock);
  ConnectedPair a, b;
  EXPECT_TRUE(limit.Take(a.ours()));
  EXPECT_TRUE(limit.Take(b.ours()));
  a.CloseOurs();
  ConnectedPair c;  // takes the descriptor that a had
  EXPECT_TRUE(limit.Take(c.ours()));
  EXPECT_EQ(limit.open().all(), 2);
  ConnectedPair d;
  clock.Advance(absl::Seconds(1));
  EXPECT_FALSE(limit.Take(d.ours()));
  EXPECT_EQ(limit.refused(), 1);
}

TEST(ConnectionLimit, TellsTcpFromUnixSockets) {
  FakeClock clock;
  ConnectionLimit limit(3, clock);
  ConnectedPair a, b;
  const int tcp = socket(AF_INET, SOCK_STREAM, 0);
  for (int socket : {a.ours(), tcp, b.ours()}) EXPECT_TRUE(limit.Take(socket));
  EXPECT_EQ(limit.open().unix_sockets, 2);
  EXPECT_EQ(limit.open().tcp, 1);
  close(tcp);
  EXPECT_EQ(limit.open().tcp, 0);
}

TEST(ConnectionsThatFit, LeaveDescriptorsForTheRest) {
  EXPECT_EQ(ConnectionsThatFit(1), 1);
  EXPECT_LT(ConnectionsThatFit(1 << 30), 1 << 30);
}

}  // namespace
}  // namespace attnd
