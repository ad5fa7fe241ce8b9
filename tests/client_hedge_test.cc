// Hedging: a shard whose replica takes too long is sent to another one as well. The first result
// counts, the other copy is cancelled, and the budget of retries bounds it.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "attention/random_problem.h"
#include "client/cpp/attention_client.h"
#include "kernels/reference_backend.h"
#include "tests/call_outputs.h"
#include "tests/daemon_fixture.h"
#include "tests/gated_backend.h"

namespace attnd {
namespace {

Problem TwoEntries() {
  Problem p;
  p.batch = 2;
  p.q_heads = p.kv_heads = 2;
  p.q_len = p.kv_len = 12;
  p.qk_head_dim = p.v_head_dim = 8;
  return p;
}

struct Replica {
  Replica() : Replica(std::make_unique<GatedBackend>()) {}
  GatedBackend* gate;
  Daemon daemon;
  int self_tests;  // launches before any call

  void WaitForACall() { gate->WaitForLaunches(self_tests + 1); }
  int calls() const { return static_cast<int>(gate->launches().size()) - self_tests; }

 private:
  explicit Replica(std::unique_ptr<GatedBackend> engine)
      : gate(engine.get()),
        daemon(std::move(engine)),
        self_tests(static_cast<int>(gate->launches().size())) {}
};

void ExpectSame(const AlignedBytes& got, const AlignedBytes& expected, const char* name) {
  EXPECT_EQ(std::memcmp(got.data(), expected.data(), static_cast<size_t>(expected.size())), 0)
      << name;
}

class ClientHedge : public testing::TestWithParam<int64_t> {  // stream_above_bytes
 protected:
  std::unique_ptr<AttentionClient> Connect(ClientOptions options) {
    options.addresses = {slow_.daemon.address(), quick_.daemon.address()};
    options.channels_per_address = 1;
    options.stream_above_bytes = GetParam();
    auto client = AttentionClient::Connect(std::move(options));
    CHECK(client.ok()) << client.status();
    return *std::move(client);
  }
  absl::StatusOr<CallReceipt> Forward(AttentionClient& client) {
    return client.Forward(p_, ForwardInputs(in_), got_.forward());
  }

  const Problem p_ = TwoEntries();
  const ProblemInputs in_ = RandomInputs(p_, 1);
  ReferenceBackend engine_;
  const Outputs expected_ = RunWhole(engine_, p_, in_);
  Outputs got_{p_};
  Replica slow_, quick_;
};

TEST_P(ClientHedge, TakesTheResultOfTheReplicaThatIsNotStuck) {
  slow_.gate->Close();
  auto client = Connect({.hedge_after = absl::Milliseconds(20), .shard_bytes = 1});
  auto receipt = Forward(*client);
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  EXPECT_GE(receipt->hedges, 1);
  EXPECT_EQ(receipt->retries, 0);
  ExpectSame(got_.o, expected_.o, "o");
  ExpectSame(got_.lse, expected_.lse, "lse");
  receipt = client->Backward(p_, BackwardInputs(in_, got_), got_.backward());
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  ExpectSame(got_.d_q, expected_.d_q, "d_q");
  ExpectSame(got_.d_k, expected_.d_k, "d_k");
  ExpectSame(got_.d_v, expected_.d_v, "d_v");
  // The copies that lost are cancelled: nothing is left of them though the gate is shut.
  while (slow_.daemon.server().use().calls > 0) std::this_thread::yield();
}

TEST_P(ClientHedge, GivesAShardOneCopyMoreAtMost) {
  slow_.gate->Close();
  quick_.gate->Close();
  auto client = Connect({.hedge_after = absl::Milliseconds(5)});
  std::thread opener([&] {
    slow_.WaitForACall();
    quick_.WaitForACall();
    slow_.gate->Open();
    quick_.gate->Open();
  });
  auto receipt = Forward(*client);
  opener.join();
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  EXPECT_EQ(receipt->hedges, receipt->shards);
  ExpectSame(got_.o, expected_.o, "o");
}

TEST_P(ClientHedge, DoesNothingUnlessAskedTo) {
  slow_.gate->Close();
  auto client = Connect({.timeout = absl::Milliseconds(300)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(Forward(*client).status()));
  EXPECT_EQ(quick_.calls(), 0);
}

TEST_P(ClientHedge, KeepsToTheBudgetOfRetries) {
  slow_.gate->Close();
  auto client = Connect({.timeout = absl::Milliseconds(300),
                         .retry = {.budget = 0},
                         .hedge_after = absl::Milliseconds(5)});
  EXPECT_TRUE(absl::IsDeadlineExceeded(Forward(*client).status()));
  EXPECT_EQ(quick_.calls(), 0);
}

TEST_P(ClientHedge, SendsNothingTwiceThatAServerKeeps) {
  slow_.gate->Close();
  auto client = Connect({.timeout = absl::Milliseconds(300), .hedge_after = absl::Milliseconds(5)});
  Residual residual;
  auto receipt = client->Forward(p_, ForwardInputs(in_), got_.forward(), {}, &residual);
  EXPECT_TRUE(absl::IsDeadlineExceeded(receipt.status())) << receipt.status();
  EXPECT_EQ(quick_.calls(), 0);
}

INSTANTIATE_TEST_SUITE_P(UnaryAndStreamed, ClientHedge,
                         testing::Values(int64_t{1} << 30, int64_t{0}));

}  // namespace
}  // namespace attnd
