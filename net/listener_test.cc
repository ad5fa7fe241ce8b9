#include "net/listener.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace attnd {
namespace {

std::unique_ptr<Listener> Opened(const std::string& address) {
  auto listener = Listener::Open(address, absl::Seconds(20));
  CHECK(listener.ok()) << listener.status().message();
  return *std::move(listener);
}

int Connected(int port) {
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  if (connect(socket, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0) return socket;
  close(socket);
  return -1;
}

// Waits for the peer's end, or for a byte of it.
bool EndsOrAnswers(int socket) {
  char byte;
  return recv(socket, &byte, 1, 0) <= 0;
}

TEST(Listener, HandsOverConnectionsThatSendAtOnce) {
  auto listener = Opened("127.0.0.1:0");
  std::atomic<int> no_delay = -1;
  listener->Start([&](int socket) {
    int value = 0;
    socklen_t size = sizeof(value);
    getsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &value, &size);
    no_delay = value;
    close(socket);
  });
  int socket = Connected(listener->port());
  ASSERT_GE(socket, 0);
  EXPECT_TRUE(EndsOrAnswers(socket));
  EXPECT_EQ(no_delay, 1);
  close(socket);
}

TEST(Listener, ClosesItsPortWhenStopped) {
  auto listener = Opened("localhost:0");
  int port = listener->port();
  listener->Start([](int socket) { close(socket); });
  int socket = Connected(port);
  EXPECT_GE(socket, 0);
  close(socket);
  listener->Stop();
  EXPECT_LT(Connected(port), 0);
}

TEST(Listener, RefusesAPortInUseAndANameWithoutAddress) {
  auto first = Opened("127.0.0.1:0");
  absl::Status status =
      Listener::Open(absl::StrCat("127.0.0.1:", first->port()), absl::Seconds(20)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(),
            absl::StrCat("cannot listen on 127.0.0.1:", first->port(), ": Address already in use"));
  EXPECT_FALSE(Listener::Open("no.such.host.invalid:0", absl::Seconds(20)).ok());
}

TEST(Listener, GoesOnAfterItHasRunOutOfDescriptors) {
  auto listener = Opened("127.0.0.1:0");
  std::atomic<int> taken = 0;
  listener->Start([&](int socket) {
    ++taken;
    close(socket);
  });
  int first = Connected(listener->port()), waiting = -1;
  EXPECT_TRUE(EndsOrAnswers(first));
  // Accepting takes a descriptor for a moment, also where nobody waits.
  poll(nullptr, 0, 100);
  // Every descriptor but that of one more socket of ours.
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  int highest = dup(first);
  close(highest);
  rlimit few = before;
  few.rlim_cur = static_cast<rlim_t>(highest) + 1;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  waiting = Connected(listener->port());  // the kernel accepts it, the listener cannot
  EXPECT_GE(waiting, 0);
  pollfd answer{waiting, POLLIN, 0};
  EXPECT_EQ(poll(&answer, 1, 50), 0);
  EXPECT_EQ(taken, 1);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(EndsOrAnswers(waiting));
  EXPECT_EQ(taken, 2);
  close(first);
  close(waiting);
}

}  // namespace
}  // namespace attnd
