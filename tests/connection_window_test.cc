// What a peer may send on a connection of the daemon at once, seen from the wire.
#include "base/connection_window.h"

#include <gtest/gtest.h>

#include <string>

#include "kernels/cpu/cpu_backend.h"
#include "tests/daemon_fixture.h"
#include "tests/raw_http2.h"

namespace attnd {
namespace {

// Its answer to a ping comes after what it says by itself.
void GreetAndListen(RawHttp2& peer) {
  peer.Greet();
  peer.Send(RawHttp2::kPing, 0, 0, "12345678");
  while (peer.pongs() == 0 && !peer.ended()) peer.Read(1000);
}

int64_t WindowAtFirst(const ServerOptions& options) {
  Daemon daemon(MakeCpuBackend({}), options);
  RawHttp2 peer(daemon.address());
  GreetAndListen(peer);
  return peer.connection_window();
}

TEST(ConnectionWindow, HoldsASmallCallFromTheFirstByteOn) {
  EXPECT_EQ(WindowAtFirst(TestOptions()), kConnectionWindow);
}

TEST(ConnectionWindow, IsGrpcsWhenItProbes) {
  ServerOptions options = TestOptions();
  options.transport.bdp_probe = "on";
  EXPECT_GT(WindowAtFirst(options), 4 * kConnectionWindow);
}

// gRPC ends a connection whose peer sends more than it has announced.
TEST(ConnectionWindow, IsWhatGrpcTakes) {
  Daemon daemon(MakeCpuBackend({}));
  RawHttp2 peer(daemon.address());
  GreetAndListen(peer);
  peer.StartCall(1, "/attnd.v1.Attention/Forward");
  const std::string message =
      RawHttp2::MessagePrefix(1 << 20) + std::string(kConnectionWindow - 5, 'x');
  EXPECT_EQ(peer.SendData(1, message), message.size());
  while (peer.connection_window() == 0 && !peer.ended()) peer.Read(1000);
  EXPECT_FALSE(peer.ended());
  EXPECT_GT(peer.connection_window(), 0);  // it has read, and wants the rest
}

}  // namespace
}  // namespace attnd
