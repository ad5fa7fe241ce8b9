// A peer that stops reading in the middle of a request: gRPC then holds slices of the caller's
// array in the connection's write buffer, and the call must neither hang past its deadline nor
// return while they are held.
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
#include "client/cpp/attention_client.h"

namespace attnd {
namespace {

// Accepts connections, grants HTTP/2 windows of 1 GiB, and never reads.
class StuckPeer {
 public:
  StuckPeer() : listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listener_, 16), 0);
    socklen_t size = sizeof(address);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Serve(); });
  }
  ~StuckPeer() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
    for (int connection : connections_) close(connection);
  }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }
  int connections() const { return count_; }

 private:
  void Serve() {
    // SETTINGS with INITIAL_WINDOW_SIZE 2^30, an ACK of theirs, WINDOW_UPDATE of stream 0 by 2^30.
    static constexpr char kFrames[] =
        "\0\0\6\4\0\0\0\0\0\0\4\x40\0\0\0"
        "\0\0\0\4\1\0\0\0\0"
        "\0\0\4\10\0\0\0\0\0\x40\0\0\0";
    while (true) {
      int connection = accept(listener_, nullptr, nullptr);
      if (connection < 0) return;
      connections_.push_back(connection);
      ++count_;
      EXPECT_EQ(write(connection, kFrames, sizeof(kFrames) - 1),
                static_cast<ssize_t>(sizeof(kFrames) - 1));
    }
  }
  int listener_, port_;
  std::vector<int> connections_;
  std::atomic<int> count_{0};
  std::thread thread_;
};

TEST(AttentionClient, GivesTheArraysBackAfterTheDeadlineWhenThePeerStopsReading) {
  StuckPeer peer;
  absl::StatusOr<std::unique_ptr<AttentionClient>> client =
      AttentionClient::Connect({.addresses = {peer.address()}, .channels_per_address = 2});
  ASSERT_TRUE(client.ok()) << client.status();
  // Below 1 MiB a call does not ask for the server's limit first; sixteen of them fill the sockets'
  // buffers.
  Problem p;
  p.batch = p.q_heads = p.kv_heads = 1;
  p.q_len = p.kv_len = 640;
  p.qk_head_dim = p.v_head_dim = 128;
  std::vector<std::thread> callers;
  for (int n = 0; n < 16; ++n) {
    callers.emplace_back([&] {
      for (int call = 0; call < 2; ++call) {
        // Freed at the end of the loop: ASan would see a later read.
        std::vector<float> q(p.QueryElements()), k(p.KeyElements()), v(p.ValueElements()),
            o(p.OutputElements());
        absl::Status status = (*client)
                                  ->Forward(p, {.q = q.data(), .k = k.data(), .v = v.data()},
                                            {.o = o.data()}, {.timeout = absl::Milliseconds(400)})
                                  .status();
        // UNAVAILABLE where another caller, a moment earlier, has closed the connection.
        EXPECT_TRUE(absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status)) << status;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  // The stuck connections were given up, and the second call made new ones.
  EXPECT_GT(peer.connections(), 2);
}

}  // namespace
}  // namespace attnd
