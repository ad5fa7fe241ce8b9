// The C++ client cutting one head by rows and by keys, against a real daemon: the engine's bits
// where it promises them, and where parts are merged its numbers within rounding.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "attention/random_problem.h"
#include "client/attention_client.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/fixtures/call_outputs.h"
#include "tests/fixtures/daemon_fixture.h"

namespace attnd {
namespace {

// Eight query heads on one KV head: 2 MiB of q and o, 0.5 MiB of k and v together.
Problem MultiQuery() {
  Problem p;
  p.batch = p.kv_heads = 1;
  p.q_heads = 8;
  p.q_len = p.kv_len = 1024;
  p.qk_head_dim = p.v_head_dim = 64;
  p.causal = true;
  p.denominator = DenominatorKind::kSink;
  p.sink_logits.assign(8, 0.5f);
  return p;
}

std::unique_ptr<AttentionClient> Client(const Daemon& daemon, bool merge) {
  auto client = AttentionClient::Connect(
      {.addresses = {daemon.address()}, .shard_bytes = 300'000, .merge_partial_results = merge});
  CHECK(client.ok()) << client.status();
  return *std::move(client);
}

float LargestDifference(const AlignedBytes& a, const AlignedBytes& b) {
  float largest = 0;
  for (int64_t n = 0; n < a.size() / 4; ++n) {
    // Written so that NaN counts.
    const float difference = std::abs(a.as<float>()[n] - b.as<float>()[n]);
    if (!(difference <= largest)) largest = difference;
  }
  return largest;
}

// Each row's own to the bit, the sums of several pieces up to rounding.
void ExpectGradientsAddedUp(const Outputs& got, const Outputs& expected) {
  EXPECT_TRUE(got.d_q == expected.d_q);
  EXPECT_LT(LargestDifference(got.d_k, expected.d_k), 1e-4f);
  EXPECT_LT(LargestDifference(got.d_v, expected.d_v), 1e-4f);
  EXPECT_LT(LargestDifference(got.d_sink, expected.d_sink), 1e-3f);
}

TEST(ClientCut, GivesTheEnginesBitsForwardByRows) {
  Daemon daemon(MakeCpuBackend({.threads = 2}));
  auto engine = MakeCpuBackend({.threads = 2});
  for (Layout layout : {Layout::kBhld, Layout::kBlhd}) {
    Problem p = MultiQuery();
    p.layout = layout;
    ProblemInputs in = RandomInputs(p, 1);
    Outputs expected = RunWhole(*engine, p, in), got(p);
    auto client = Client(daemon, false);
    auto forward = client->Forward(p, ForwardInputs(in), got.forward());
    ASSERT_TRUE(forward.ok()) << forward.status();
    EXPECT_GE(forward->shards, 3);
    EXPECT_TRUE(got.o == expected.o && got.lse == expected.lse);
    auto backward = client->Backward(p, BackwardInputs(in, expected), got.backward());
    ASSERT_TRUE(backward.ok()) << backward.status();
    EXPECT_EQ(backward->shards, 1);
    EXPECT_TRUE(got.d_k == expected.d_k);
  }
}

TEST(ClientCut, SendsFewerShardsAtATimeWhenItsQuotaAsksForThat) {
  ServerOptions options = TestOptions();
  options.admission.caller_max_calls = 1;
  Daemon daemon(MakeCpuBackend({.threads = 2}), options);
  auto engine = MakeCpuBackend({.threads = 2});
  const Problem p = MultiQuery();
  const ProblemInputs in = RandomInputs(p, 1);
  Outputs expected = RunWhole(*engine, p, in), got(p);
  // A few attempts: a reply may come before the daemon counts its call as over.
  auto client = AttentionClient::Connect(
      {.addresses = {daemon.address()}, .retry = {.max_attempts = 3}, .shard_bytes = 100'000});
  ASSERT_TRUE(client.ok()) << client.status();
  auto forward = (*client)->Forward(p, ForwardInputs(in), got.forward());
  ASSERT_TRUE(forward.ok()) << forward.status();
  EXPECT_GE(forward->shards, 4);
  EXPECT_TRUE(got.o == expected.o && got.lse == expected.lse);
}

TEST(ClientCut, AddsUpGradientsOfRowsWhereItMay) {
  Daemon daemon(MakeCpuBackend({.threads = 2}));
  auto engine = MakeCpuBackend({.threads = 2});
  Problem p = MultiQuery();
  ProblemInputs in = RandomInputs(p, 1);
  Outputs expected = RunWhole(*engine, p, in), got(p);
  auto client = Client(daemon, true);
  Residual kept;  // of one shard: servers know shards by entries and heads
  auto forward = client->Forward(p, ForwardInputs(in), got.forward(), {}, &kept);
  ASSERT_TRUE(forward.ok()) << forward.status();
  EXPECT_EQ(forward->shards, 1);
  auto leased = client->Backward(p, BackwardInputs(in, expected), got.backward(), {}, &kept);
  ASSERT_TRUE(leased.ok()) << leased.status();
  EXPECT_EQ(leased->leased, 1);
  EXPECT_TRUE(got.d_k == expected.d_k);
  auto backward = client->Backward(p, BackwardInputs(in, expected), got.backward());
  ASSERT_TRUE(backward.ok()) << backward.status();
  EXPECT_GE(backward->shards, 3);
  ExpectGradientsAddedUp(got, expected);
}

// These rows go with the first that see some: pieces have like shares of the scores.
TEST(ClientCut, AddsUpGradientsWhereSomeRowsSeeNoKey) {
  Daemon daemon(MakeCpuBackend({.threads = 2}));
  auto engine = MakeCpuBackend({.threads = 2});
  Problem p = MultiQuery();
  p.kv_len = 256;
  p.alignment = Alignment::kBottomRight;  // the first 768 rows
  ProblemInputs in = RandomInputs(p, 1);
  Outputs expected = RunWhole(*engine, p, in), got(p);
  auto backward = Client(daemon, true)->Backward(p, BackwardInputs(in, expected), got.backward());
  ASSERT_TRUE(backward.ok()) << backward.status();
  EXPECT_GE(backward->shards, 3);
  ExpectGradientsAddedUp(got, expected);
}

TEST(ClientCut, MergesPartsOfLongKeysWhereItMay) {
  Daemon daemon(MakeCpuBackend({.threads = 2}));
  auto engine = MakeCpuBackend({.threads = 2});
  Problem p = MultiQuery();
  p.q_len = 32;
  p.kv_len = 16384;  // 8 MiB of k and v
  p.alignment = Alignment::kBottomRight;
  ProblemInputs in = RandomInputs(p, 1);
  Outputs expected = RunWhole(*engine, p, in);
  for (bool merge : {false, true}) {
    for (bool want_lse : {false, true}) {
      Outputs got(p);
      ForwardOutputs out = got.forward();
      if (!want_lse) out.lse = nullptr;
      auto forward = Client(daemon, merge)->Forward(p, ForwardInputs(in), out);
      ASSERT_TRUE(forward.ok()) << forward.status();
      if (!merge) {
        EXPECT_EQ(forward->shards, 1);
        EXPECT_TRUE(got.o == expected.o);
        continue;
      }
      EXPECT_GE(forward->shards, 4);
      EXPECT_LT(LargestDifference(got.o, expected.o), 1e-6f);
      if (want_lse) {
        EXPECT_LT(LargestDifference(got.lse, expected.lse), 1e-5f);
      }
    }
  }
}

}  // namespace
}  // namespace attnd
