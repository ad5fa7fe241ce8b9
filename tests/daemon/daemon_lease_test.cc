// Residual leases end to end: a real server, a generated client. The same bits with a lease as
// without, and every way of losing one.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference_backend.h"
#include "tests/daemon/lease_caller.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/gated_daemon.h"
#include "tests/fixtures/unique_name.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

// Room for three leases of SmallProblem(), two of one caller; nothing is held for long.
ServerOptions LeaseOptions() {
  ServerOptions options = TestOptions();
  options.token_file = TokenFile();
  options.leases.min_hold = absl::Hours(1);
  return options;
}

void WaitForNothing(Daemon& daemon) {
  while (daemon.server().use().bytes != 0 || daemon.server().use().lease_bytes != 0 ||
         daemon.server().staging_used() != 0) {
    std::this_thread::yield();
  }
}

void ExpectSameGradients(const v1::BackwardResponse& a, const v1::BackwardResponse& b) {
  EXPECT_EQ(a.d_q(), b.d_q());
  EXPECT_EQ(a.d_k(), b.d_k());
  EXPECT_EQ(a.d_v(), b.d_v());
  EXPECT_EQ(a.d_bias(), b.d_bias());
  EXPECT_EQ(a.d_sink(), b.d_sink());
}

TEST(DaemonLease, GivesBitwiseTheGradientsOfAStatelessBackwardWhenProblemsAreRandom) {
  Daemon daemon(MakeCpuBackend({.threads = 2}), LeaseOptions());
  LeaseCaller alice(daemon, kAlice);
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Problem problem = RandomProblem(seed, {.max_pairs = 1 << 12, .max_head_dim = 64});
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << ProblemText(problem));
    v1::ForwardResponse forward = alice.Keep(problem, seed);
    ASSERT_TRUE(forward.has_residual());
    v1::BackwardRequest whole = MakeBackward(problem, seed, forward);
    v1::BackwardResponse expected, got, again;
    ASSERT_TRUE(alice.Backward(whole, &expected).ok());
    v1::BackwardRequest leased = Leased(whole, forward.residual().token());
    grpc::Status status = alice.Backward(leased, &got);
    ASSERT_TRUE(status.ok()) << status.error_message();
    ExpectSameGradients(got, expected);
    ASSERT_TRUE(alice.Backward(leased, &again).ok());  // retried
    ExpectSameGradients(again, expected);
    EXPECT_TRUE(alice.Release(forward.residual().token()).ok());
  }
  WaitForNothing(daemon);
  EXPECT_EQ(daemon.server().leases().leases, 0);
}

TEST(DaemonLease, TellsHowLongAndHowMuchItHolds) {
  Daemon daemon(std::make_unique<ReferenceBackend>(), LeaseOptions());
  LeaseCaller alice(daemon, kAlice);
  absl::Time before = absl::Now();
  v1::Residual residual = alice.Keep(SmallProblem(), 1, 60000).residual();
  absl::Time expires = absl::FromUnixMillis(static_cast<int64_t>(residual.expires_unix_ms()));
  EXPECT_GE(expires, before + absl::Seconds(59.9));
  EXPECT_LE(expires, absl::Now() + absl::Seconds(60.1));
  EXPECT_EQ(residual.bytes_held(), daemon.server().leases().bytes);
  EXPECT_EQ(residual.bytes_held(), daemon.server().use().lease_bytes);
  v1::Residual longer;
  EXPECT_TRUE(alice.Renew(residual.token(), 600000, &longer).ok());
  EXPECT_GT(longer.expires_unix_ms(), residual.expires_unix_ms() + 500000);
  EXPECT_EQ(longer.token(), residual.token());

  v1::GetServerInfoResponse info;
  grpc::ClientContext context;
  context.AddMetadata("authorization", absl::StrCat("Bearer ", kAlice));
  ASSERT_TRUE(daemon.stub().GetServerInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.residual().memory_bytes(), 32 << 20);
  EXPECT_EQ(info.residual().ttl_ms(), 120000);
}

TEST(DaemonLease, KnowsATokenOfAnotherReplica) {
  ServerOptions options = LeaseOptions();
  Daemon first(std::make_unique<ReferenceBackend>(), options);
  options.listen = {"127.0.0.1:0", UniqueName("unix-abstract:replica_")};
  Daemon second(std::make_unique<ReferenceBackend>(), options);
  LeaseCaller alice(first, kAlice), elsewhere(second, kAlice);
  v1::ForwardResponse forward = alice.Keep(SmallProblem());
  v1::BackwardRequest whole = MakeBackward(SmallProblem(), 1, forward);
  ExpectError(elsewhere.Backward(Leased(whole, forward.residual().token())),
              grpc::StatusCode::FAILED_PRECONDITION, "WRONG_REPLICA");
  EXPECT_TRUE(alice.Backward(Leased(whole, forward.residual().token())).ok());
}

TEST(DaemonLease, RefusesAnotherCaller) {
  Daemon daemon(std::make_unique<ReferenceBackend>(), LeaseOptions());
  LeaseCaller alice(daemon, kAlice), bob(daemon, kBob);
  v1::ForwardResponse forward = alice.Keep(SmallProblem());
  const std::string& token = forward.residual().token();
  v1::BackwardRequest leased = Leased(MakeBackward(SmallProblem(), 1, forward), token);
  constexpr grpc::StatusCode kDenied = grpc::StatusCode::PERMISSION_DENIED;
  ExpectError(bob.Backward(leased), kDenied, "LEASE_NOT_OWNED");
  ExpectError(bob.Renew(token, 0), kDenied, "LEASE_NOT_OWNED");
  ExpectError(bob.Release(token), kDenied, "LEASE_NOT_OWNED");
  EXPECT_TRUE(alice.Backward(leased).ok());
}

TEST(DaemonLease, RefusesForgedAndMalformedTokens) {
  Daemon daemon(std::make_unique<ReferenceBackend>(), LeaseOptions());
  LeaseCaller alice(daemon, kAlice);
  v1::ForwardResponse forward = alice.Keep(SmallProblem());
  v1::BackwardRequest whole = MakeBackward(SmallProblem(), 1, forward);
  std::string forged = forward.residual().token();
  forged.back() = static_cast<char>(forged.back() ^ 1);
  ExpectError(alice.Backward(Leased(whole, forged)), grpc::StatusCode::PERMISSION_DENIED,
              "LEASE_NOT_OWNED");
  ExpectError(alice.Backward(Leased(whole, "token")), grpc::StatusCode::INVALID_ARGUMENT,
              "BAD_FIELD");
  ExpectError(alice.Release(""), grpc::StatusCode::INVALID_ARGUMENT, "BAD_FIELD");
  const grpc::Status renewed = alice.Renew("token", 0);
  EXPECT_EQ(renewed.error_message(),
            "token: expected a token that Forward gave, got another text of 5 bytes");
  EXPECT_EQ(ErrorInfoOf(renewed).metadata().at("field"), "token");
  EXPECT_EQ(daemon.server().leases().leases, 1);
}

TEST(DaemonLease, IsLostAfterReleaseExpiryAndRestart) {
  auto daemon = std::make_unique<Daemon>(std::make_unique<ReferenceBackend>(), LeaseOptions());
  auto alice = std::make_unique<LeaseCaller>(*daemon, kAlice);
  v1::ForwardResponse released = alice->Keep(SmallProblem());
  v1::BackwardRequest whole = MakeBackward(SmallProblem(), 1, released);
  EXPECT_TRUE(alice->Release(released.residual().token()).ok());
  EXPECT_TRUE(alice->Release(released.residual().token()).ok());  // twice
  constexpr grpc::StatusCode kLost = grpc::StatusCode::FAILED_PRECONDITION;
  grpc::Status status = alice->Backward(Leased(whole, released.residual().token()));
  ExpectError(status, kLost, "LEASE_LOST");
  EXPECT_EQ(ErrorInfoOf(status).metadata().at("cause"), "released");

  v1::ForwardResponse expired = alice->Keep(SmallProblem(), 1, 1);
  while (daemon->server().leases().leases != 0) std::this_thread::yield();  // Expire comes
  status = alice->Backward(Leased(whole, expired.residual().token()));
  ExpectError(status, kLost, "LEASE_LOST");
  EXPECT_EQ(ErrorInfoOf(status).metadata().at("cause"), "expired");
  ExpectError(alice->Renew(expired.residual().token(), 0), kLost, "LEASE_LOST");

  std::string token = alice->Keep(SmallProblem()).residual().token();
  daemon = std::make_unique<Daemon>(std::make_unique<ReferenceBackend>(), LeaseOptions());
  alice = std::make_unique<LeaseCaller>(*daemon, kAlice);
  ExpectError(alice->Backward(Leased(whole, token)), kLost, "EPOCH_CHANGED");
  EXPECT_TRUE(alice->Release(token).ok());
}

TEST(DaemonLease, RefusesABackwardOfAnotherProblem) {
  Daemon daemon(std::make_unique<ReferenceBackend>(), LeaseOptions());
  LeaseCaller alice(daemon, kAlice);
  v1::ForwardResponse forward = alice.Keep(SmallProblem());
  Problem other = SmallProblem();
  other.softcap = 3;
  v1::BackwardRequest leased = Leased(MakeBackward(other, 1, forward), forward.residual().token());
  ExpectError(alice.Backward(leased), grpc::StatusCode::FAILED_PRECONDITION, "LEASE_MISMATCH");
}

TEST(DaemonLease, KeepsUpToTheCallersQuotaAndNotOneMore) {
  ServerOptions options = LeaseOptions();
  {
    Daemon daemon(std::make_unique<ReferenceBackend>(), options);
    options.leases.caller_bytes =
        2 * static_cast<int64_t>(
                LeaseCaller(daemon, kAlice).Keep(SmallProblem()).residual().bytes_held());
  }
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  LeaseCaller alice(daemon, kAlice), bob(daemon, kBob);
  std::string first = alice.Keep(SmallProblem()).residual().token();
  EXPECT_TRUE(alice.Keep(SmallProblem()).has_residual());
  EXPECT_FALSE(alice.Keep(SmallProblem()).has_residual());  // the forward itself succeeds
  EXPECT_TRUE(bob.Keep(SmallProblem()).has_residual());
  EXPECT_TRUE(alice.Release(first).ok());
  EXPECT_TRUE(alice.Keep(SmallProblem()).has_residual());
}

TEST(DaemonLease, KeepsNothingWhenSwitchedOff) {
  ServerOptions options = LeaseOptions();
  options.leases.memory_bytes = options.leases.caller_bytes = 0;
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  EXPECT_FALSE(LeaseCaller(daemon, kAlice).Keep(SmallProblem()).has_residual());
  WaitForNothing(daemon);
}

// A lease is a favour: a call that needs its memory gets it.
TEST(DaemonLease, GivesWayToACallThatNeedsItsMemory) {
  ServerOptions options = LeaseOptions();
  options.admission.memory_bytes = options.admission.caller_max_bytes = int64_t{1} << 20;
  options.leases.memory_bytes = options.leases.caller_bytes = int64_t{1} << 20;
  options.leases.min_hold = absl::ZeroDuration();
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  LeaseCaller alice(daemon, kAlice), bob(daemon, kBob);
  std::vector<v1::ForwardResponse> kept;
  while (daemon.server().leases().bytes < int64_t{3} << 18)
    kept.push_back(alice.Keep(SmallProblem()));
  Problem large = SmallProblem(1024, 4);  // half of the memory
  v1::ForwardResponse reply;
  grpc::Status status = bob.Forward(MakeForward(large, 1), &reply);
  EXPECT_TRUE(status.ok()) << status.error_message();
  v1::BackwardRequest whole = MakeBackward(SmallProblem(), 1, kept.front());
  status = alice.Backward(Leased(whole, kept.front().residual().token()));
  ExpectError(status, grpc::StatusCode::FAILED_PRECONDITION, "LEASE_LOST");
  EXPECT_EQ(ErrorInfoOf(status).metadata().at("cause"), "evicted");
  EXPECT_TRUE(alice.Backward(Leased(whole, kept.back().residual().token())).ok());
}

TEST(DaemonLease, IsNotTakenAwayWithinItsMinimumHold) {
  ServerOptions options = LeaseOptions();
  options.admission.memory_bytes = options.admission.caller_max_bytes = int64_t{1} << 20;
  options.leases.memory_bytes = options.leases.caller_bytes = int64_t{1} << 20;
  Daemon daemon(std::make_unique<ReferenceBackend>(), options);
  LeaseCaller alice(daemon, kAlice), bob(daemon, kBob);
  while (daemon.server().leases().bytes < int64_t{3} << 18) alice.Keep(SmallProblem());
  v1::ForwardResponse reply;
  ExpectError(bob.Forward(MakeForward(SmallProblem(1024, 4), 1), &reply),
              grpc::StatusCode::UNAVAILABLE, "MEMORY_PRESSURE");
}

TEST(DaemonLease, StaysUnderARunningBackwardThatOutlivesIt) {
  GatedDaemon gated(LeaseOptions());
  Daemon& daemon = *gated.daemon;
  LeaseCaller alice(daemon, kAlice);
  v1::ForwardResponse forward = alice.Keep(SmallProblem());
  v1::BackwardRequest whole = MakeBackward(SmallProblem(), 1, forward);
  v1::BackwardResponse expected, got;
  ASSERT_TRUE(alice.Backward(whole, &expected).ok());
  const int launches = gated.launches();
  gated.engine->Close();
  grpc::Status status;
  std::thread running(
      [&] { status = alice.Backward(Leased(whole, forward.residual().token()), &got); });
  gated.WaitForLaunches(launches + 1);
  EXPECT_TRUE(alice.Release(forward.residual().token()).ok());
  EXPECT_EQ(daemon.server().leases().leases, 0);
  EXPECT_GT(daemon.server().use().lease_bytes, 0);
  // These would land in its memory, were it free.
  std::thread others([&] {
    v1::ForwardResponse reply;
    EXPECT_TRUE(LeaseCaller(daemon, kBob).Forward(MakeForward(SmallProblem(), 2), &reply).ok());
  });
  while (daemon.server().use().calls < 2) std::this_thread::yield();
  gated.engine->Open();
  running.join();
  others.join();
  ASSERT_TRUE(status.ok()) << status.error_message();
  ExpectSameGradients(got, expected);
  WaitForNothing(daemon);
}

TEST(DaemonLease, ReplacesTheResidualOfARetriedForward) {
  Daemon daemon(std::make_unique<ReferenceBackend>(), LeaseOptions());
  LeaseCaller alice(daemon, kAlice);
  v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
  request.mutable_options()->set_keep_residual(true);
  request.mutable_options()->set_request_id("7b0c");
  v1::ForwardResponse first, second;
  ASSERT_TRUE(alice.Forward(request, &first).ok());
  ASSERT_TRUE(alice.Forward(request, &second).ok());
  EXPECT_EQ(daemon.server().leases().leases, 1);
  v1::BackwardRequest whole = MakeBackward(SmallProblem(), 1, second);
  EXPECT_TRUE(alice.Backward(Leased(whole, second.residual().token())).ok());
  EXPECT_FALSE(alice.Backward(Leased(whole, first.residual().token())).ok());
}

TEST(DaemonLease, ReleasesManyAtOnce) {
  Daemon daemon(std::make_unique<ReferenceBackend>(), LeaseOptions());
  LeaseCaller alice(daemon, kAlice);
  std::vector<std::string> tokens;
  for (int n = 0; n < 10; ++n) tokens.push_back(alice.Keep(SmallProblem()).residual().token());
  EXPECT_TRUE(alice.Release("", tokens).ok());
  WaitForNothing(daemon);
  ExpectError(alice.Release("", std::vector<std::string>(1025, tokens[0])),
              grpc::StatusCode::INVALID_ARGUMENT, "BAD_FIELD");
}

TEST(DaemonLease, IsNotLeftBehindByCancelledForwards) {
  GatedDaemon gated(LeaseOptions());
  Daemon& daemon = *gated.daemon;
  gated.engine->Close();
  for (int n = 0; n < 20; ++n) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", absl::StrCat("Bearer ", kAlice));
    v1::ForwardRequest request = MakeForward(SmallProblem(), 1);
    request.mutable_options()->set_keep_residual(true);
    v1::ForwardResponse reply;
    std::thread caller([&] { (void)daemon.stub().Forward(&context, request, &reply); });
    while (daemon.server().use().calls == 0) std::this_thread::yield();
    context.TryCancel();
    caller.join();
    while (daemon.server().use().calls != 0) std::this_thread::yield();
  }
  gated.engine->Open();
  WaitForNothing(daemon);
}

}  // namespace
}  // namespace attnd
