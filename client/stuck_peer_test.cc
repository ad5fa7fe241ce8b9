// A peer that stops reading in the middle of a request: gRPC then holds slices of the caller's
// array in the connection's write buffer, and the call must not return while they are held. TCP
// gives the connection up after Connections::kWriteTimeout.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "client/attention_client.h"
#include "client/channels/connections.h"
#include "net/file_descriptor.h"

namespace attnd {
namespace {

FileDescriptor ListenOnPort(std::string& address) {
  FileDescriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(at);
  CHECK(bind(listener.get(), reinterpret_cast<sockaddr*>(&at), size) == 0);
  CHECK(listen(listener.get(), 16) == 0);
  CHECK(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &size) == 0);
  address = absl::StrCat("127.0.0.1:", ntohs(at.sin_port));
  return listener;
}

// Accepts connections, grants HTTP/2 windows of 1 GiB, and never reads.
class StuckPeer {
 public:
  explicit StuckPeer(FileDescriptor listener)
      : listener_(std::move(listener)), thread_([this] { Serve(); }) {}
  ~StuckPeer() {
    shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
  }
  int connections() const { return count_; }

 private:
  void Serve() {
    // SETTINGS with INITIAL_WINDOW_SIZE 2^30, an ACK of theirs, WINDOW_UPDATE of stream 0 by 2^30.
    static constexpr char kFrames[] =
        "\0\0\6\4\0\0\0\0\0\0\4\x40\0\0\0"
        "\0\0\0\4\1\0\0\0\0"
        "\0\0\4\10\0\0\0\0\0\x40\0\0\0";
    while (true) {
      FileDescriptor connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (connection.get() < 0) return;
      EXPECT_EQ(write(connection.get(), kFrames, sizeof(kFrames) - 1),
                static_cast<ssize_t>(sizeof(kFrames) - 1));
      connections_.push_back(std::move(connection));
      ++count_;
    }
  }

  const FileDescriptor listener_;
  std::vector<FileDescriptor> connections_;  // the thread's
  std::atomic<int> count_{0};
  std::thread thread_;
};

std::unique_ptr<AttentionClient> Connect(const std::string& address) {
  auto client = AttentionClient::Connect({.addresses = {address}, .channels_per_address = 2});
  CHECK(client.ok()) << client.status();
  return *std::move(client);
}

// Below 1 MiB a call does not ask for the server's limit first; sixteen of them fill the sockets'
// buffers.
Problem HalfAMebibyte() { return PlainProblem(1, 1, 640, 128); }

// Its arrays are freed at the end: ASan would see a later read.
absl::Status CallForHalfASecond(AttentionClient& client) {
  const Problem p = HalfAMebibyte();
  std::vector<float> q(p.QueryElements()), k(p.KeyElements()), v(p.ValueElements()),
      o(p.OutputElements());
  return client
      .Forward(p, {.q = q.data(), .k = k.data(), .v = v.data()}, {.o = o.data()},
               {.timeout = absl::Milliseconds(500)})
      .status();
}

// Sixteen calls at once; gives how long the longest took.
absl::Duration CallSixteenTimes(AttentionClient& client) {
  const absl::Time begin = absl::Now();
  std::vector<std::thread> callers;
  for (int n = 0; n < 16; ++n) {
    callers.emplace_back([&client] {
      const absl::Status status = CallForHalfASecond(client);
      // UNAVAILABLE where another caller, a moment earlier, has given the connection up.
      EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status)) << status;
    });
  }
  for (std::thread& caller : callers) caller.join();
  return absl::Now() - begin;
}

TEST(StuckPeer, HoldsTheArraysOfACallOverTcpForTheWriteTimeoutAtMost) {
  std::string address;
  StuckPeer peer(ListenOnPort(address));
  auto client = Connect(address);
  const absl::Duration longest = CallSixteenTimes(*client);
  EXPECT_GT(longest, absl::Seconds(2));  // gRPC held some of them
  EXPECT_LT(longest, Connections::kWriteTimeout + absl::Seconds(10));
  // Calls after these have connections of their own.
  const int before = peer.connections();
  EXPECT_FALSE(CallForHalfASecond(*client).ok());
  EXPECT_GT(peer.connections(), before);
}

}  // namespace
}  // namespace attnd
