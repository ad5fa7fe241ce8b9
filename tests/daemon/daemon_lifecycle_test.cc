// Start, health, reflection, drain: in process, and the binary itself with its signals, port files,
// flags and exit codes.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <initializer_list>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/read_file.h"
#include "kernels/cpu/cpu_backend.h"
#include "net/file_descriptor.h"
#include "proto/grpc/health/v1/health.grpc.pb.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/daemon_process.h"
#include "tests/fixtures/gated_backend.h"
#include "tests/fixtures/gated_daemon.h"
#include "tests/fixtures/unique_name.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

namespace health = grpc::health::v1;
using Serving = health::HealthCheckResponse;

Serving::ServingStatus Check(const std::shared_ptr<grpc::Channel>& channel,
                             const std::string& service) {
  auto stub = health::Health::NewStub(channel);
  health::HealthCheckRequest request;
  request.set_service(service);
  Serving reply;
  grpc::ClientContext context;
  grpc::Status status = stub->Check(&context, request, &reply);
  return status.ok() ? reply.status() : Serving::SERVICE_UNKNOWN;
}

TEST(DaemonHealth, ServesUnderEachNameOnceItIsUp) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  auto channel = daemon.NewChannel();
  EXPECT_EQ(Check(channel, ""), Serving::SERVING);
  EXPECT_EQ(Check(channel, "attnd.v1.Attention"), Serving::SERVING);
  EXPECT_EQ(Check(channel, "liveness"), Serving::SERVING);
  EXPECT_EQ(Check(channel, "nobody"), Serving::SERVICE_UNKNOWN);
}

TEST(DaemonHealth, StopsServingWhenItDrainsButStaysAliveAndTakesCalls) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  auto channel = daemon.NewChannel();
  std::promise<void> draining, checked;
  std::thread drain([&] {
    bool first = true;
    daemon.server().Drain(absl::ZeroDuration(), absl::Seconds(10), [&](absl::Duration) {
      if (!std::exchange(first, false)) return true;
      draining.set_value();
      checked.get_future().wait();
      return true;
    });
  });
  draining.get_future().wait();
  EXPECT_EQ(Check(channel, ""), Serving::NOT_SERVING);
  EXPECT_EQ(Check(channel, "attnd.v1.Attention"), Serving::NOT_SERVING);
  EXPECT_EQ(Check(channel, "liveness"), Serving::SERVING);
  v1::ForwardResponse reply;
  grpc::ClientContext context;
  EXPECT_TRUE(daemon.stub().Forward(&context, MakeForward(SmallProblem(), 1), &reply).ok());
  checked.set_value();
  drain.join();
}

TEST(DaemonHealth, TellsWatchersWhenItDrains) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  auto stub = health::Health::NewStub(daemon.NewChannel());
  grpc::ClientContext context;
  auto reader = stub->Watch(&context, {});
  Serving seen;
  ASSERT_TRUE(reader->Read(&seen));
  EXPECT_EQ(seen.status(), Serving::SERVING);
  std::thread drain([&] { daemon.server().Drain(absl::ZeroDuration(), absl::Milliseconds(200)); });
  ASSERT_TRUE(reader->Read(&seen));
  EXPECT_EQ(seen.status(), Serving::NOT_SERVING);
  drain.join();
}

TEST(DaemonDrain, DoesNotWaitForWatchersOfItsHealth) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  auto stub = health::Health::NewStub(daemon.NewChannel());
  grpc::ClientContext context;
  auto reader = stub->Watch(&context, {});
  Serving seen;
  ASSERT_TRUE(reader->Read(&seen));
  // With its whole timeout it would not end before the test's own limit.
  daemon.server().Drain(absl::ZeroDuration(), absl::Hours(24));
  while (reader->Read(&seen)) EXPECT_EQ(seen.status(), Serving::NOT_SERVING);
  EXPECT_FALSE(reader->Finish().ok());
}

// Whether somebody listens at "127.0.0.1:PORT".
bool Accepts(const std::string& host_and_port) {
  int port = 0;
  CHECK(absl::SimpleAtoi(host_and_port.substr(host_and_port.rfind(':') + 1), &port));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  FileDescriptor fd(socket(AF_INET, SOCK_STREAM, 0));
  return connect(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
}

TEST(DaemonHealth, IsNoLongerAliveWhenALaunchDoesNotEnd) {
  FakeClock clock(absl::Now());
  auto backend = std::make_unique<GatedBackend>();
  GatedBackend& engine = *backend;
  Daemon daemon({std::move(backend)}, TestOptions(), clock);
  const int before = static_cast<int>(engine.launches().size());
  engine.Close();
  std::thread caller([&] {
    grpc::ClientContext context;
    v1::ForwardResponse reply;
    EXPECT_TRUE(daemon.stub().Forward(&context, MakeForward(SmallProblem(), 1), &reply).ok());
  });
  engine.WaitForLaunches(before + 1);
  clock.Advance(absl::Seconds(25));
  EXPECT_TRUE(daemon.server().CheckAlive().ok()) << daemon.server().CheckAlive();
  clock.Advance(absl::Seconds(25));
  const absl::Status stuck = daemon.server().CheckAlive();
  EXPECT_TRUE(absl::IsInternal(stuck)) << stuck;
  EXPECT_TRUE(absl::StrContains(stuck.message(), "a launch does not end")) << stuck;
  engine.Open();
  caller.join();
  // The thread that took the call, by the clock 50 s ago, may not have gone on yet.
  while (!daemon.server().CheckAlive().ok()) std::this_thread::yield();
}

TEST(DaemonDrain, IsCutShortAlsoWhenItsPortsAreClosedAndCallsFinish) {
  GatedDaemon gated;
  Daemon& daemon = *gated.daemon;
  gated.engine->Close();
  std::thread caller([&] {
    grpc::ClientContext context;
    v1::ForwardResponse reply;
    EXPECT_FALSE(daemon.stub().Forward(&context, MakeForward(SmallProblem(), 1), &reply).ok());
  });
  gated.WaitForLaunches(1);
  // As a second SIGTERM then. Without it the drain would not end before the test's own limit.
  daemon.server().Drain(absl::ZeroDuration(), absl::Hours(24), [&](absl::Duration) {
    std::this_thread::yield();
    return Accepts(daemon.address());
  });
  gated.engine->Open();
  caller.join();
}

TEST(DaemonDrain, EndsAlthoughACallerComesAgainAndAgain) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  std::atomic<bool> stop{false};
  std::thread caller([&] {
    while (!stop) {
      grpc::ClientContext context;
      v1::ForwardResponse reply;
      daemon.stub().Forward(&context, MakeForward(SmallProblem(), 1), &reply);
    }
  });
  // With its whole timeout it would not end before the test's own limit.
  daemon.server().Drain(absl::ZeroDuration(), absl::Hours(24));
  stop = true;
  caller.join();
}

TEST(DaemonDrain, DoesNotWaitForBalancersWithoutADevice) {
  GatedDaemon gated;
  Daemon& daemon = *gated.daemon;
  gated.engine->FailWith(
      DeviceLost(absl::InternalError("cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS")));
  grpc::ClientContext context;
  v1::ForwardResponse reply;
  EXPECT_FALSE(daemon.stub().Forward(&context, MakeForward(SmallProblem(), 1), &reply).ok());
  EXPECT_TRUE(daemon.server().device_lost());
  daemon.server().Drain(absl::Hours(24), absl::Hours(24));
}

TEST(DaemonFault, FencesALostDeviceAndFinishesOnTheOther) {
  RealClock clock;
  Logger log(stderr, LogFormat::kText, Severity::kError);
  std::vector<Device> engines;
  GatedBackend* gpus[2];
  for (GatedBackend*& gpu : gpus) {
    auto engine = std::make_unique<GatedBackend>();
    gpu = engine.get();
    engines.push_back(std::move(engine));
  }
  auto server = AttndServer::Start(TestOptions(), std::move(engines), clock, log);
  ASSERT_TRUE(server.ok()) << server.status();
  auto channel =
      grpc::CreateChannel((*server)->addresses().front(), grpc::InsecureChannelCredentials());
  auto stub = v1::Attention::NewStub(channel);
  auto call = [&] {
    v1::ForwardResponse reply;
    grpc::ClientContext context;
    return stub->Forward(&context, MakeForward(SmallProblem(), 1), &reply);
  };
  // An idle server sends every call of a kind to the device that its self test found the faster.
  const size_t before = gpus[0]->launches().size();
  ASSERT_TRUE(call().ok());
  const int used = gpus[0]->launches().size() > before ? 0 : 1;
  const std::string lost = absl::StrCat("attnd.v1.Attention/gated", used);
  EXPECT_EQ(Check(channel, lost), Serving::SERVING);
  EXPECT_FALSE((*server)->device_lost());
  gpus[used]->FailWith(DeviceLost(absl::InternalError("cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS")));
  grpc::Status status = call();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(ErrorInfoOf(status).reason(), "DEVICE_LOST");
  EXPECT_TRUE((*server)->device_lost());
  EXPECT_EQ(Check(channel, lost), Serving::NOT_SERVING);
  EXPECT_EQ(Check(channel, absl::StrCat("attnd.v1.Attention/gated", 1 - used)), Serving::SERVING);
  EXPECT_EQ(Check(channel, ""), Serving::NOT_SERVING);
  EXPECT_TRUE(call().ok());  // until it is drained, the other goes on
  (*server)->Drain(absl::ZeroDuration(), absl::Seconds(10));
}

TEST(DaemonStart, RefusesAnEngineThatGivesAWrongAnswer) {
  class WrongBackend final : public Backend {
   public:
    const BackendInfo& info() const override { return right_.info(); }
    absl::Status Supports(const Problem&, Direction) const override { return absl::OkStatus(); }
    int64_t WorkspaceBytes(const Problem&, Direction) const override { return 0; }
    absl::StatusOr<LaunchReport> Forward(absl::Span<const ForwardCall> calls) override {
      auto report = right_.Forward(calls);
      static_cast<float*>(calls.front().o)[7] += 0.01f;
      return report;
    }
    absl::StatusOr<LaunchReport> Backward(absl::Span<const BackwardCall> calls) override {
      return right_.Backward(calls);
    }

   private:
    ReferenceBackend right_;
  };
  RealClock clock;
  Logger log(stderr, LogFormat::kText, Severity::kError);
  auto server = AttndServer::Start(TestOptions(), std::make_unique<WrongBackend>(), clock, log);
  ASSERT_FALSE(server.ok());
  EXPECT_TRUE(absl::StrContains(server.status().message(), "self test: o is wrong"))
      << server.status();
}

TEST(DaemonStart, RefusesAPortInUse) {
  Daemon daemon(MakeCpuBackend({.threads = 1}));
  ServerOptions options = TestOptions();
  options.listen = {daemon.address()};
  RealClock clock;
  Logger log(stderr, LogFormat::kText, Severity::kError);
  auto server = AttndServer::Start(options, MakeCpuBackend({.threads = 1}), clock, log);
  ASSERT_FALSE(server.ok());
  EXPECT_TRUE(absl::StrContains(server.status().message(), "cannot listen on")) << server.status();
}

TEST(DaemonStart, RefusesAUnixSocketThatAnotherServesButTakesADeadOnes) {
  const std::string path = UniqueName("/tmp/attnd_taken_");  // 107 bytes at most
  ServerOptions options = TestOptions();
  options.listen = {absl::StrCat("unix:", path)};
  RealClock clock;
  Logger log(stderr, LogFormat::kText, Severity::kError);
  {
    Daemon daemon(MakeCpuBackend({.threads = 1}), options);
    auto second = AttndServer::Start(options, MakeCpuBackend({.threads = 1}), clock, log);
    ASSERT_FALSE(second.ok());
    EXPECT_EQ(second.status().message(),
              absl::StrCat("--listen: cannot listen on unix:", path, ": Address already in use"));
    EXPECT_EQ(Check(daemon.NewChannel(), ""), Serving::SERVING);
  }
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  FileDescriptor dead(socket(AF_UNIX, SOCK_STREAM, 0));
  ASSERT_EQ(bind(dead.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  Daemon daemon(MakeCpuBackend({.threads = 1}), options);
  EXPECT_EQ(Check(daemon.NewChannel(), ""), Serving::SERVING);
}

TEST(DaemonDrain, FinishesWhatRunsAndRefusesWhatIsNew) {
  GatedDaemon gated;
  Daemon& daemon = *gated.daemon;
  gated.engine->Close();
  grpc::Status status;
  std::thread caller([&] {
    grpc::ClientContext context;
    v1::ForwardResponse reply;
    status = daemon.stub().Forward(&context, MakeForward(SmallProblem(), 1), &reply);
  });
  gated.WaitForLaunches(1);
  std::thread drain([&] { daemon.server().Drain(absl::ZeroDuration(), absl::Seconds(60)); });
  // New calls end with UNAVAILABLE, by the DRAINING answer or because the port is closed.
  grpc::StatusCode code = grpc::StatusCode::OK;
  while (code == grpc::StatusCode::OK || code == grpc::StatusCode::DEADLINE_EXCEEDED) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
    v1::ForwardResponse reply;
    code = daemon.stub().Forward(&context, MakeForward(SmallProblem(), 1), &reply).error_code();
  }
  EXPECT_EQ(code, grpc::StatusCode::UNAVAILABLE);
  gated.engine->Open();
  drain.join();
  caller.join();
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST(DaemonDrain, CancelsWhatStillRunsAtTheTimeoutAndSaysSo) {
  GatedDaemon gated;
  Daemon& daemon = *gated.daemon;
  gated.engine->Close();
  grpc::Status status;
  std::thread caller([&] {
    grpc::ClientContext context;
    v1::ForwardResponse reply;
    status = daemon.stub().Forward(&context, MakeForward(SmallProblem(), 1), &reply);
  });
  gated.WaitForLaunches(1);
  testing::internal::CaptureStderr();
  daemon.server().Drain(absl::ZeroDuration(), absl::Milliseconds(50));
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(absl::StrContains(log, "event=drain_cut calls=1 modules=0 ")) << log;
  caller.join();
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(daemon.server().use().bytes, 0);
}

TEST(DaemonDrain, LosesNoCallWhenOneOfTwoReplicasRestartsUnderLoad) {
  auto stays = std::make_unique<Daemon>(MakeCpuBackend({.threads = 1}));
  auto leaves = std::make_unique<Daemon>(MakeCpuBackend({.threads = 1}));
  std::atomic<bool> stop{false};
  std::atomic<int> done{0}, failed{0}, moved{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&] {
      std::unique_ptr<v1::Attention::Stub> stubs[] = {leaves->NewStub(), stays->NewStub()};
      v1::ForwardRequest request = MakeForward(SmallProblem(64), 1);
      int replica = 0;
      while (!stop) {
        // Every client does this: UNAVAILABLE means the next replica, and staying there.
        grpc::Status status(grpc::StatusCode::UNAVAILABLE, "");
        for (; status.error_code() == grpc::StatusCode::UNAVAILABLE && replica < 2;) {
          grpc::ClientContext context;
          v1::ForwardResponse reply;
          status = stubs[replica]->Forward(&context, request, &reply);
          if (status.error_code() != grpc::StatusCode::UNAVAILABLE) break;
          ++replica;
          ++moved;
        }
        status.ok() ? ++done : ++failed;
        if (!status.ok()) ADD_FAILURE() << status.error_code() << " " << status.error_message();
      }
    });
  }
  while (done < 50) std::this_thread::yield();
  leaves->server().Drain(absl::ZeroDuration(), absl::Seconds(30));
  EXPECT_EQ(leaves->server().use().calls, 0);
  int at_drain = done;
  while (done < at_drain + 50) std::this_thread::yield();
  stop = true;
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(moved, 4);  // each caller was told once
}

// ---- The binary.

TEST(DaemonBinary, ServesDrainsAndExitsWithZero) {
  RunningDaemon daemon("serves", {"--drain_delay", "0.1", "--log_format", "json"});
  grpc::ClientContext context;
  v1::ForwardResponse reply;
  EXPECT_TRUE(daemon.Stub()->Forward(&context, MakeForward(SmallProblem(), 1), &reply).ok());
  EXPECT_EQ(reply.receipt().backend(), "cpu");
  daemon.child->Signal(SIGPIPE);  // ignored, as the next
  daemon.child->Signal(SIGHUP);
  daemon.child->Signal(SIGTERM);
  EXPECT_EQ(daemon.child->Wait(), 0);
  std::string output = daemon.child->Output();
  for (const char* event :
       {"\"event\":\"serving\"", "\"event\":\"draining\"", "\"event\":\"stopped\""}) {
    EXPECT_TRUE(absl::StrContains(output, event)) << output;
  }
}

// The library of the metrics port ignores it by itself.
TEST(DaemonBinary, IgnoresABrokenPipeWithoutAMetricsPort) {
  const std::string port_file = TempPath("pipe");
  Child child({"--listen", "127.0.0.1:0", "--port_file", port_file, "--metrics_listen", "",
               "--drain_delay", "0"});
  WaitForPort(port_file);
  child.Signal(SIGPIPE);
  child.Signal(SIGTERM);
  EXPECT_EQ(child.Wait(), 0);
}

// The first reply to this message, whatever its type.
std::string Ask(const std::string& address, const std::string& method, const std::string& request) {
  grpc::GenericStub stub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  auto done = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  auto call = stub.PrepareCall(&context, method, &queue);
  call->StartCall(nullptr);
  EXPECT_TRUE(done());
  grpc::Slice message(request);
  call->WriteLast(grpc::ByteBuffer(&message, 1), grpc::WriteOptions(), nullptr);
  EXPECT_TRUE(done());
  grpc::ByteBuffer reply;
  call->Read(&reply, nullptr);
  EXPECT_TRUE(done());
  grpc::Status status;
  call->Finish(&status, nullptr);
  EXPECT_TRUE(done());
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_TRUE(reply.DumpToSingleSlice(&message).ok());
  return std::string(message.begin(), message.end());
}

// A program with gRPC within it has these services, too.
TEST(DaemonBinary, AnswersReflectionAndChannelz) {
  RunningDaemon daemon("services", {"--drain_delay", "0"});
  const std::string method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  const std::string services = Ask(daemon.address, method, "\x3a\x01*");  // list_services
  for (const char* service :
       {"attnd.v1.Attention", "grpc.channelz.v1.Channelz", "grpc.health.v1.Health"}) {
    EXPECT_TRUE(absl::StrContains(services, service)) << services;
  }
  // As grpcurl asks before it calls one.
  for (std::string name : {"attnd.v1.Attention", "grpc.health.v1.Health"}) {
    const std::string file_of = absl::StrCat("\x22", std::string(1, char(name.size())), name);
    const std::string file = Ask(daemon.address, method, file_of);
    EXPECT_TRUE(absl::StrContains(file, ".proto")) << file;
  }
  EXPECT_FALSE(Ask(daemon.address, "/grpc.channelz.v1.Channelz/GetServers", "").empty());
}

// Each keeps a thread of gRPC's while it is open.
TEST(DaemonBinary, BoundsTheThreadsOfReflection) {
  RunningDaemon daemon("bounds", {"--drain_delay", "0"});
  const double before = daemon.Metric("process_threads", {});
  grpc::GenericStub stub(grpc::CreateChannel(daemon.address, grpc::InsecureChannelCredentials()));
  grpc::CompletionQueue queue;
  auto next = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue.Next(&tag, &ok));
    return tag;
  };
  constexpr int kStreams = 60;  // within --max_concurrent_streams
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::GenericClientAsyncReaderWriter>> calls;
  std::vector<grpc::Status> statuses(kStreams);
  for (int n = 0; n < kStreams; ++n) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    calls.push_back(
        stub.PrepareCall(contexts.back().get(),
                         "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue));
    calls.back()->StartCall(nullptr);
    next();
    calls.back()->Finish(&statuses[n], &statuses[n]);
  }
  for (int refused = 0; refused < kStreams - 32; ++refused) {
    EXPECT_EQ(static_cast<grpc::Status*>(next())->error_code(),
              grpc::StatusCode::RESOURCE_EXHAUSTED);
  }
  EXPECT_LE(daemon.Metric("process_threads", {}), before + 32);
  grpc::ClientContext context;
  v1::ForwardResponse reply;
  EXPECT_TRUE(daemon.Stub()->Forward(&context, MakeForward(SmallProblem(), 1), &reply).ok());
  for (auto& one : contexts) one->TryCancel();
  void* tag = nullptr;
  bool ok = false;
  for (queue.Shutdown(); queue.Next(&tag, &ok);) {
  }
}

TEST(DaemonBinary, ShowsItsServicesToOtherHostsWithACertificateAlone) {
  RunningDaemon daemon("others", {"--drain_delay", "0", "--insecure"}, "0.0.0.0");
  grpc::GenericStub stub(grpc::CreateChannel(absl::StrCat("127.0.0.1:", daemon.port),
                                             grpc::InsecureChannelCredentials()));
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  auto call = stub.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  void* tag = nullptr;
  bool ok = false;
  call->StartCall(nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok));
  grpc::Status status;
  call->Finish(&status, nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST(DaemonBinary, LogsTheIdsOfRefusedRequests) {
  RunningDaemon daemon("ids", {"--drain_delay", "0"});
  v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
  request.mutable_problem()->set_q_len(0);
  request.mutable_options()->set_request_id("a whole one");
  grpc::ClientContext context, stream_context;
  v1::ForwardResponse reply;
  EXPECT_EQ(daemon.Stub()->Forward(&context, request, &reply).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  auto stub = daemon.Stub();
  v1::ForwardStreamRequest header;
  *header.mutable_header() = request;
  header.mutable_header()->mutable_options()->set_request_id("a streamed one");
  auto stream = stub->ForwardStream(&stream_context);
  stream->WriteLast(header, grpc::WriteOptions());
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  for (const char* id : {"request_id=\"a whole one\"", "request_id=\"a streamed one\""}) {
    while (!absl::StrContains(daemon.child->Output(), id)) std::this_thread::yield();
  }
}

TEST(DaemonBinary, RemovesAnOlderPortFileBeforeItServes) {
  const std::string path = TempPath("old_port");
  std::ofstream(path) << "1\n";
  // Tokens that cannot be read end the start after that.
  Child child({"--listen", "127.0.0.1:0", "--metrics_listen", "", "--token_file", "/nonexistent",
               "--port_file", path});
  EXPECT_EQ(child.Wait(), 1);
  EXPECT_FALSE(std::ifstream(path).good());
}

// As /dev/stdout is one.
TEST(DaemonBinary, WritesPortsThroughALink) {
  const std::string link = TempPath("port_link"), target = TempPath("port_link_target");
  std::ofstream(target) << "";
  ASSERT_EQ(symlink(target.c_str(), link.c_str()), 0);
  Child child({"--listen", "127.0.0.1:0", "--metrics_listen", "", "--drain_delay", "0",
               "--port_file", link});
  while (!absl::StrContains(child.Output(), "serving")) std::this_thread::yield();
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_THAT(ReadFile(target), testing::MatchesRegex("[0-9]+\n"));
  child.Signal(SIGTERM);
  EXPECT_EQ(child.Wait(), 0);
}

// A reply that does not fit a socket's buffer leaves gRPC a thread that waits for ten seconds, in
// about every second process.
TEST(DaemonBinary, EndsOnceItHasStoppedAlsoAfterLargeReplies) {
  v1::ForwardRequest request = MakeForward(SmallProblem(4096, 30), 1);
  request.set_want_lse(false);  // below the 4 MiB that a client takes by default
  for (int start = 0; start < 4; ++start) {
    RunningDaemon daemon(absl::StrCat("large", start), {"--drain_delay", "0"});
    grpc::ClientContext context;
    v1::ForwardResponse reply;
    grpc::Status status = daemon.Stub()->Forward(&context, request, &reply);
    ASSERT_TRUE(status.ok()) << status.error_message();
    daemon.child->Signal(SIGTERM);
    const absl::Time signalled = absl::Now();
    EXPECT_EQ(daemon.child->Wait(), 0);
    EXPECT_LT(absl::Now() - signalled, absl::Seconds(8));
  }
}

TEST(DaemonBinary, StopsAtOnceAtTheSecondSignal) {
  RunningDaemon daemon("second", {"--drain_delay", "3600"});
  daemon.child->Signal(SIGTERM);
  while (!absl::StrContains(daemon.child->Output(), "draining")) std::this_thread::yield();
  daemon.child->Signal(SIGINT);
  EXPECT_EQ(daemon.child->Wait(), 0);
}

TEST(DaemonBinary, WritesItsMetricsToAFile) {
  RunningDaemon daemon("metrics", {"--drain_delay", "0"});
  grpc::ClientContext context;
  v1::ForwardResponse reply;
  ASSERT_TRUE(daemon.Stub()->Forward(&context, MakeForward(SmallProblem(), 1), &reply).ok());
  std::string text_file = TempPath("metrics.txt");
  ASSERT_EQ(std::system(absl::StrCat("curl -sf ", daemon.MetricsUrl(), " > ", text_file).c_str()),
            0);
  std::ifstream file(text_file);
  std::stringstream text;
  text << file.rdbuf();
  for (const char* line :
       {"attnd_requests_total{code=\"OK\",method=\"Forward\"} 1", "attnd_ready 1",
        "attnd_batch_requests_count{direction=\"forward\"} 1", "attnd_draining 0",
        "attnd_host_copy_bytes_total{site=\"landing\"} 3072", "process_open_fds "}) {
    EXPECT_TRUE(absl::StrContains(text.str(), line)) << line;
  }
}

// Returns what `command`, run by a shell, prints to standard error, after its exit code.
std::string ShellOutcome(const std::string& command) {
  const std::string file = TempPath("stderr");
  const int status = std::system(absl::StrCat(command, " 2> ", file).c_str());
  return absl::StrCat(WEXITSTATUS(status), " ", ReadFile(file));
}

TEST(DaemonBinary, SaysThatItsOutputIsLost) {
  for (const char* flag : {"--help", "--version", "--check_config"}) {
    EXPECT_EQ(ShellOutcome(absl::StrCat("server/attnd ", flag, " > /dev/full")),
              "1 attnd: cannot write to standard output\n");
  }
}

TEST(DaemonBinary, RefusesToStartWithoutDescriptors) {
  for (int descriptors : {12, 32, 63}) {
    EXPECT_THAT(
        ShellOutcome(absl::StrCat("ulimit -n ", descriptors, "; exec server/attnd --listen ",
                                  "127.0.0.1:0 --metrics_listen ''")),
        testing::AllOf(testing::StartsWith("1 "),
                       testing::HasSubstr(absl::StrCat(
                           "limit of open files: expected at least 64, got ", descriptors))));
  }
}

TEST(DaemonBinary, ServesWithTheFewestDescriptors) {
  const std::string port_file = TempPath("few"), output = TempPath("few_output");
  std::thread daemon([&] {
    EXPECT_EQ(
        std::system(absl::StrCat("ulimit -n 64; server/attnd --listen 127.0.0.1:0 --port_file ",
                                 port_file, " --metrics_listen 127.0.0.1:0 --drain_delay 0 &",
                                 " echo $! > ", output, "; wait $!")
                        .c_str()),
        0);
  });
  auto channel = grpc::CreateChannel(absl::StrCat("127.0.0.1:", WaitForPort(port_file)),
                                     grpc::InsecureChannelCredentials());
  grpc::ClientContext context;
  v1::ForwardResponse reply;
  const grpc::Status status =
      v1::Attention::NewStub(channel)->Forward(&context, MakeForward(SmallProblem(), 1), &reply);
  EXPECT_TRUE(status.ok()) << status.error_message();
  kill(std::stoi(ReadFile(output)), SIGTERM);
  daemon.join();
}

TEST(DaemonBinary, SaysWhatIsWrongWithItsFlags) {
  const std::string file = UniqueName("/tmp/attnd_flags_");  // at most 107 bytes
  std::ofstream(file) << "no socket";
  struct Case {
    std::vector<std::string> flags;
    const char* message;
    int code;
  };
  const Case cases[] = {
      {{"--no_such_flag"}, "no_such_flag", 2},
      {{"--max_launch_ms", "0"}, "--max_launch_ms: expected 1..10000, got 0", 2},
      {{"--listen", "0.0.0.0:7070"}, "--listen: expected TLS", 2},
      {{"--listen", "0.0.0.0:7070", "--check_config"}, "--listen: expected TLS", 1},
      {{"--check_config"}, "options are valid", 0},
      {{"--check_config", "--token_file", "/nonexistent"}, "cannot read /nonexistent", 1},
      {{"--check_config", "--tls_cert", "/dev/null", "--tls_key", "/dev/null"},
       "--tls_cert: expected a PEM file with a certificate, got /dev/null",
       1},
      {{"--check_config", "--listen", "unix:/no/such/socket"},
       "--listen: expected a path in a folder that this user can write to, got /no/such/socket",
       1},
      {{"--check_config", "--listen", "unix:" + file},
       "--listen: expected a path for a socket, got a file, /tmp/attnd_flags_",
       1},
      {{"--check_config", "--listen", "unix:" + file + "_none"}, "options are valid", 0},
      {{"--check_config", "--port_file", file + "/port"}, "--port_file: expected a path in a", 1},
      {{"--check_config", "--module_state_dir", "/dev/shm"},
       "--module_state_dir: expected a folder of this user",
       1},
      {{"--check_config", "--module_state_dir", "/no/such/folder"},
       "/no/such/folder: No such file or directory",
       1},
      {{"--module_state_dir", "/proc", "--listen", "127.0.0.1:0", "--metrics_listen="},
       "--module_state_dir: expected a folder of this user",
       1},
      {{"--check_config", "--metrics_port_file", "/tmp"},
       "--metrics_port_file: expected a file",
       1},
      {{"--check_config", "--port_file", "/dev/stdout"}, "options are valid", 0},
      {{"--drain_delay", "-1"}, "--drain_delay: expected 0..604800, got -1", 2},
      {{"--cpu_threads", "two"}, "--cpu_threads: expected a number, got \"two\"", 2},
      {{"--slow_call_seconds", "nan"}, "--slow_call_seconds: expected a number, got \"nan\"", 2},
      {{"--version"}, "attnd 0.", 0},
      {{"--help"}, "--listen", 0},
      // The warning comes before what ends the start.
      {{"--listen", "0.0.0.0:0", "--insecure", "--metrics_listen", "", "--token_file",
        "/nonexistent"},
       "event=insecure listen=0.0.0.0:0 tls=false client_certificates=false tokens=true",
       1},
      {{"--listen", "unix:/no/such/socket", "--metrics_listen", "", "--no-shared_memory"},
       "cannot listen on unix:/no/such/socket: No such file or directory",
       1},
      {{"--backend", "abacus"}, "--backend: expected auto, cpu, cuda or reference, got abacus", 2},
      {{"--listen", "127.0.0.1:0", "--metrics_listen", "", "--token_file", "/nonexistent"},
       "cannot read /nonexistent",
       1},
  };
  for (const Case& one : cases) {
    Child child(one.flags);
    EXPECT_EQ(child.Wait(), one.code) << child.Output();
    EXPECT_TRUE(absl::StrContains(child.Output(), one.message)) << child.Output();
  }
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace attnd
