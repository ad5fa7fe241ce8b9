// The C++ client's streamed shards against a real daemon: the engine's bytes, whatever the chunks
// and however the call is cut, and calls of which one head is larger than any message.
#include <gtest/gtest.h>

#include <memory>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "client/attention_client.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/fixtures/call_outputs.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/gated_daemon.h"

namespace attnd {
namespace {

Outputs RunEngine(const Problem& p, const ProblemInputs& in) {
  return RunWhole(*MakeCpuBackend({.threads = 2}), p, in);
}

Problem StreamedProblem() {  // 3.3 MB each of q, k, v and o
  Problem p;
  p.batch = 3;
  p.q_heads = 4;
  p.kv_heads = 2;
  p.q_len = 907;
  p.kv_len = 251;
  p.qk_head_dim = 76;
  p.v_head_dim = 60;
  return p;
}

std::unique_ptr<AttentionClient> StreamingClient(const Daemon& daemon, int64_t shard_bytes) {
  auto client = AttentionClient::Connect({.addresses = {daemon.address()},
                                          .channels_per_address = 3,
                                          .shard_bytes = shard_bytes,
                                          .stream_above_bytes = 1000});
  CHECK(client.ok()) << client.status();
  return *std::move(client);
}

TEST(ClientStream, GivesTheEnginesBytesWhateverTheLayoutTheCutAndTheChunks) {
  for (int64_t max_message : {int64_t{30011}, int64_t{16} << 20}) {  // also the chunks' size
    ServerOptions options = TestOptions();
    options.transport.max_message_bytes = max_message;
    Daemon daemon(MakeCpuBackend({.threads = 2}), options);
    for (Layout layout : {Layout::kBhld, Layout::kBlhd}) {
      Problem p = StreamedProblem();
      p.layout = layout;
      p.bias = Bias{ElementType::kFloat32, {1, 1, p.q_len, p.kv_len}, true};
      SCOPED_TRACE(testing::Message() << max_message << " " << ProblemText(p));
      ProblemInputs in = RandomInputs(p, 1);
      Outputs expected = RunEngine(p, in), got(p);
      auto client = StreamingClient(daemon, int64_t{1} << 20);
      auto receipt =
          client->Forward(p, {in.q.data(), in.k.data(), in.v.data(), nullptr, in.bias.data()},
                          {got.o.data(), got.lse.as<float>()});
      ASSERT_TRUE(receipt.ok()) << receipt.status();
      EXPECT_GT(receipt->shards, 1);
      EXPECT_TRUE(got.o == expected.o);
      EXPECT_TRUE(got.lse == expected.lse);
      receipt = client->Backward(
          p,
          {in.q.data(), in.k.data(), in.v.data(), nullptr, in.bias.data(), got.o.data(),
           got.lse.as<float>(), in.d_o.data(), in.d_lse.as<float>()},
          {got.d_q.data(), got.d_k.data(), got.d_v.data(), got.d_bias.as<float>(), nullptr});
      ASSERT_TRUE(receipt.ok()) << receipt.status();
      EXPECT_TRUE(got.d_q == expected.d_q);
      EXPECT_TRUE(got.d_k == expected.d_k);
      EXPECT_TRUE(got.d_v == expected.d_v);
      EXPECT_TRUE(got.d_bias == expected.d_bias);
    }
  }
}

TEST(ClientStream, SendsOneHeadThatNoMessageHolds) {
  Daemon daemon(MakeCpuBackend({.threads = 2}));  // messages of at most 16 MiB
  Problem p = StreamedProblem();
  p.batch = p.q_heads = p.kv_heads = 1;
  p.q_len = 60007;  // 18.2 MB of q
  p.kv_len = 5;
  p.dropout = {.threshold = 25, .seed = 1};  // so that it is not cut by rows
  ProblemInputs in = RandomInputs(p, 1);
  Outputs expected = RunEngine(p, in), got(p);
  auto receipt = StreamingClient(daemon, int64_t{8} << 20)
                     ->Forward(p, {in.q.data(), in.k.data(), in.v.data()}, {got.o.data(), nullptr});
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  EXPECT_EQ(receipt->shards, 1);
  EXPECT_EQ(receipt->bytes_received, p.OutputElements() * 4);
  EXPECT_TRUE(got.o == expected.o);
}

TEST(ClientStream, GivesTheEnginesBytesOnBothSidesOfTheLimitOfOneMessage) {
  Daemon daemon(MakeCpuBackend({.threads = 2}));
  auto client = AttentionClient::Connect({.addresses = {daemon.address()}});
  ASSERT_TRUE(client.ok()) << client.status();
  Problem p = StreamedProblem();
  p.batch = p.q_heads = p.kv_heads = p.kv_len = 1;
  p.qk_head_dim = p.v_head_dim = 64;
  p.dropout = {.threshold = 25, .seed = 1};  // so that it is not cut by rows
  for (int64_t mib : {7, 8, 9}) {
    p.q_len = mib << 12;
    if (mib == 8) p.q_len -= 1024;  // a reply has lse besides
    ProblemInputs in = RandomInputs(p, 1);
    Outputs expected = RunEngine(p, in), got(p);
    auto receipt =
        (*client)->Forward(p, {in.q.data(), in.k.data(), in.v.data()}, {got.o.data(), nullptr});
    ASSERT_TRUE(receipt.ok()) << receipt.status();
    EXPECT_EQ(receipt->shards, 1);
    EXPECT_TRUE(got.o == expected.o);
  }
}

TEST(ClientStream, EndsAtOnceWhenItsCallerStopsIt) {
  GatedDaemon gated;
  Daemon& daemon = *gated.daemon;
  gated.engine->Close();
  Problem p = StreamedProblem();
  ProblemInputs in = RandomInputs(p, 1);
  Outputs got(p);
  std::stop_source stop;
  std::thread stopper([&] {
    gated.WaitForLaunches(1);
    stop.request_stop();
  });
  auto receipt = StreamingClient(daemon, int64_t{1} << 20)
                     ->Forward(p, {in.q.data(), in.k.data(), in.v.data()}, {got.o.data(), nullptr},
                               {.stop = stop.get_token()});
  EXPECT_EQ(receipt.status().code(), absl::StatusCode::kCancelled);
  stopper.join();
  while (daemon.server().use().bytes != 0) std::this_thread::yield();
  gated.engine->Open();
}

}  // namespace
}  // namespace attnd
