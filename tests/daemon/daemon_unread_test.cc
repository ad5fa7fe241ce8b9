// Replies that their peer does not read: they are cut, and the memory they hold comes back.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attention/random_problem.h"
#include "kernels/reference_backend.h"
#include "tests/daemon/shut_peer.h"
#include "tests/fixtures/daemon_counts.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/pipeline_fixture.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

constexpr int kConnections = 6, kCalls = 60;
constexpr char kForward[] = "/attnd.v1.Attention/Forward";

grpc::Status Call(v1::Attention::Stub& stub, const v1::ForwardRequest& request) {
  grpc::ClientContext context;
  v1::ForwardResponse reply;
  return stub.Forward(&context, request, &reply);
}

double CutForReason(Daemon& daemon, const char* reason) {
  return Counts(daemon).Of("attnd_calls_cut_total",
                           {{"method", "Forward"}, {"stage", "send"}, {"reason", reason}});
}

// Six connections of 60 small calls each, and a large call of another caller.
TEST(DaemonUnread, GivesTheMemoryOfUnaryRepliesBackThatNoPeerReads) {
  FakeClock clock(absl::Now());
  ServerOptions options = TestOptions();
  options.admission.memory_bytes = options.admission.caller_max_bytes = int64_t{10} << 20;
  Daemon daemon(std::make_unique<ReferenceBackend>(), WithMetrics(options), clock);
  const std::string request = MakeForward(SmallProblem(16, 16), 1).SerializeAsString();
  std::vector<std::unique_ptr<RawHttp2>> peers;
  for (int n = 0; n < kConnections; ++n) {
    peers.push_back(Shut(daemon));
    for (uint32_t call = 0; call < kCalls; ++call)
      Ask(*peers.back(), 2 * call + 1, kForward, request);
  }
  for (auto& peer : peers) {
    while (peer->answers() < kCalls) peer->Read(100);  // the beginnings of the replies
  }
  Problem problem = SmallProblem(32768, 4);
  problem.kv_len = 1;
  const v1::ForwardRequest large = MakeForward(problem, 1);
  EXPECT_EQ(ErrorInfoOf(Call(daemon.stub(), large)).reason(), "MEMORY_PRESSURE");
  clock.Advance(options.transport.transfers.idle + absl::Seconds(1));
  while (daemon.server().use().bytes != 0) std::this_thread::yield();
  EXPECT_EQ(daemon.server().staging_used(), 0);
  EXPECT_GT(CutForReason(daemon, "idle"), kConnections * kCalls / 2);  // some were refused
  const grpc::Status status = Call(daemon.stub(), large);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST(DaemonUnread, CutsAReplyWhenTheLongestTimeOfACallIsOver) {
  FakeClock clock(absl::Now());
  ServerOptions options = TestOptions();
  options.admission.max_deadline = absl::Seconds(5);
  Daemon daemon(std::make_unique<ReferenceBackend>(), WithMetrics(options), clock);
  auto peer = Shut(daemon);
  Ask(*peer, 1, kForward, MakeForward(SmallProblem(64, 2), 1).SerializeAsString());
  while (peer->answers() == 0) peer->Read(100);  // the reply's beginning
  clock.Advance(absl::Seconds(6));
  while (daemon.server().use().bytes != 0) std::this_thread::yield();
  EXPECT_EQ(CutForReason(daemon, "too_long"), 1);
  EXPECT_EQ(CutForReason(daemon, "idle"), 0);
}

TEST(DaemonUnread, LeavesAReplyAloneThatIsReadAtLast) {
  Daemon daemon(std::make_unique<ReferenceBackend>(), WithMetrics());
  auto peer = Shut(daemon);
  Ask(*peer, 1, kForward, MakeForward(SmallProblem(64, 2), 1).SerializeAsString());
  while (peer->answers() == 0) peer->Read(100);
  EXPECT_EQ(peer->bytes_of(1), 0);
  peer->Grant(1, 1 << 20);
  while (!peer->is_over(1)) peer->Read(100);
  EXPECT_GT(peer->bytes_of(1), 64 * 2);
  while (daemon.server().use().bytes != 0) std::this_thread::yield();
  EXPECT_EQ(CutForReason(daemon, "idle"), 0);
}

}  // namespace
}  // namespace attnd
