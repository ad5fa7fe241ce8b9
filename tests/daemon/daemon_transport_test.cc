// Tests what a peer sees of the transport's flags.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>

#include "kernels/reference_backend.h"
#include "tests/daemon/daemon_health.h"
#include "tests/daemon/streamed_request.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/raw_http2.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

constexpr char kMethod[] = "/attnd.v1.Attention/ForwardStream";

class DaemonTransport : public testing::Test {
 protected:
  void Start() {
    daemon_ = std::make_unique<Daemon>(std::make_unique<ReferenceBackend>(), options_);
  }
  std::unique_ptr<RawHttp2> Peer() const {
    auto peer = std::make_unique<RawHttp2>(daemon_->address());
    peer->Greet();
    while (!peer->acknowledged()) peer->Read(100);
    return peer;
  }
  // Admitted, and none of its payloads sent.
  void BeginCall(RawHttp2& peer, uint32_t stream) {
    const int64_t calls = daemon_->server().use().calls;
    peer.StartCall(stream, kMethod);
    peer.SendData(stream, Framed(HeaderOf(request_)));
    while (daemon_->server().use().calls == calls) std::this_thread::yield();
  }
  // And waits for the whole reply.
  void EndCall(RawHttp2& peer, uint32_t stream) {
    peer.SendData(stream, Framed(ForwardChunk(kK, 0, request_.k())) +
                              Framed(ForwardChunk(kV, 0, request_.v())) +
                              Framed(ForwardChunk(kQ, 0, request_.q())));
    peer.Send(RawHttp2::kData, RawHttp2::kEndStream, stream, "");
    while (peer.bytes_of(stream) < 1024 && !peer.ended()) peer.Read(100);
    EXPECT_GE(peer.bytes_of(stream), 1024);
  }

  ServerOptions options_ = TestOptions();
  TransportOptions& transport_ = options_.transport;
  const v1::ForwardRequest request_ = MakeForward(SmallProblem(), 1);  // 1024 bytes each
  std::unique_ptr<Daemon> daemon_;
};

TEST_F(DaemonTransport, TellsPeersItsLimits) {
  transport_.max_concurrent_streams = 7;
  transport_.stream_window_bytes = 128 << 10;
  transport_.max_frame_bytes = 48 << 10;
  transport_.max_metadata_bytes = 9 << 10;
  Start();
  auto settings = Peer()->settings();  // RFC 9113, section 6.5.2
  EXPECT_EQ(settings[3], 7);
  EXPECT_EQ(settings[4], 128 << 10);
  EXPECT_EQ(settings[5], 48 << 10);
  EXPECT_EQ(settings[6], 9 << 10);
}

TEST_F(DaemonTransport, TakesAsManyCallsOfAConnectionAtATimeAsItSaysAndNoMore) {
  transport_.max_concurrent_streams = 2;
  Start();
  auto peer = Peer(), greedy = Peer();
  BeginCall(*peer, 1);
  BeginCall(*peer, 3);
  EndCall(*peer, 1);
  BeginCall(*peer, 5);
  BeginCall(*greedy, 1);
  BeginCall(*greedy, 3);
  greedy->StartCall(5, kMethod);
  while (!greedy->ended()) greedy->Read(100);
  EndCall(*peer, 3);
  EndCall(*peer, 5);
  EXPECT_TRUE(CallSmall(*daemon_->NewStub()).ok());
}

TEST_F(DaemonTransport, ProbesAConnectionThatIsSilentInACallAndEndsItWithoutAnAnswer) {
  transport_.keepalive_time = absl::Milliseconds(100);
  transport_.keepalive_timeout = absl::Milliseconds(400);
  Start();
  auto alive = Peer(), dead = Peer(), without_call = Peer();
  dead->DoNotAnswerPings();
  for (RawHttp2* peer : {alive.get(), dead.get()}) BeginCall(*peer, 1);
  while (!dead->ended()) {
    dead->Read(10);
    alive->ReadWhatIsThere();
  }
  EXPECT_GT(dead->pings(), 0);
  EXPECT_GT(alive->pings(), 0);
  without_call->ReadWhatIsThere();
  EXPECT_EQ(without_call->pings(), 0);
  EndCall(*alive, 1);
}

// Without a call gRPC allows a probe every two hours, whatever the flag says.
TEST_F(DaemonTransport, EndsAConnectionThatProbesTooOften) {
  struct {
    absl::Duration interval;
    bool in_call, ends;
  } const cases[] = {{absl::Minutes(1), true, true},
                     {absl::ZeroDuration(), true, false},
                     {absl::ZeroDuration(), false, true}};
  for (const auto& one : cases) {
    SCOPED_TRACE(testing::Message() << one.interval << " " << one.in_call);
    transport_.min_ping_interval = one.interval;
    Start();
    auto peer = Peer();
    if (one.in_call) BeginCall(*peer, 1);
    for (int pings = 0; pings < 20 && !peer->going_away(); ++pings) {
      peer->Send(RawHttp2::kPing, 0, 0, "12345678");
      while (peer->pongs() == pings && !peer->going_away() && !peer->ended()) peer->Read(100);
    }
    EXPECT_EQ(peer->going_away(), one.ends);
    if (!one.ends) EndCall(*peer, 1);
    EXPECT_TRUE(CallSmall(*daemon_->NewStub()).ok());
  }
}

TEST_F(DaemonTransport, SendsNothingCompressed) {
  Start();
  auto peer = Peer();
  v1::ForwardRequest request = request_;
  request.set_v(std::string(request.v().size(), '\0'));  // and so is o
  const std::string message = request.SerializeAsString();
  peer->StartCall(1, "/attnd.v1.Attention/Forward", {{"grpc-accept-encoding", "gzip, deflate"}});
  peer->Send(RawHttp2::kData, RawHttp2::kEndStream, 1,
             RawHttp2::MessagePrefix(static_cast<uint32_t>(message.size())) + message);
  while (peer->answers() < 2 && !peer->ended()) peer->Read(100);
  EXPECT_GE(peer->bytes_of(1), 1024);
}

TEST_F(DaemonTransport, RenewsAnOldConnectionAndEndsItsCallsFirst) {
  transport_.max_connection_age = absl::Milliseconds(200);
  Start();
  auto peer = Peer();
  BeginCall(*peer, 1);
  while (!peer->going_away()) peer->Read(100);
  EXPECT_FALSE(peer->ended());
  EndCall(*peer, 1);
  while (!peer->ended()) peer->Read(100);
  EXPECT_TRUE(CallSmall(*daemon_->NewStub()).ok());
}

}  // namespace
}  // namespace attnd
