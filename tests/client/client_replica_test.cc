// Several daemons behind one client: real processes, of which one dies or drains in the middle of a
// call. Its shards cost a retry elsewhere, and nothing else happens.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "attention/random_problem.h"
#include "client/attention_client.h"
#include "client/channels/connections.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/fixtures/call_outputs.h"
#include "tests/fixtures/daemon_process.h"

namespace attnd {
namespace {

// 64 shards of 1.6 MB, each some milliseconds of work.
Problem ManyShards() {
  Problem p = PlainProblem(8, 8, 400, 64);
  p.causal = true;
  return p;
}

std::unique_ptr<RunningDaemon> Start(const std::string& name) {
  return std::make_unique<RunningDaemon>(
      name,
      std::vector<std::string>{"--cpu_threads", "1", "--drain_delay", "0", "--backend", "cpu"});
}

std::unique_ptr<AttentionClient> ConnectTo(std::vector<std::string> addresses, int channels = 4) {
  auto client = AttentionClient::Connect({.addresses = std::move(addresses),
                                          .channels_per_address = channels,
                                          .timeout = absl::Minutes(2),
                                          .shard_bytes = 1});
  CHECK(client.ok()) << client.status();
  return *std::move(client);
}

// A forward of ManyShards over two daemons, one of which gets `signal` when some shards are done.
void SignalOneInMidCall(int signal) {
  auto first = Start(absl::StrCat("first", signal)), second = Start(absl::StrCat("second", signal));
  auto client = ConnectTo({first->address, second->address}, 12);
  auto engine = MakeCpuBackend({.threads = 1});
  Problem p = ManyShards();
  ProblemInputs in = RandomInputs(p, 1);
  Outputs expected = RunForward(*engine, p, in), got(p);
  std::atomic<bool> sent = false;
  CallOptions options;
  options.progress = [&](const Progress& progress) {
    if (progress.shards_done >= 5 && !sent.exchange(true)) second->child->Signal(signal);
  };
  auto receipt = client->Forward(p, ForwardInputs(in), got.forward(), options);
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  EXPECT_TRUE(sent);
  EXPECT_TRUE(got.o == expected.o && got.lse == expected.lse);
  EXPECT_EQ(receipt->shards, 64);
  // Not more than were with it, and each shard at most once.
  EXPECT_LE(receipt->retries, 64 - 5);
  if (signal == SIGKILL) {
    EXPECT_GE(receipt->retries, 1);
  }
  // The next call goes to the other one.
  Outputs again(p);
  receipt = client->Forward(p, ForwardInputs(in), again.forward());
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  EXPECT_TRUE(again.o == expected.o);
}

TEST(ClientReplicas, LoseNothingWhenOneDiesInMidCall) { SignalOneInMidCall(SIGKILL); }

TEST(ClientReplicas, LoseNothingWhenOneDrainsInMidCall) { SignalOneInMidCall(SIGTERM); }

TEST(ClientReplicas, ShareACallsShards) {
  auto first = Start("share1"), second = Start("share2");
  auto client = ConnectTo({first->address, second->address});
  Problem p = ManyShards();
  ProblemInputs in = RandomInputs(p, 1);
  Outputs got(p);
  ASSERT_TRUE(client->Forward(p, ForwardInputs(in), got.forward()).ok());
  for (RunningDaemon* daemon : {first.get(), second.get()}) {
    const double calls =
        daemon->Metric("attnd_requests_total", {{"code", "OK"}, {"method", "Forward"}});
    // There are 64, and the machine may be busy with other work.
    EXPECT_GE(calls, 8) << daemon->address;
    EXPECT_LE(calls, 56) << daemon->address;
  }
}

TEST(ClientReplicas, AreFoundByName) {
  auto daemon = Start("name");
  auto client = ConnectTo({absl::StrCat("dns:///localhost:", daemon->port)});
  Problem p = ManyShards();
  ProblemInputs in = RandomInputs(p, 1);
  Outputs got(p), expected = RunForward(*MakeCpuBackend({.threads = 1}), p, in);
  auto receipt = client->Forward(p, ForwardInputs(in), got.forward());
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  EXPECT_TRUE(got.o == expected.o);
}

// Forwards of `p`, one after the other, over a client of two daemons, the second of which is frozen
// before them. None fails, and what the frozen one holds is delayed once.
void CallWithOneFrozen(const Problem& p, absl::Duration most) {
  auto first = Start(absl::StrCat("thawed", p.q_len)),
       second = Start(absl::StrCat("frozen", p.q_len));
  auto client = ConnectTo({first->address, second->address});
  ProblemInputs in = RandomInputs(p, 1);
  Outputs expected = RunForward(*MakeCpuBackend({.threads = 1}), p, in);
  auto call = [&] {
    Outputs got(p);
    const absl::Time begun = absl::Now();
    const absl::Status status = client->Forward(p, ForwardInputs(in), got.forward()).status();
    EXPECT_EQ(status, absl::OkStatus());
    EXPECT_TRUE(got.o == expected.o);
    return absl::Now() - begun;
  };
  absl::Duration usual;
  for (int n = 0; n < 4; ++n) usual = std::max(usual, call());
  second->child->Signal(SIGSTOP);
  // Together, since on a loaded machine any of them takes longer than usual.
  constexpr int kCalls = 12;
  absl::Duration together;
  for (int n = 0; n < kCalls; ++n) together += call();
  EXPECT_LT(together, most + 10 * kCalls * usual);
  second->child->Signal(SIGCONT);
  auto calls_of_second = [&] {
    return second->Metric("attnd_requests_total", {{"code", "OK"}, {"method", "Forward"}});
  };
  const double before = calls_of_second();
  absl::Notification never;
  for (absl::Time until = absl::Now() + absl::Seconds(20);
       calls_of_second() == before && absl::Now() < until;) {
    call();
    never.WaitForNotificationWithTimeout(absl::Milliseconds(50));
  }
  EXPECT_GT(calls_of_second(), before) << "it gets calls again";
}

TEST(ClientReplicas, LoseNoSmallCallWhenOneFreezes) {
  CallWithOneFrozen(PlainProblem(1, 1, 64, 64), absl::Seconds(3));
}

// gRPC gives a tensor back when TCP has given up a write that hangs, after kWriteTimeout.
TEST(ClientReplicas, LoseNoLargeCallWhenOneFreezes) {
  CallWithOneFrozen(PlainProblem(1, 8, 2048, 64), Connections::kWriteTimeout + absl::Seconds(2));
}

// Calls that are with it as another takes its place end too: no new call finds out for them.
TEST(ClientReplicas, LoseNoCallOfAFrozenOneWhoseAddressGoes) {
  auto stays = Start("stays"), freezes = Start("freezes"), comes = Start("comes");
  const std::string list = testing::TempDir() + "/replicas_that_change";
  auto write = [&](const RunningDaemon& second) {
    std::ofstream(list + ".new") << stays->address << "\n" << second.address << "\n";
    std::filesystem::rename(list + ".new", list);
  };
  write(*freezes);
  auto client = ConnectTo({"file:" + list});
  const Problem p = PlainProblem(1, 1, 64, 64);
  const ProblemInputs in = RandomInputs(p, 1);
  auto call = [&] {
    Outputs got(p);
    // Keepalive would end them after 15 s.
    EXPECT_EQ(client->Forward(p, ForwardInputs(in), got.forward(), {.timeout = absl::Seconds(10)})
                  .status(),
              absl::OkStatus());
  };
  for (int n = 0; n < 4; ++n) call();
  freezes->child->Signal(SIGSTOP);
  std::vector<std::thread> callers;
  for (int n = 0; n < 8; ++n) callers.emplace_back(call);
  write(*comes);
  for (std::thread& caller : callers) caller.join();
  freezes->child->Signal(SIGCONT);
}

// Calls that fail at once leave nobody who would drive the connection.
TEST(ClientReplica, FindsARestartedDaemonWithoutRetries) {
  auto daemon = Start("restart_first");
  const std::string address = daemon->address;
  auto client = AttentionClient::Connect({.addresses = {address},
                                          .channels_per_address = 1,
                                          .timeout = absl::Seconds(20),
                                          .retry = {.max_attempts = 1}});
  ASSERT_TRUE(client.ok()) << client.status();
  Problem p = PlainProblem(1, 1, 8, 8);
  ProblemInputs in = RandomInputs(p, 1);
  Outputs got(p);
  auto call = [&] { return (*client)->Forward(p, ForwardInputs(in), got.forward()).status(); };
  ASSERT_EQ(call(), absl::OkStatus());
  daemon->child->Signal(SIGKILL);
  daemon->child->Wait();
  while (!absl::IsUnavailable(call())) {
  }
  Child second({"--listen", address, "--metrics_listen", "", "--cpu_threads", "1", "--backend",
                "cpu", "--drain_delay", "0"});
  absl::Notification never;
  absl::Status status;
  for (absl::Time until = absl::Now() + absl::Seconds(20); absl::Now() < until;) {
    if ((status = call()).ok()) break;
    never.WaitForNotificationWithTimeout(absl::Milliseconds(50));
  }
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace attnd
