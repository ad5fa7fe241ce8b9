// A hostile or broken client sends on a connection: malformed bytes, compressed and endless
// messages, connections cut in the middle, readers that never read. Others go on.
#include <grpc/grpc.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "attention/random_problem.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference_backend.h"
#include "tests/daemon/daemon_health.h"
#include "tests/fixtures/daemon_counts.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/raw_http2.h"
#include "tests/fixtures/unique_name.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

// One unary call with raw bytes.
grpc::Status CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& message,
                     const std::string& method = "/attnd.v1.Attention/Forward",
                     grpc::ByteBuffer* reply = nullptr) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  grpc::Slice slice(message);
  grpc::ByteBuffer request(&slice, 1), own_reply;
  auto call = stub.PrepareUnaryCall(&context, method, request, &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(reply != nullptr ? reply : &own_reply, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  return status;
}

// A plain TCP connection to the daemon.
class Socket {
 public:
  explicit Socket(const Daemon& daemon) {
    int port = 0;
    CHECK(absl::SimpleAtoi(daemon.address().substr(daemon.address().rfind(':') + 1), &port));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    fd_ = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  }
  ~Socket() { close(fd_); }
  void Send(const std::string& bytes) {
    (void)!send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }

 private:
  int fd_;
};

TEST(DaemonWire, AnswersBytesThatAreNoMessageInEveryMethod) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  auto channel = daemon.NewChannel();
  for (const char* method : {"Forward", "Backward", "ForwardStream", "BackwardStream",
                             "GetServerInfo", "RenewResidual", "ReleaseResidual"}) {
    grpc::Status status =
        CallRaw(channel, "\xff\xff", absl::StrCat("/attnd.v1.Attention/", method));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method;
    EXPECT_EQ(ErrorInfoOf(status).reason(), "MALFORMED_MESSAGE") << method;
  }
  ExpectHealthy(daemon);
}

TEST(DaemonWire, AnswersRandomBytesWithAStatusOnOneConnection) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  auto channel = daemon.NewChannel();
  std::string valid = MakeForward(SmallProblem(4, 1), 1).SerializeAsString();
  Random random(11);
  for (int n = 0; n < 300; ++n) {
    std::string bytes = valid;
    for (int64_t flips = random.Between(1, 5); flips > 0; --flips) {
      bytes[static_cast<size_t>(random.Between(0, static_cast<int64_t>(bytes.size()) - 1))] =
          static_cast<char>(random.Bits());
    }
    bytes.resize(static_cast<size_t>(random.Between(0, static_cast<int64_t>(bytes.size()))));
    grpc::Status status = CallRaw(
        channel, bytes,
        random.Chance(0.5) ? "/attnd.v1.Attention/Forward" : "/attnd.v1.Attention/Backward");
    if (!status.ok()) {
      EXPECT_FALSE(ErrorInfoOf(status).reason().empty()) << status.error_message();
    }
    EXPECT_NE(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
  }
  EXPECT_EQ(channel->GetState(false), GRPC_CHANNEL_READY);
  ExpectHealthy(daemon);
}

TEST(DaemonWire, RepliesAreValidProtobufOfTheGeneratedMessage) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  grpc::ByteBuffer raw;
  ASSERT_TRUE(CallRaw(daemon.NewChannel(), MakeForward(SmallProblem(), 1).SerializeAsString(),
                      "/attnd.v1.Attention/Forward", &raw)
                  .ok());
  grpc::Slice flat;
  ASSERT_TRUE(raw.DumpToSingleSlice(&flat).ok());
  v1::ForwardResponse reply;
  ASSERT_TRUE(reply.ParseFromArray(flat.begin(), static_cast<int>(flat.size())));
  EXPECT_EQ(reply.o().size(), 1024u);
  EXPECT_EQ(reply.lse().size(), 128u);
}

TEST(DaemonWire, RefusesCompressedMessages) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  grpc::ClientContext context;
  context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  v1::ForwardRequest request = MakeForward(SmallProblem(1024), 1);
  request.set_q(std::string(request.q().size(), '\0'));  // so that gzip really shrinks it
  request.set_k(std::string(request.k().size(), '\0'));
  v1::ForwardResponse reply;
  EXPECT_EQ(daemon.stub().Forward(&context, request, &reply).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
  ExpectHealthy(daemon);
}

// A call that is withdrawn before its request has come.
grpc::Status CallWithdrawn(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  auto call = stub.PrepareCall(&context, "/attnd.v1.Attention/Forward", &queue);
  void* tag = nullptr;
  bool ok = false;
  call->StartCall(nullptr);
  queue.Next(&tag, &ok);  // the headers are out
  context.TryCancel();
  grpc::Status status;
  call->Finish(&status, nullptr);
  queue.Next(&tag, &ok);
  return status;
}

// gRPC drops a call that is withdrawn before its request has come.
TEST(DaemonWire, CountsNoCallThatIsWithdrawnBeforeItsRequest) {
  Daemon daemon(std::make_unique<ReferenceBackend>(), WithMetrics());
  EXPECT_EQ(CallWithdrawn(daemon.NewChannel()).error_code(), grpc::StatusCode::CANCELLED);
  const Counts counts(daemon);
  const Labels invalid = {{"reason", "invalid"}};
  EXPECT_EQ(CallRaw(daemon.NewChannel(), "").error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(counts.WaitForOne("attnd_rejected_requests_total", invalid), 1);
  EXPECT_EQ(counts.Of("attnd_requests_total", {{"method", "Forward"}}), 1);
  ExpectHealthy(daemon);
}

TEST(DaemonWire, TimesRefusalsByAdmissionAndNoOtherAnswers) {
  ServerOptions options = WithMetrics();
  options.admission.caller_max_calls = 0;
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  const Counts counts(daemon);
  const char* name = "attnd_refusal_duration_seconds_count";
  EXPECT_EQ(CallRaw(daemon.NewChannel(), "").error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(counts.WaitForOne("attnd_rejected_requests_total", {{"reason", "invalid"}}), 1);
  EXPECT_EQ(counts.Of(name, {}), 0);
  grpc::ClientContext context;
  v1::ForwardResponse reply;
  EXPECT_EQ(daemon.stub().Forward(&context, MakeForward(SmallProblem(), 1), &reply).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(counts.WaitForOne(name, {{"method", "Forward"}}), 1);
  EXPECT_EQ(counts.Of(name, {{"method", "Backward"}}), 0);
}

TEST(DaemonWire, RefusesUnknownMethods) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  EXPECT_EQ(CallRaw(daemon.NewChannel(), "", "/attnd.v1.Attention/Sideways").error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
}

TEST(DaemonWire, GoesOnBesideConnectionsThatSpeakNonsenseOrStopHalfway) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  std::vector<std::unique_ptr<Socket>> sockets;
  for (int n = 0; n < 40; ++n) {
    sockets.push_back(std::make_unique<Socket>(daemon));
    if (n % 4 == 0) sockets.back()->Send("GET / HTTP/1.1\r\n\r\n");
    if (n % 4 == 1)
      sockets.back()->Send(preface.substr(0, static_cast<size_t>(n) % preface.size()));
    if (n % 4 == 2) sockets.back()->Send(preface + std::string(1000, '\xff'));
  }
  ExpectHealthy(daemon);
  sockets.clear();
  ExpectHealthy(daemon);
}

// Go sends this for its longest time, 292 years, and the longest that gRPC knows: beyond the end of
// std::chrono's system clock.
TEST(DaemonWire, TakesDeadlinesOfAnyLength) {
  Daemon daemon(std::make_unique<ReferenceBackend>());
  const std::string request = MakeForward(SmallProblem(), 1).SerializeAsString();
  for (const char* timeout : {"2562047H", "99999999H"}) {
    RawHttp2 peer(daemon.address());
    peer.Greet();
    peer.StartCall(1, "/attnd.v1.Attention/Forward", {{"grpc-timeout", timeout}});
    peer.SendData(1, RawHttp2::MessagePrefix(static_cast<uint32_t>(request.size())) + request);
    peer.Send(RawHttp2::kData, RawHttp2::kEndStream, 1, "");
    while (peer.answers() == 0) peer.Read(100);
    for (int n = 0; n < 20 && peer.bytes_of(1) == 0; ++n) peer.Read(100);
    EXPECT_GT(peer.bytes_of(1), 0) << timeout;
  }
}

TEST(DaemonWire, KeepsMemoryBoundedForReadersThatNeverRead) {
  ServerOptions options = TestOptions();
  options.admission.max_deadline = absl::Seconds(1);
  Daemon daemon(MakeCpuBackend({.threads = 1}), options);
  Problem problem = SmallProblem(16384, 1);  // an o of 8 MiB, more than the windows hold
  problem.kv_len = 1;
  problem.v_head_dim = 128;
  problem.qk_head_dim = 1;
  v1::ForwardRequest request = MakeForward(problem, 1);
  std::vector<std::thread> readers;
  for (int n = 0; n < 3; ++n) {
    readers.emplace_back([&] {
      // A stream whose reply is never read: gRPC's client takes no more than its windows.
      grpc::GenericStub stub(daemon.NewChannel());
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(2));
      grpc::CompletionQueue queue;
      void* tag = nullptr;
      bool ok = false;
      auto call = stub.PrepareCall(&context, "/attnd.v1.Attention/Forward", &queue);
      call->StartCall(nullptr);
      queue.Next(&tag, &ok);
      grpc::Slice slice(request.SerializeAsString());
      call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
      queue.Next(&tag, &ok);
      ExpectHealthy(daemon);
      context.TryCancel();
      grpc::Status status;
      call->Finish(&status, nullptr);
      queue.Next(&tag, &ok);
    });
  }
  for (std::thread& reader : readers) reader.join();
  while (daemon.server().use().bytes != 0 || daemon.server().staging_used() != 0) {
    std::this_thread::yield();
  }
  ExpectHealthy(daemon);
}

TEST(DaemonWire, LetsOtherHostsSendMegabytesAheadAndThisOneLittle) {
  auto window_of = [](const std::string& host) {
    ServerOptions options = TestOptions();
    options.listen = {host + ":0"};
    options.insecure = true;
    Daemon daemon(std::make_unique<ReferenceBackend>(), options);
    RawHttp2 peer(daemon.address());
    peer.Greet();
    while (!peer.acknowledged()) peer.Read(100);
    peer.Send(RawHttp2::kPing, 0, 0, "12345678");
    while (peer.pongs() == 0) peer.Read(100);
    return peer.connection_window();
  };
  EXPECT_EQ(window_of("127.0.0.1"), 65535);
  EXPECT_GT(window_of("0.0.0.0"), 4000000);
}

TEST(DaemonWire, TakesManyCallsOnOneConnection) {
  ServerOptions options = TestOptions();
  options.transport.max_concurrent_streams = 4;  // the others wait in the client
  Daemon daemon(MakeCpuBackend({.threads = 2}), options);
  std::vector<std::thread> threads;
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&daemon] {
      for (int n = 0; n < 10; ++n) ExpectHealthy(daemon);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A message holds more than either socket's buffer at both ends, which have to wait for room.
TEST(DaemonWire, AUnixSocketIsFilledBothWays) {
  grpc_init();  // for good: after such a write gRPC's end would wait for 10 s
  ServerOptions options = TestOptions();
  options.listen = {UniqueName("unix:/tmp/attnd_wire_test_")};
  Daemon daemon(MakeCpuBackend({}), options);
  Problem problem = SmallProblem(24000, 1);
  problem.kv_len = 1;
  problem.qk_head_dim = problem.v_head_dim = 128;
  const v1::ForwardRequest request = MakeForward(problem, 1);
  std::vector<std::thread> callers;
  for (int n = 0; n < 2; ++n) {
    callers.emplace_back([&] {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
      v1::ForwardResponse reply;
      const grpc::Status status = daemon.stub().Forward(&context, request, &reply);
      EXPECT_TRUE(status.ok()) << status.error_message();
      EXPECT_EQ(reply.o().size(), request.q().size());
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace attnd
