// The client on one host and the daemon on another, with a link between them that delays, loses and
// reorders: the engine's bits, and no call hangs. Both are network namespaces of this machine;
// where it allows none, the tests are skipped and say so.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "attention/random_problem.h"
#include "client/attention_client.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/fixtures/call_outputs.h"
#include "tests/fixtures/daemon_process.h"
#include "tests/fixtures/emulated_link.h"

namespace attnd {
namespace {

// 2 MB each of q, k, v and o.
Problem HostProblem() {
  Problem p = PlainProblem(4, 4, 512, 64);
  p.causal = true;
  return p;
}

class TwoHosts : public testing::Test {
 protected:
  // One link and one daemon behind it: threads stay on the host on which they began.
  static void SetUpTestSuite() {
    if (!EmulatedLink::Supported()) return;
    link_ = new EmulatedLink;
    link_->OnOtherHost([] {
      daemon_ =
          new RunningDaemon("two_hosts", {"--backend", "cpu", "--insecure", "--drain_delay", "0"},
                            link_->other_address());
    });
  }
  static void TearDownTestSuite() {
    delete std::exchange(daemon_, nullptr);
    delete std::exchange(link_, nullptr);
  }
  void SetUp() override {
    if (link_ == nullptr) GTEST_SKIP() << "no network namespaces or TUN devices here";
    link_->Change({});
  }

  static std::unique_ptr<AttentionClient> HostClient(int64_t stream_above, absl::Duration timeout) {
    auto client = AttentionClient::Connect(
        {.addresses = {daemon_->address}, .timeout = timeout, .stream_above_bytes = stream_above});
    CHECK(client.ok()) << client.status();
    return *std::move(client);
  }

  // Forward and backward across the link, streamed and unary, against the engine itself.
  static void ExpectTheEnginesBits(const EmulatedLink::Options& options) {
    link_->Change(options);
    auto engine = MakeCpuBackend({.threads = 2});
    Problem p = HostProblem();
    ProblemInputs in = RandomInputs(p, options.seed);
    Outputs expected = RunWhole(*engine, p, in);
    for (int64_t stream_above : {int64_t{0}, int64_t{1} << 40}) {
      auto client = HostClient(stream_above, absl::Minutes(2));
      Outputs got(p);
      auto forward = client->Forward(p, ForwardInputs(in), got.forward());
      EXPECT_TRUE(forward.ok()) << forward.status();
      EXPECT_TRUE(got.o == expected.o && got.lse == expected.lse);
      auto backward = client->Backward(p, BackwardInputs(in, expected), got.backward());
      EXPECT_TRUE(backward.ok()) << backward.status();
      EXPECT_TRUE(got.d_q == expected.d_q && got.d_k == expected.d_k && got.d_v == expected.d_v);
    }
  }

  static inline EmulatedLink* link_ = nullptr;
  static inline RunningDaemon* daemon_ = nullptr;
};

TEST_F(TwoHosts, GiveTheEnginesBitsOverAShortLink) {
  ExpectTheEnginesBits({.delay = absl::Milliseconds(1)});
}

TEST_F(TwoHosts, GiveTheEnginesBitsOverALongLink) {
  ExpectTheEnginesBits({.delay = absl::Milliseconds(50)});
}

TEST_F(TwoHosts, GiveTheEnginesBitsWhenPacketsAreLostAndOvertakeOthers) {
  const int64_t dropped = link_->dropped(), overtook = link_->overtook();
  ExpectTheEnginesBits({.delay = absl::Milliseconds(2), .loss = 0.01, .reorder = 0.05});
  EXPECT_GT(link_->dropped() - dropped, 10);
  EXPECT_GT(link_->overtook() - overtook, 50);
}

TEST_F(TwoHosts, EndAtTheDeadlineWhenTheLinkCarriesNothingAnyMore) {
  auto client = HostClient(int64_t{8} << 20, absl::Seconds(1));
  Problem p = HostProblem();
  ProblemInputs in = RandomInputs(p, 1);
  Outputs got(p);
  ASSERT_TRUE(client->GetServerInfo().ok());
  link_->Change({.loss = 1});
  auto forward = client->Forward(p, ForwardInputs(in), got.forward());
  EXPECT_EQ(forward.status().code(), absl::StatusCode::kDeadlineExceeded) << forward.status();
}

}  // namespace
}  // namespace attnd
