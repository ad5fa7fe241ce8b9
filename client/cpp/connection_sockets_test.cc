#include "client/cpp/connection_sockets.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "base/congestion_control.h"

namespace attnd {
namespace {

std::string CongestionControlOf(int socket) {
  char name[16] = {};
  socklen_t size = sizeof(name);
  getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &size);
  return name;
}

TEST(ConnectionSockets, ChooseTheCongestionControlOfLoopbackOnlyThere) {
  int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  std::string systems = CongestionControlOf(socket);
  ConnectionSockets elsewhere(false), here(true);
  EXPECT_TRUE(elsewhere.OnOpen(socket));
  EXPECT_EQ(CongestionControlOf(socket), systems);
  EXPECT_TRUE(here.OnOpen(socket));
  EXPECT_EQ(CongestionControlOf(socket), kLoopbackCongestion);
  close(socket);
}

TEST(ConnectionSockets, RefuseSocketsThatComeAfterTheEnd) {
  ConnectionSockets sockets(true);
  sockets.Shutdown();
  int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_FALSE(sockets.OnOpen(socket));
  close(socket);
}

}  // namespace
}  // namespace attnd
