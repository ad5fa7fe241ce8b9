#include "client/attention_client.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stop_token>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "client/types/error_detail.h"
#include "kernels/reference_backend.h"
#include "tests/fixtures/call_outputs.h"
#include "tests/fixtures/fake_server.h"

namespace attnd {
namespace {

Outputs Unsharded(const Problem& p, const ProblemInputs& in) {
  ReferenceBackend engine;
  return RunWhole(engine, p, in);
}

std::unique_ptr<AttentionClient> Connected(ClientOptions options) {
  absl::StatusOr<std::unique_ptr<AttentionClient>> client =
      AttentionClient::Connect(std::move(options));
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

std::string SocketPath(const char* name) {
  return absl::StrCat("unix:/tmp/attnd_client_test_", name, ".", getpid());  // ≤ 107 characters
}

Problem SmallProblem() { return PlainProblem(2, 2, 8, 16); }

// A problem, its inputs and a place for its outputs.
struct Case {
  explicit Case(const Problem& problem) : p(problem), in(RandomInputs(p, 1)), out(p) {}
  absl::StatusOr<CallReceipt> Forward(AttentionClient& client, const CallOptions& options = {}) {
    return client.Forward(p, ForwardInputs(in), out.forward(), options);
  }
  Problem p;
  ProblemInputs in;
  Outputs out;
};

// Each of 8 connections has two shards under way, however few cores send them. Only a client that
// sends fewer at once fails here, by its deadline: nothing else has a time limit that a loaded
// machine could miss, a connection attempt that gRPC gives up after 5 s least of all.
TEST(AttentionClient, KeepsEachConnectionToAnotherHostBusy) {
  constexpr absl::Duration kPatience = absl::Minutes(2);
  absl::Mutex mutex;
  int came = 0;
  auto wait_for_all = [&](int, grpc::ServerContext&) {
    absl::MutexLock lock(&mutex);
    ++came;
    auto all = [&] { return came >= 16; };
    mutex.AwaitWithTimeout(absl::Condition(&all), kPatience);
    return all() ? grpc::Status::OK : grpc::Status(grpc::StatusCode::ABORTED, "too few at once");
  };
  FakeServer server("127.0.0.1:0", wait_for_all);
  const std::string port = server.address().substr(server.address().rfind(':'));
  auto client = Connected({.addresses = {"0.0.0.0" + port},  // this host, but another name
                           .channels_per_address = 8,
                           .timeout = kPatience,
                           .wait_for_ready = true,
                           .shard_bytes = 1});
  Problem p = SmallProblem();
  p.batch = 8;
  absl::StatusOr<CallReceipt> receipt = Case(p).Forward(*client);
  EXPECT_TRUE(receipt.ok()) << receipt.status();
}

// The first call learns that there are queues, and the second asks the other server for its own.
TEST(AttentionClient, AsksForQueuesWhereThereAreSome) {
  FakeServer busy("127.0.0.1:0"), idle("127.0.0.1:0");
  auto client = Connected({.addresses = {busy.address(), idle.address()}});
  auto call = [&] { ASSERT_TRUE(Case(SmallProblem()).Forward(*client).ok()); };
  call();
  call();
  EXPECT_EQ(busy.info_count() + idle.info_count(), 0) << "no server has told of a queue";
  busy.TellQueue(30);
  idle.TellQueue(30);
  const bool is_busy = [&] {
    const int before = busy.call_count();
    call();
    return busy.call_count() > before;
  }();
  FakeServer& other = is_busy ? idle : busy;
  other.TellQueue(0);
  const int before = other.call_count();
  call();
  EXPECT_EQ(busy.info_count() + idle.info_count(), 1);
  EXPECT_EQ(other.info_count(), 1);
  EXPECT_EQ(other.call_count(), before + 1);
}

TEST(AttentionClient, GivesTheUnshardedBitsHoweverACallIsCut) {
  FakeServer server("127.0.0.1:0");
  for (int64_t shard_bytes : {int64_t{1}, int64_t{20'000}, int64_t{8} << 20}) {
    auto client = Connected({.addresses = {server.address()}, .shard_bytes = shard_bytes});
    for (uint64_t seed = 0; seed < 150; ++seed) {
      Problem p = RandomProblem(seed, {.max_pairs = 1 << 10, .max_head_dim = 40});
      ProblemInputs in = RandomInputs(p, seed);
      SCOPED_TRACE(absl::StrCat("seed ", seed, " shard_bytes ", shard_bytes, ": ", ProblemText(p)));
      Outputs expected = Unsharded(p, in), got(p);
      absl::StatusOr<CallReceipt> forward = client->Forward(p, ForwardInputs(in), got.forward());
      ASSERT_TRUE(forward.ok()) << forward.status();
      EXPECT_TRUE(got.o == expected.o && got.lse == expected.lse);
      absl::StatusOr<CallReceipt> backward =
          client->Backward(p, BackwardInputs(in, expected), got.backward());
      ASSERT_TRUE(backward.ok()) << backward.status();
      EXPECT_TRUE(got.d_q == expected.d_q && got.d_k == expected.d_k && got.d_v == expected.d_v);
      if (p.bias && p.bias->want_gradient) {
        EXPECT_TRUE(got.d_bias == expected.d_bias);
      }
      if (p.denominator == DenominatorKind::kSink) {
        EXPECT_TRUE(got.d_sink == expected.d_sink);
      }
      if (shard_bytes > 20'000) {
        EXPECT_EQ(forward->shards, 1);
      }
    }
  }
}

TEST(AttentionClient, WorksOverAUnixSocketForCallersOfManyThreads) {
  FakeServer server(SocketPath("many"));
  auto client = Connected({.addresses = {server.address()}, .shard_bytes = 1});
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n) {
    threads.emplace_back([&] {
      Case c(SmallProblem());
      Outputs expected = Unsharded(c.p, c.in);
      for (int call = 0; call < 10; ++call) {
        absl::StatusOr<CallReceipt> receipt = c.Forward(*client);
        ASSERT_TRUE(receipt.ok()) << receipt.status();
        EXPECT_EQ(receipt->shards, 4);
        EXPECT_TRUE(c.out.o == expected.o);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(AttentionClient, SendsNothingWhenTheProblemOrAPointerIsWrong) {
  FakeServer server("127.0.0.1:0");
  auto client = Connected({.addresses = {server.address()}});
  Case c(SmallProblem());
  c.p.kv_heads = 3;
  EXPECT_EQ(c.Forward(*client).status().message(),
            "problem.kv_heads: expected a divisor of q_heads = 2, got 3");
  c.p = SmallProblem();
  EXPECT_EQ(client->Forward(c.p, {}, c.out.forward()).status().message(),
            "q: expected a tensor, got a null pointer");
  EXPECT_EQ(c.Forward(*client, {.request_id = std::string(65, 'x')}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(c.Forward(*client, {.timeout = absl::ZeroDuration()}).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(server.call_count(), 0);
}

TEST(AttentionClient, SendsIdDeadlineAndTokenAndMergesReceipts) {
  FakeServer server("127.0.0.1:0");
  auto client =
      Connected({.addresses = {server.address()}, .bearer_token = "secret", .shard_bytes = 1});
  Case c(SmallProblem());
  Progress last;
  absl::StatusOr<CallReceipt> receipt =
      c.Forward(*client, {.timeout = absl::Seconds(20),
                          .request_id = "me",
                          .progress = [&](const Progress& now) { last = now; }});
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  EXPECT_EQ(receipt->shards, 4);
  EXPECT_EQ(receipt->kernel, "reference_forward_f64");
  ASSERT_EQ(receipt->stages.size(), 1u);
  EXPECT_EQ(receipt->stages[0].total, absl::Nanoseconds(4000));
  EXPECT_EQ(last.shards_done, 4);
  EXPECT_EQ(last.bytes_sent + last.bytes_received, last.bytes_total);
  EXPECT_EQ(receipt->bytes_sent, 3 * 4 * 2 * 2 * 8 * 16);
  EXPECT_EQ(receipt->bytes_received, 4 * 2 * 2 * 8 * (16 + 1));
  for (const SeenCall& call : server.calls()) {
    EXPECT_EQ(call.request_id, "me");
    EXPECT_EQ(call.authorization, "Bearer secret");
    EXPECT_GT(call.time_left, absl::Seconds(10));
    EXPECT_LE(call.time_left, absl::Milliseconds(20'200));  // gRPC sends it rounded up
  }
}

TEST(AttentionClient, CarriesTheServersReasonWhenItRefuses) {
  FakeServer server("127.0.0.1:0", [](int, grpc::ServerContext&) {
    return StatusWithReason(grpc::StatusCode::OUT_OF_RANGE, "too long", "TOO_LARGE_FOR_DEVICE",
                            absl::Milliseconds(5));
  });
  auto client = Connected({.addresses = {server.address()}});
  absl::Status status = Case(SmallProblem()).Forward(*client).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  std::optional<ErrorDetail> detail = DetailOf(status);
  ASSERT_TRUE(detail.has_value());
  EXPECT_EQ(detail->reason, "TOO_LARGE_FOR_DEVICE");
  EXPECT_EQ(detail->domain, "attnd");
  EXPECT_EQ(detail->metadata["limit"], "7");
  EXPECT_EQ(detail->retry_delay, absl::Milliseconds(5));
  EXPECT_EQ(server.call_count(), 1);
}

// Fails its first `failures` calls.
FakeServer::Script Failing(int failures, grpc::StatusCode code) {
  return [failures, code](int call, grpc::ServerContext&) {
    return call >= failures ? grpc::Status::OK : grpc::Status(code, "full");
  };
}
FakeServer::Script Unavailable(int failures) {
  return Failing(failures, grpc::StatusCode::UNAVAILABLE);
}

RetryPolicy QuickRetries() { return {.initial_backoff = absl::Milliseconds(1)}; }

TEST(AttentionClient, RetriesUnavailableUntilItSucceeds) {
  FakeServer server("127.0.0.1:0", Unavailable(2));
  auto client = Connected({.addresses = {server.address()}, .retry = QuickRetries()});
  Case c(SmallProblem());
  absl::StatusOr<CallReceipt> receipt = c.Forward(*client);
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  EXPECT_EQ(receipt->retries, 2);
  EXPECT_TRUE(c.out.o == Unsharded(c.p, c.in).o);
}

TEST(AttentionClient, RetriesACancellationThatItsCallerDidNotAskFor) {
  FakeServer server("127.0.0.1:0", Failing(2, grpc::StatusCode::CANCELLED));
  auto client = Connected({.addresses = {server.address()}, .retry = QuickRetries()});
  Case c(SmallProblem());
  absl::StatusOr<CallReceipt> receipt = c.Forward(*client);
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  EXPECT_EQ(receipt->retries, 2);
}

TEST(AttentionClient, ReportsUnavailableWhenTheServerGoesOnCancelling) {
  FakeServer server("127.0.0.1:0", Failing(1000, grpc::StatusCode::CANCELLED));
  auto client = Connected({.addresses = {server.address()}, .retry = QuickRetries()});
  Case c(SmallProblem());
  const absl::Status status = c.Forward(*client).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "the server cancelled the call: full");
  EXPECT_EQ(DetailOf(status)->reason, "CANCELLED_BY_SERVER");
  EXPECT_EQ(server.call_count(), 3);
}

TEST(AttentionClient, GivesUpAfterTheLastAttempt) {
  FakeServer server("127.0.0.1:0", Unavailable(1000));
  auto client = Connected({.addresses = {server.address()}, .retry = QuickRetries()});
  Case c(SmallProblem());
  EXPECT_EQ(c.Forward(*client).status(), absl::UnavailableError("full"));
  EXPECT_EQ(server.call_count(), 3);
}

TEST(AttentionClient, StopsRetryingWhenTheBudgetIsSpent) {
  FakeServer server("127.0.0.1:0", Unavailable(1000));
  RetryPolicy policy = QuickRetries();
  policy.budget = 3;
  auto client = Connected({.addresses = {server.address()}, .retry = policy});
  Case c(SmallProblem());
  for (int call = 0; call < 5; ++call) EXPECT_FALSE(c.Forward(*client).ok());
  EXPECT_EQ(server.call_count(), 5 + 3);
}

// A small one could become a large one here.
TEST(AttentionClient, TakesNoCompressedReplies) {
  FakeServer server("127.0.0.1:0", [](int, grpc::ServerContext& context) {
    context.set_compression_algorithm(GRPC_COMPRESS_GZIP);
    return grpc::Status::OK;
  });
  auto client = Connected({.addresses = {server.address()}});
  auto receipt = Case(SmallProblem()).Forward(*client);
  // gRPC refuses it by its header, and where the reply is faster, the decoder by its bytes.
  EXPECT_TRUE(absl::IsUnimplemented(receipt.status()) || absl::IsDataLoss(receipt.status()))
      << receipt.status();
  server.SetScript(nullptr);
  receipt = Case(SmallProblem()).Forward(*client);
  EXPECT_TRUE(receipt.ok()) << receipt.status();
}

TEST(AttentionClient, DoesNotRetryWhenTheServerForbidsItOrAsksForLongerThanThereIs) {
  for (const char* pushback : {"-1", "60000"}) {
    FakeServer server("127.0.0.1:0", [&](int, grpc::ServerContext& context) {
      context.AddTrailingMetadata("grpc-retry-pushback-ms", pushback);
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "full");
    });
    auto client = Connected({.addresses = {server.address()}, .retry = QuickRetries()});
    EXPECT_FALSE(Case(SmallProblem()).Forward(*client).ok());
    EXPECT_EQ(server.call_count(), 1) << pushback;
  }
}

TEST(AttentionClient, GoesToAnotherAddressWhenOneIsUnavailable) {
  FakeServer good("127.0.0.1:0"), bad("127.0.0.1:0", Unavailable(1000));
  // A long wait would be seen: the other address is tried at once.
  RetryPolicy policy{.initial_backoff = absl::Seconds(600), .max_backoff = absl::Seconds(600)};
  auto client = Connected({.addresses = {bad.address(), good.address(), "127.0.0.1:1"},
                           .retry = policy,
                           .shard_bytes = 1});
  for (int call = 0; call < 5; ++call) {
    absl::StatusOr<CallReceipt> receipt = Case(SmallProblem()).Forward(*client);
    ASSERT_TRUE(receipt.ok()) << receipt.status();
  }
  EXPECT_GE(bad.call_count(), 1);
  EXPECT_EQ(good.call_count(), 20);
}

// The shards that were with it are one failure.
TEST(AttentionClient, SpendsOneRetryOnAServerThatGoesWithSeveralShards) {
  std::atomic<int> inside{0};
  auto wait_for_two = [&] {
    while (inside < 2) std::this_thread::yield();
  };
  FakeServer bad("127.0.0.1:0", [&](int, grpc::ServerContext&) {
    ++inside;
    wait_for_two();
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "gone");
  });
  FakeServer good("127.0.0.1:0", [&](int, grpc::ServerContext&) {
    wait_for_two();
    return grpc::Status::OK;
  });
  RetryPolicy policy = QuickRetries();
  policy.budget = 1;
  auto client =
      Connected({.addresses = {bad.address(), good.address()}, .retry = policy, .shard_bytes = 1});
  absl::StatusOr<CallReceipt> receipt = Case(SmallProblem()).Forward(*client);
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  EXPECT_EQ(receipt->retries, 2);
}

TEST(AttentionClient, EndsWithTheDeadlineWhenTheServerIsSlow) {
  FakeServer server("127.0.0.1:0", [](int, grpc::ServerContext& context) {
    while (!context.IsCancelled()) std::this_thread::yield();
    return grpc::Status::CANCELLED;
  });
  auto client = Connected({.addresses = {server.address()}});
  absl::Status status =
      Case(SmallProblem()).Forward(*client, {.timeout = absl::Milliseconds(100)}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(absl::StrContains(status.message(), "0 of 1 shards")) << status;
}

TEST(AttentionClient, EndsAtOnceWhenTheCallerCancels) {
  std::stop_source stop;
  FakeServer server("127.0.0.1:0", [&](int, grpc::ServerContext& context) {
    stop.request_stop();
    while (!context.IsCancelled()) std::this_thread::yield();
    return grpc::Status::CANCELLED;
  });
  auto client = Connected({.addresses = {server.address()}, .shard_bytes = 1});
  Case c(SmallProblem());
  EXPECT_EQ(c.Forward(*client, {.stop = stop.get_token()}).status(),
            absl::CancelledError("the caller cancelled the call"));
}

TEST(AttentionClient, SendsNothingWhenTheCallerCancelledBefore) {
  FakeServer server("127.0.0.1:0");
  auto client = Connected({.addresses = {server.address()}});
  std::stop_source stop;
  stop.request_stop();
  EXPECT_EQ(Case(SmallProblem()).Forward(*client, {.stop = stop.get_token()}).status(),
            absl::CancelledError("the caller cancelled the call"));
  EXPECT_EQ(server.call_count(), 0);
}

TEST(AttentionClient, CancelsWhileAShardWaitsForItsRetry) {
  std::stop_source stop;
  FakeServer server("127.0.0.1:0", Unavailable(1000));
  auto client =
      Connected({.addresses = {server.address()},
                 .timeout = absl::Hours(2),
                 .retry = {.initial_backoff = absl::Hours(1), .max_backoff = absl::Hours(1)}});
  std::thread canceller([&] {
    while (server.call_count() == 0) std::this_thread::yield();
    stop.request_stop();
  });
  EXPECT_EQ(Case(SmallProblem()).Forward(*client, {.stop = stop.get_token()}).status().code(),
            absl::StatusCode::kCancelled);
  canceller.join();
}

TEST(AttentionClient, WorksAgainWhenTheServerHasRestarted) {
  FakeServer server("127.0.0.1:0");
  auto client = Connected({.addresses = {server.address()}, .retry = QuickRetries()});
  auto patient = Connected({.addresses = {server.address()}, .wait_for_ready = true});
  Case c(SmallProblem());
  ASSERT_TRUE(c.Forward(*client).ok());
  server.Stop();
  EXPECT_EQ(c.Forward(*client).status().code(), absl::StatusCode::kUnavailable);
  std::thread restart([&] { server.Start(); });
  EXPECT_TRUE(c.Forward(*patient).ok());
  restart.join();
  absl::Status status = absl::UnavailableError("");
  const absl::Time give_up =
      absl::Now() + absl::Seconds(20);  // gRPC waits before it connects again
  while (absl::IsUnavailable(status) && absl::Now() < give_up) {
    status = c.Forward(*client).status();
  }
  EXPECT_TRUE(status.ok()) << status;
}

// A socket that takes connections and never greets.
class SilentServer {
 public:
  SilentServer() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof(address);
    CHECK(bind(socket_, reinterpret_cast<sockaddr*>(&address), size) == 0);
    CHECK(listen(socket_, 1) == 0);
    CHECK(getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    address_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
    const timeval patience = {.tv_sec = 30, .tv_usec = 0};
    setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  }
  ~SilentServer() { close(socket_); }
  const std::string& address() const { return address_; }
  void AwaitClient() { close(accept(socket_, nullptr, nullptr)); }

 private:
  const int socket_;
  std::string address_;
};

// Daemons are killed before they have greeted the client, more often than a call is tried, and
// another one's address replaces each one's.
TEST(AttentionClient, LeavesAddressesThatItsNameHasNoMoreWhileItWaitsForAConnection) {
  FakeServer server("127.0.0.1:0");
  const std::string folder = absl::StrCat(testing::TempDir(), "/gone.", getpid());
  const std::string file = folder + "/0.addr", hidden = folder + "/.0";
  std::filesystem::create_directory(folder);
  const auto list = [&](const std::string& address) {
    std::ofstream(hidden) << address << "\n";
    std::filesystem::rename(hidden, file);
  };
  auto killed = std::make_unique<SilentServer>();
  list(killed->address());
  auto client = Connected({.addresses = {"dir:" + folder},
                           .timeout = absl::Minutes(2),
                           .retry = {.max_attempts = 2},
                           .wait_for_ready = true});
  std::thread restarts([&] {
    for (int n = 0; n < 3; ++n) {
      killed->AwaitClient();  // the call waits for it by now
      auto next = std::make_unique<SilentServer>();
      list(n < 2 ? next->address() : server.address());
      killed = std::move(next);
    }
  });
  absl::StatusOr<CallReceipt> receipt = Case(SmallProblem()).Forward(*client);
  EXPECT_TRUE(receipt.ok()) << receipt.status();
  restarts.join();
}

TEST(AttentionClient, NamesTheLimitWhenNoMessageCanHoldAHead) {
  FakeServer server("127.0.0.1:0", nullptr, 1 << 20);
  auto client = Connected({.addresses = {server.address()}});
  Problem p = SmallProblem();
  p.batch = p.q_heads = p.kv_heads = p.q_len = 1;
  p.kv_len = (1 << 20) / (2 * 16 * 4);  // exactly the limit, and the header is beyond it
  absl::Status status = Case(p).Forward(*client).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(absl::StrContains(status.message(), "max_message_bytes = 1048576")) << status;
  EXPECT_EQ(server.call_count(), 0);
  p.kv_len -= 32;  // with room for the header
  absl::StatusOr<CallReceipt> receipt = Case(p).Forward(*client);
  EXPECT_TRUE(receipt.ok()) << receipt.status();
}

TEST(AttentionClient, KnowsItsServers) {
  FakeServer server("127.0.0.1:0");
  auto client = Connected({.addresses = {server.address(), "127.0.0.1:1"}});
  absl::StatusOr<ServerInfo> info = client->GetServerInfo();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->address, server.address());
  EXPECT_EQ(info->max_message_bytes, 16 << 20);
  ASSERT_EQ(info->devices.size(), 1u);
  EXPECT_EQ(client->GetServerInfo(1).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(client->GetServerInfo(2).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(AttentionClient, RefusesOptionsThatCannotWork) {
  auto message = [](ClientOptions options) {
    return std::string(AttentionClient::Connect(std::move(options)).status().message());
  };
  EXPECT_EQ(message({}), "addresses: expected at least one, got 0");
  EXPECT_EQ(
      message({.addresses = {""}}),
      "addresses: expected host:port, unix:path (at most 107 bytes) or a gRPC target, got \"\"");
  EXPECT_EQ(message({.addresses = {"a:1"}, .channels_per_address = 65}),
            "channels_per_address: expected 1..64, got 65");
  EXPECT_EQ(message({.addresses = {"a:1"}, .tls = ClientTlsOptions{.ca_file = "/no/such"}}),
            "tls.ca_file: cannot read /no/such: No such file or directory");
  EXPECT_TRUE(absl::StrContains(message({.addresses = {"far:1"}, .bearer_token = "t"}),
                                "bearer_token: expected TLS"));
  EXPECT_EQ(message({.addresses = {"unix:/x", "127.0.0.1:1", "localhost:1", "[::1]:1"},
                     .bearer_token = "t"}),
            "");
  // A name may begin like a loopback address.
  EXPECT_TRUE(absl::StrContains(message({.addresses = {"127.0.0.1.far:1"}, .bearer_token = "t"}),
                                "bearer_token: expected TLS"));
  // gRPC would end the process at such a header.
  for (const char* token : {"t\n", "a\nb", "\xff"}) {
    EXPECT_EQ(message({.addresses = {"127.0.0.1:1"}, .bearer_token = token}),
              "bearer_token: expected printable ASCII in one line, got other bytes");
  }
}

}  // namespace
}  // namespace attnd
