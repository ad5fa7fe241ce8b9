#include "net/congestion_control.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

namespace attnd {
namespace {

std::string CongestionControlOf(int socket) {
  char name[16] = {};
  socklen_t size = sizeof(name);
  getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &size);
  return name;
}

// Two sockets, connected over loopback.
struct Pair {
  Pair() {
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(listener, generic, size), 0);
    EXPECT_EQ(listen(listener, 1), 0);
    EXPECT_EQ(getsockname(listener, generic, &size), 0);
    EXPECT_EQ(connect(near, generic, size), 0);
    far = accept(listener, nullptr, nullptr);
    close(listener);
  }
  ~Pair() {
    close(near);
    close(far);
  }
  int near = socket(AF_INET, SOCK_STREAM, 0), far = -1;
};

TEST(CongestionControl, IsTheOneThatWasSetBeforeOrAfterConnecting) {
  int fresh = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_TRUE(SetCongestionControl(fresh, kLoopbackCongestion));
  EXPECT_EQ(CongestionControlOf(fresh), kLoopbackCongestion);
  close(fresh);
  Pair pair;
  EXPECT_TRUE(SetCongestionControl(pair.far, kLoopbackCongestion));
  EXPECT_EQ(CongestionControlOf(pair.far), kLoopbackCongestion);
}

TEST(CongestionControl, StaysWhenTheKernelHasNoSuch) {
  Pair pair;
  std::string before = CongestionControlOf(pair.near);
  EXPECT_FALSE(SetCongestionControl(pair.near, "no_such"));
  EXPECT_EQ(CongestionControlOf(pair.near), before);
}

TEST(StaysOnThisHost, TellsConnectedLoopbackFromEverythingElse) {
  Pair pair;
  EXPECT_TRUE(StaysOnThisHost(pair.near));
  EXPECT_TRUE(StaysOnThisHost(pair.far));
  int local[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, local), 0);
  EXPECT_FALSE(StaysOnThisHost(local[0]));
  close(local[0]);
  close(local[1]);
  int fresh = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_FALSE(StaysOnThisHost(fresh));
  close(fresh);
}

}  // namespace
}  // namespace attnd
