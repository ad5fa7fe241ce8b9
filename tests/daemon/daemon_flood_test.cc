// A crowd floods a daemon, hostile or merely large: ten thousand idle connections, a thousand slow
// streams, messages and headers that never end, streams that are reset as they begin. Memory stays
// bounded, and others are served.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference_backend.h"
#include "tests/daemon/daemon_health.h"
#include "tests/daemon/streamed_request.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/raw_http2.h"
#include "tests/fixtures/unique_name.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

// As many descriptors as this process may have; how many sockets that allows beside a server's.
int SocketsToOpen(int wanted) {
  rlimit files{};
  CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
  files.rlim_cur = files.rlim_max;
  CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
  return static_cast<int>(std::min<rlim_t>(static_cast<rlim_t>(wanted), files.rlim_max / 2));
}

// Connections with `streams` calls begun on each.
std::vector<std::unique_ptr<RawHttp2>> StreamsOn(Daemon& daemon, int connections, int streams) {
  std::vector<std::unique_ptr<RawHttp2>> crowd;
  for (int n = 0; n < connections; ++n) {
    crowd.push_back(std::make_unique<RawHttp2>(daemon.address()));
    crowd.back()->Greet();
    while (!crowd.back()->acknowledged()) crowd.back()->Read(100);
    for (int s = 0; s < streams; ++s) {
      crowd.back()->StartCall(static_cast<uint32_t>(2 * s + 1),
                              "/attnd.v1.Attention/ForwardStream");
    }
  }
  return crowd;
}

// A message of a stream whose header is valid, of a call of 24 KiB.
std::string HeaderMessage() { return Framed(HeaderOf(MakeForward(SmallProblem(128, 2), 1))); }

TEST(DaemonFlood, HoldsIdleConnectionsToItsLimitAndTakesNewOnesWhenTheyGo) {
  ServerOptions options = TestOptions();
  options.transport.max_connections = 300;
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  ExpectHealthy(daemon);  // its connection stands before the crowd comes
  std::vector<std::unique_ptr<RawHttp2>> crowd;
  for (int n = SocketsToOpen(10000); n > 0; --n) {
    crowd.push_back(std::make_unique<RawHttp2>(daemon.address()));
    crowd.back()->Greet();
  }
  // All but 299 are closed by the daemon.
  for (size_t left = crowd.size(); left > 299;) {
    left = 0;
    for (auto& connection : crowd) {
      connection->ReadWhatIsThere();
      if (!connection->ended()) ++left;
    }
    ASSERT_GE(left, 299u);
  }
  EXPECT_EQ(daemon.server().connections(), 300);
  ExpectHealthy(daemon);
  EXPECT_EQ(CallSmall(*daemon.NewStub()).error_code(), grpc::StatusCode::UNAVAILABLE);
  crowd.clear();
  while (daemon.server().connections() > 1) std::this_thread::yield();
  grpc::Status status = CallSmall(*daemon.NewStub());
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST(DaemonFlood, HoldsConnectionsOfAUnixSocketToTheSameLimit) {
  const std::string path = UniqueName("/tmp/attnd_flood_");
  ServerOptions options = TestOptions();
  options.listen = {absl::StrCat("unix:", path)};
  options.transport.max_connections = 3;
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  absl::SNPrintF(to.sun_path, sizeof(to.sun_path), "%s", path);
  std::vector<int> sockets;
  int welcome = 0, refused = 0;
  for (int n = 0; n < 10; ++n) {
    sockets.push_back(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(sockets.back(), reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
    char byte;  // of HTTP/2's settings, or the end
    recv(sockets.back(), &byte, 1, 0) == 1 ? ++welcome : ++refused;
  }
  EXPECT_EQ(welcome, 3);
  EXPECT_EQ(refused, 7);
  for (int one : sockets) close(one);
  while (daemon.server().connections() > 0) std::this_thread::yield();
  ExpectHealthy(daemon);
}

TEST(DaemonFlood, ClosesConnectionsThatNeverGreetOrStayIdle) {
  ServerOptions options = TestOptions();
  options.transport.handshake_timeout = absl::Milliseconds(300);
  options.transport.max_connection_idle = absl::Milliseconds(500);
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  RawHttp2 silent(daemon.address()), idle(daemon.address());
  idle.Greet();
  while (!silent.ended()) silent.Read(100);
  while (!idle.ended() && !idle.going_away()) idle.Read(100);
  ExpectHealthy(daemon);
}

// A thousand in all.
void SendSlowly(int connections, uint32_t streams) {
  ServerOptions options = TestOptions();
  options.admission.memory_bytes = options.admission.caller_max_bytes = int64_t{16} << 20;
  options.transport.transfers.idle = absl::Minutes(2);
  options.transport.transfers.min_bytes_per_second = 0;
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  ExpectHealthy(daemon);
  auto crowd = StreamsOn(daemon, connections, static_cast<int>(streams));
  const std::string header = HeaderMessage();
  for (auto& connection : crowd) {
    for (uint32_t s = 0; s < streams; ++s) {
      EXPECT_EQ(connection->SendData(2 * s + 1, header), header.size());
    }
  }
  // About 32 KiB each: half of them are let in, the others are told to come back.
  auto answered = [&] {
    int count = 0;
    for (auto& connection : crowd) {
      connection->ReadWhatIsThere();
      count += connection->answers();
    }
    return count;
  };
  while (answered() + daemon.server().use().calls < 1000) std::this_thread::yield();
  EXPECT_GT(answered(), 100);
  EXPECT_GT(daemon.server().use().calls, 100);
  // From here on a byte at a time, and nothing grows.
  const int64_t before = ResidentBytes();
  std::string chunk = RawHttp2::MessagePrefix(1000);
  for (size_t at = 0; at < 20; ++at) {
    for (auto& connection : crowd) {
      for (uint32_t s = 0; s < streams; ++s) {
        connection->SendData(2 * s + 1, at < chunk.size() ? chunk.substr(at, 1) : "x");
      }
    }
    EXPECT_LE(daemon.server().staging_used(), int64_t{16} << 20);
  }
  EXPECT_LT(ResidentBytes() - before, int64_t{64} << 20);
  crowd.clear();
  while (daemon.server().use().bytes != 0) std::this_thread::yield();
  ExpectHealthy(daemon);
}

TEST(DaemonFlood, KeepsStagingMemoryToItsQuotaUnder1000SlowStreams) { SendSlowly(20, 50); }

TEST(DaemonFlood, KeepsStagingMemoryToItsQuotaUnder1000SlowConnections) {
  ASSERT_EQ(SocketsToOpen(1000), 1000);
  SendSlowly(1000, 1);
}

// Messages that are announced as large and never end: gRPC holds what it has received of each, and
// beyond its quota ends streams to make room.
TEST(DaemonFlood, EndsMessagesThatNeverEndWhenTheyAreTooMany) {
  ServerOptions options = TestOptions();
  options.transport.receive_memory_bytes = int64_t{32} << 20;
  options.transport.transfers.idle = absl::Minutes(2);
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  ExpectHealthy(daemon);
  auto crowd = StreamsOn(daemon, 16, 60);
  const std::string prefix = RawHttp2::MessagePrefix(15 << 20), body(64 << 10, 'x');
  for (auto& connection : crowd) {
    while (!connection->acknowledged()) connection->Read(100);
    for (uint32_t s = 0; s < 60; ++s) {
      EXPECT_EQ(connection->SendData(2 * s + 1, prefix), prefix.size());
    }
  }
  int64_t sent = 0;
  auto resets = [&] {
    int count = 0;
    for (auto& connection : crowd) count += connection->resets();
    return count;
  };
  while (resets() == 0 && sent < int64_t{2} << 30) {
    for (auto& connection : crowd) {
      for (uint32_t s = 0; s < 60; ++s) {
        sent += static_cast<int64_t>(connection->SendData(2 * s + 1, body));
      }
      connection->Read(1);
    }
  }
  EXPECT_GT(resets(), 0) << "sent " << (sent >> 20) << " MiB";
  crowd.clear();
  ExpectHealthy(daemon);
}

// gRPC then wants to do something where a received slice goes, which is not a thread of its own.
TEST(DaemonFlood, OutlivesStreamedCallsWhileMemoryForReceivingIsShort) {
  ServerOptions options = TestOptions();
  options.transport.receive_memory_bytes = int64_t{32} << 20;
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  const v1::ForwardRequest request = MakeForward(SmallProblem(8192, 4), 1);
  const v1::ForwardStreamRequest header = HeaderOf(request),
                                 chunk = ForwardChunk(kQ, 0, request.q());
  std::atomic<bool> over{false};
  auto call = [&] {
    auto stub = daemon.NewStub();
    while (!over) {
      grpc::ClientContext context;
      auto stream = stub->ForwardStream(&context);
      if (stream->Write(header)) stream->Write(chunk);
      stream->WritesDone();
      stream->Finish();
    }
  };
  auto crowd = StreamsOn(daemon, 16, 60);
  const std::string prefix = RawHttp2::MessagePrefix(15 << 20), body(64 << 10, 'x');
  for (auto& connection : crowd) {
    for (uint32_t s = 0; s < 60; ++s) connection->SendData(2 * s + 1, prefix);
  }
  std::vector<std::thread> callers;
  for (int n = 0; n < 4; ++n) callers.emplace_back(call);
  int resets = 0;
  for (int round = 0; round < 1000 && resets < 16 * 55; ++round) {
    resets = 0;
    for (auto& connection : crowd) {
      for (uint32_t s = 0; s < 60; ++s) connection->SendData(2 * s + 1, body);
      resets += connection->resets();
    }
  }
  over = true;
  for (std::thread& caller : callers) caller.join();
  crowd.clear();
  ExpectHealthy(daemon);
}

TEST(DaemonFlood, AnswersOthersBesideFloodsOfHeaders) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  const std::string method = "/attnd.v1.Attention/Forward";
  const auto end = RawHttp2::kEndHeaders;
  RawHttp2 large(daemon.address()), many(daemon.address()), endless(daemon.address()),
      bad(daemon.address());
  for (RawHttp2* peer : {&large, &many, &endless, &bad}) {
    peer->Greet();
    // gRPC holds a peer to its limits once the peer has acknowledged them, and to 16 MiB before.
    while (!peer->acknowledged()) peer->Read(100);
  }
  // One header of 60 KiB, ten thousand of a few bytes, and a block that goes on for ever.
  const RawHttp2::Headers too_large = {{"x-large", std::string(15 << 10, 'a')},
                                       {"x-larger", std::string(15 << 10, 'b')}};
  std::string block = RawHttp2::CallHeaders(method, too_large);
  large.Send(RawHttp2::kHeaders, 0, 1, block.substr(0, 16000));
  large.Send(RawHttp2::kContinuation, end, 1, block.substr(16000));
  RawHttp2::Headers small(10000, {"x-s", "1"});
  block = RawHttp2::CallHeaders(method, small);
  many.Send(RawHttp2::kHeaders, 0, 1, block.substr(0, 16000));
  for (size_t at = 16000; at < block.size(); at += 16000) {
    many.Send(RawHttp2::kContinuation, at + 16000 >= block.size() ? end : 0, 1,
              block.substr(at, 16000));
  }
  const std::string more = RawHttp2::Encode(RawHttp2::Headers(1000, {"x-endless", "value"}));
  endless.Send(RawHttp2::kHeaders, 0, 1, RawHttp2::CallHeaders(method));
  const int64_t before = ResidentBytes();
  for (int n = 0; n < 2000 && !endless.ended(); ++n) {
    endless.Send(RawHttp2::kContinuation, 0, 1, more);
    endless.ReadWhatIsThere();
  }
  EXPECT_LT(ResidentBytes() - before, int64_t{32} << 20);
  bad.Send(RawHttp2::kHeaders, end, 1, std::string(1000, '\xff'));  // no HPACK at all
  ExpectHealthy(daemon);
  // Each is refused: its call ends, or its connection.
  for (RawHttp2* peer : {&large, &many, &bad}) {
    while (!peer->ended() && !peer->going_away() && peer->resets() + peer->answers() == 0) {
      peer->Send(RawHttp2::kPing, 0, 0, "12345678");
      peer->Read(100);
    }
  }
  ExpectHealthy(daemon);
}

TEST(DaemonFlood, AnswersOthersBesideStreamsThatAreResetAsTheyBegin) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  RawHttp2 peer(daemon.address());
  peer.Greet();
  const std::string block = RawHttp2::CallHeaders("/attnd.v1.Attention/ForwardStream");
  const std::string header = HeaderMessage();
  for (uint32_t n = 0; n < 20000 && !peer.ended(); ++n) {
    peer.Send(RawHttp2::kHeaders, RawHttp2::kEndHeaders, 2 * n + 1, block);
    if (n % 3 == 1) peer.SendData(2 * n + 1, header.substr(0, n % header.size()));
    if (n % 3 == 2) peer.SendData(2 * n + 1, header);
    peer.Send(RawHttp2::kResetStream, 0, 2 * n + 1, std::string("\0\0\0\x08", 4));
    if (n % 1000 == 0) ExpectHealthy(daemon);
  }
  while (daemon.server().use().bytes != 0) std::this_thread::yield();
  ExpectHealthy(daemon);
}

}  // namespace
}  // namespace attnd
