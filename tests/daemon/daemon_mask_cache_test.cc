// Which masks a daemon remembers, for whom and how long, and what it refuses: a real server, a
// generated client, two callers.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cli/metrics_text.h"
#include "kernels/cpu/cpu_backend.h"
#include "proto/attnd/v1/problem_codec.h"
#include "tests/daemon/lease_caller.h"
#include "tests/daemon/masked_request.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/wire_request.h"

namespace attnd {
namespace {

constexpr grpc::StatusCode kLost = grpc::StatusCode::FAILED_PRECONDITION;

ServerOptions TwoCallers() {
  ServerOptions options = TestOptions();
  options.token_file = TokenFile();
  options.leases.min_hold = absl::Hours(1);
  return options;
}

// Masks of one size: the memory of each is the same.
Problem Masked(int number) {
  return WithMask(SmallProblem(64, 1), absl::StrCat("window(", 10 + number, ",0)"));
}

int64_t BytesOfOne() { return Masked(0).mask->bytes(); }

class MaskCaller : public LeaseCaller {
 public:
  using LeaseCaller::LeaseCaller;
  // Sends the mask.
  v1::ForwardResponse Send(const Problem& p) {
    v1::ForwardResponse reply;
    const grpc::Status status = Forward(MakeForward(p, 1), &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply;
  }
  // Names it.
  grpc::Status Name(const Problem& p, v1::ForwardResponse* reply) {
    return Forward(ByMaskId(MakeForward(p, 1), IdOf(p)), reply);
  }
  bool Knows(const Problem& p) {
    v1::ForwardResponse reply;
    const grpc::Status status = Name(p, &reply);
    if (!status.ok()) ExpectError(status, kLost, "MASK_UNKNOWN");
    return status.ok();
  }
};

TEST(DaemonMaskCache, ACallerNamesOnlyWhatItHasSent) {
  Daemon daemon(MakeCpuBackend({.threads = 1}), TwoCallers());
  MaskCaller alice(daemon, kAlice), bob(daemon, kBob);
  const Problem p = Masked(0);
  EXPECT_FALSE(alice.Knows(p));
  const v1::ForwardResponse sent = alice.Send(p);
  v1::ForwardResponse named;
  ASSERT_TRUE(alice.Name(p, &named).ok());
  EXPECT_EQ(named.o(), sent.o());
  EXPECT_EQ(named.lse(), sent.lse());
  EXPECT_FALSE(bob.Knows(p));  // though the thread that decodes has just seen the same bytes
  alice.Send(p);
  bob.Send(p);
  EXPECT_TRUE(bob.Knows(p));
  EXPECT_EQ(daemon.server().masks().masks, 1);  // stored once
}

TEST(DaemonMaskCache, AQuotaTakesTheCallersOwnOldest) {
  ServerOptions options = TwoCallers();
  options.masks.bytes_of_caller = 2 * BytesOfOne();
  Daemon daemon(MakeCpuBackend({.threads = 1}), options);
  MaskCaller alice(daemon, kAlice), bob(daemon, kBob);
  bob.Send(Masked(9));
  for (int number : {0, 1}) alice.Send(Masked(number));
  EXPECT_TRUE(alice.Knows(Masked(0)));  // and has used it last
  alice.Send(Masked(2));
  EXPECT_TRUE(alice.Knows(Masked(0)));
  EXPECT_FALSE(alice.Knows(Masked(1)));
  EXPECT_TRUE(alice.Knows(Masked(2)));
  EXPECT_TRUE(bob.Knows(Masked(9)));
}

TEST(DaemonMaskCache, TheOldestOfAllGoesWhenMemoryIsShort) {
  ServerOptions options = TwoCallers();
  options.masks.bytes = options.masks.bytes_of_caller = 3 * BytesOfOne();
  Daemon daemon(MakeCpuBackend({.threads = 1}), options);
  MaskCaller alice(daemon, kAlice), bob(daemon, kBob);
  alice.Send(Masked(0));
  alice.Send(Masked(1));
  bob.Send(Masked(2));
  EXPECT_TRUE(alice.Knows(Masked(0)));
  bob.Send(Masked(3));
  EXPECT_FALSE(alice.Knows(Masked(1)));
  EXPECT_TRUE(alice.Knows(Masked(0)));
  EXPECT_TRUE(bob.Knows(Masked(2)));
  for (int number = 4; number < 40; ++number) bob.Send(Masked(number));
  EXPECT_EQ(daemon.server().masks().bytes, 3 * BytesOfOne());
}

TEST(DaemonMaskCache, AnIdleMaskIsForgotten) {
  FakeClock clock(absl::Now());
  ServerOptions options = TwoCallers();
  options.masks.idle = absl::Seconds(20);  // calls have a minute
  Daemon daemon(MakeCpuBackend({.threads = 1}), options, clock);
  MaskCaller alice(daemon, kAlice);
  alice.Send(Masked(0));
  alice.Send(Masked(1));
  clock.Advance(absl::Seconds(18));
  EXPECT_TRUE(alice.Knows(Masked(0)));
  clock.Advance(absl::Seconds(4));
  EXPECT_TRUE(alice.Knows(Masked(0)));
  EXPECT_FALSE(alice.Knows(Masked(1)));
  EXPECT_EQ(daemon.server().masks().masks, 1);
}

// The lease holds the mask, not its name.
TEST(DaemonMaskCache, ALeasedBackwardNamesItsMaskOrSendsItAgain) {
  ServerOptions options = TwoCallers();
  options.masks.bytes = options.masks.bytes_of_caller = BytesOfOne();
  Daemon daemon(MakeCpuBackend({.threads = 1}), options);
  MaskCaller alice(daemon, kAlice);
  const Problem p = Masked(0);
  const v1::ForwardResponse forward = alice.Keep(p);
  const v1::BackwardRequest whole = MakeBackward(p, 1, forward);
  const v1::BackwardRequest leased = Leased(whole, forward.residual().token());
  const v1::BackwardRequest named = ByMaskId(leased, IdOf(p));
  v1::BackwardResponse expected, gradients;
  ASSERT_TRUE(alice.Backward(whole, &expected).ok());
  const auto expect_same = [&] {
    EXPECT_EQ(gradients.d_q(), expected.d_q());
    EXPECT_EQ(gradients.d_k(), expected.d_k());
    EXPECT_EQ(gradients.d_v(), expected.d_v());
  };
  ASSERT_TRUE(alice.Backward(named, &gradients).ok());
  expect_same();
  alice.Send(Masked(1));  // in its place
  ExpectError(alice.Backward(named), kLost, "MASK_UNKNOWN");
  const grpc::Status again = alice.Backward(leased, &gradients);  // the lease is still there
  ASSERT_TRUE(again.ok()) << again.error_message();
  expect_same();
  alice.Send(Masked(1));
  v1::BackwardRequest other = leased;
  *other.mutable_problem() = EncodeProblem(Masked(1));
  ExpectError(alice.Backward(other), kLost, "LEASE_MISMATCH");
}

TEST(DaemonMaskCache, MetricsCountWhatIsKnown) {
  ServerOptions options = TwoCallers();
  options.metrics_listen = "127.0.0.1:0";
  Daemon daemon(MakeCpuBackend({.threads = 1}), options);
  MaskCaller alice(daemon, kAlice);
  EXPECT_FALSE(alice.Knows(Masked(0)));
  alice.Send(Masked(0));
  for (int n = 0; n < 3; ++n) EXPECT_TRUE(alice.Knows(Masked(0)));
  const auto text =
      FetchMetrics(absl::StrCat("http://127.0.0.1:", daemon.server().metrics_port(), "/metrics"),
                   absl::Seconds(20));
  ASSERT_TRUE(text.ok()) << text.status();
  const auto metrics = MetricsText::Parse(*text);
  ASSERT_TRUE(metrics.ok()) << metrics.status();
  EXPECT_EQ(metrics->Sum("attnd_mask_cache_bytes", {}), BytesOfOne());
  EXPECT_EQ(metrics->Sum("attnd_mask_cache_hits_total", {}), 3);
  EXPECT_EQ(metrics->Sum("attnd_mask_cache_misses_total", {}), 1);
  EXPECT_EQ(metrics->Sum("attnd_masks_compiled_total", {}), 1);
  EXPECT_EQ(metrics->Sum("attnd_mask_calls_waiting", {}), 0);
  EXPECT_GT(metrics->Sum("attnd_mask_compile_seconds_total", {}), 0);
  EXPECT_GT(metrics->Sum("attnd_mask_plan_bytes", {}), 0);
}

// ---- What is refused, whoever asks: Forward, Backward, CompileMask and a stream alike.

struct Refused {
  std::string name;
  v1::Problem problem;
  grpc::StatusCode code;
  std::string reason, message;
};

// Strides of primes: every tile is mixed.
Problem TooComplex() {
  Problem p = SmallProblem(int64_t{1} << 20, 1);
  std::string text = "stride(7)";
  for (int prime : {11, 13, 17, 19, 23, 29, 31}) absl::StrAppend(&text, " | stride(", prime, ")");
  return WithMask(p, text);
}

// Makes a problem whose mask has one pattern.
v1::Problem WithExpr(const v1::Expr& expr) {
  v1::Problem p = EncodeProblem(WithMask(SmallProblem(64, 1), "causal"));
  *p.mutable_mask()->mutable_pattern(0)->mutable_expr() = expr;
  return p;
}

// So many negations of a window.
v1::Expr Deep(int levels) {
  v1::Expr expr;
  expr.mutable_window()->set_left(3);
  for (int n = 1; n < levels; ++n) {
    v1::Expr outer;
    *outer.mutable_negate() = std::move(expr);
    expr = std::move(outer);
  }
  return expr;
}

v1::Expr Wide(int operands) {
  v1::Expr expr;
  for (int n = 0; n < operands; ++n) {
    expr.mutable_any_of()->add_e()->mutable_window()->set_left(n);
  }
  return expr;
}

// Makes masks that go beyond a limit by one.
std::vector<Refused> MasksBeyondLimits() {
  constexpr grpc::StatusCode kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
  const v1::Problem small = EncodeProblem(WithMask(SmallProblem(64, 1), "causal"));
  v1::Problem patterns = small, rectangles = small, inside = small, beside_id = small;
  for (int n = 0; n < 4096; ++n) *patterns.mutable_mask()->add_pattern() = small.mask().pattern(0);
  auto& of = *rectangles.mutable_mask()->mutable_pattern(0)->mutable_rectangles();
  for (int n = 0; n < 65537; ++n) of.add_of();
  auto& rows = *inside.mutable_mask()->mutable_pattern(0)->mutable_row_intervals();
  for (int n = 0; n < (1 << 20) + 1; ++n) rows.mutable_begin()->add_value(0);
  beside_id.mutable_mask()->set_id(std::string(32, 'x'));
  return {
      {"Patterns", patterns, kInvalid, "BAD_FIELD",
       "problem.mask.pattern: expected at most 4096 patterns, got 4097"},
      {"Nodes", WithExpr(Wide(4096)), kInvalid, "BAD_FIELD",
       "expected at most 4096 nodes in a pattern with what it refers to, got more"},
      {"Depth", WithExpr(Deep(17)), kInvalid, "BAD_FIELD", "expected depth 16 at most, got more"},
      {"Rectangles", rectangles, kInvalid, "BAD_FIELD",
       "problem.mask.pattern[0].rectangles.of: expected at most 65536 rectangles, got 65537"},
      {"Inside", inside, kInvalid, "BAD_FIELD",
       "problem.mask: expected at most 1048576 numbers as `value` of its lists, more in "
       "mask_data, got 1048577"},
      {"BesideId", beside_id, kInvalid, "BAD_FIELD",
       "problem.mask.id: expected nothing but origin beside it, got more"},
  };
}

std::vector<Refused> RefusedMasks() {
  constexpr grpc::StatusCode kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
  const Problem small = SmallProblem(64, 1);
  v1::Problem window = EncodeProblem(WithMask(small, "window(3,0)"));
  window.mutable_mask()->mutable_pattern(0)->mutable_expr()->mutable_window()->set_left(-2);
  v1::Problem short_id = EncodeProblem(small), unknown = EncodeProblem(small);
  short_id.mutable_mask()->set_id("short");
  unknown.mutable_mask()->set_id(std::string(32, 'x'));
  const v1::Problem empty =
      EncodeProblem(WithMask(small, "prefix(1) & window(3,3)", EmptyRow::kReject));
  return {
      {"Window", window, kInvalid, "BAD_FIELD",
       "problem.mask.pattern[0].expr.window.left: expected"},
      {"ShortId", short_id, kInvalid, "BAD_FIELD",
       "problem.mask.id: expected 32 bytes, got 5 bytes"},
      {"UnknownId", unknown, kLost, "MASK_UNKNOWN", "problem.mask.id: not known"},
      {"EmptyRow", empty, kInvalid, "EMPTY_ROW", "got none for row 4 of head 0"},
      {"TooComplex", EncodeProblem(TooComplex()), grpc::StatusCode::OUT_OF_RANGE,
       "MASK_TOO_COMPLEX", "problem.mask.pattern[0]: expected at most"},
  };
}

class DaemonMaskRefuses : public testing::TestWithParam<Refused> {
 protected:
  // None of the calls brings tensors: the mask is looked at first.
  void Expect(const grpc::Status& status) {
    ExpectError(status, GetParam().code, GetParam().reason);
    EXPECT_TRUE(absl::StrContains(status.error_message(), GetParam().message))
        << status.error_message();
    if (GetParam().reason != "BAD_FIELD") return;
    const auto detail = ErrorInfoOf(status).metadata();
    const std::string text = absl::StrCat(detail.at("field"), ": expected ", detail.at("expected"),
                                          ", got ", detail.at("got"));
    EXPECT_EQ(status.error_message(), text);
  }
  Daemon daemon_{MakeCpuBackend({.threads = 1})};
};

TEST_P(DaemonMaskRefuses, EveryCallAlike) {
  v1::ForwardRequest forward;
  *forward.mutable_problem() = GetParam().problem;
  v1::BackwardRequest backward;
  *backward.mutable_problem() = GetParam().problem;
  v1::CompileMaskRequest compile;
  *compile.mutable_problem() = GetParam().problem;
  v1::ForwardStreamRequest header;
  *header.mutable_header() = forward;
  grpc::ClientContext contexts[4];
  v1::ForwardResponse o;
  Expect(daemon_.stub().Forward(&contexts[0], forward, &o));
  v1::BackwardResponse gradients;
  Expect(daemon_.stub().Backward(&contexts[1], backward, &gradients));
  v1::CompileMaskResponse report;
  Expect(daemon_.stub().CompileMask(&contexts[2], compile, &report));
  auto stream = daemon_.stub().ForwardStream(&contexts[3]);
  stream->Write(header);
  stream->WritesDone();
  Expect(stream->Finish());
  EXPECT_EQ(daemon_.server().use().calls, 0);
}

INSTANTIATE_TEST_SUITE_P(All, DaemonMaskRefuses, testing::ValuesIn(RefusedMasks()),
                         [](const auto& test) { return test.param.name; });
INSTANTIATE_TEST_SUITE_P(Limits, DaemonMaskRefuses, testing::ValuesIn(MasksBeyondLimits()),
                         [](const auto& test) { return test.param.name; });

// One call's mask is compiled, one waits.
TEST(DaemonMaskCache, ACallersWaitingMasksAreItsQuota) {
  ServerOptions options = TwoCallers();
  options.admission.caller_max_calls = 1;
  Daemon daemon(MakeCpuBackend({.threads = 1}), options);
  std::atomic<int> refused{0};
  std::vector<std::thread> calls;
  for (int64_t n = 0; n < 6; ++n) {
    calls.emplace_back([&, n] {
      v1::ForwardRequest request;
      *request.mutable_problem() = EncodeProblem(SlowMask(n));
      v1::ForwardResponse reply;
      const grpc::Status status = LeaseCaller(daemon, kAlice).Forward(request, &reply);
      if (status.error_code() == grpc::StatusCode::INVALID_ARGUMENT) return;  // it has no tensors
      ExpectError(status, grpc::StatusCode::RESOURCE_EXHAUSTED, "TENANT_QUOTA");
      ++refused;
    });
  }
  MaskCaller bob(daemon, kBob);
  while (refused == 0) bob.Send(Masked(0));  // beside them
  for (std::thread& call : calls) call.join();
  EXPECT_LT(refused, 6);
}

// An eighth of a device's memory is for one call's tiles: half a megabyte of them here.
TEST(DaemonMaskCache, TilesAreAnEighthOfADevicesMemory) {
  ServerOptions options = TestOptions();
  Problem p = SmallProblem(2048, 1);
  p.qk_head_dim = p.v_head_dim = 1;
  p = WithMask(p, "random_blocks(4,200)");
  for (const int64_t mib : {8, 3}) {
    options.admission.memory_bytes = options.admission.caller_max_bytes = mib << 20;
    Daemon daemon(MakeCpuBackend({.threads = 1}), options);
    grpc::ClientContext context;
    v1::ForwardResponse reply;
    const grpc::Status status = daemon.stub().Forward(&context, MakeForward(p, 1), &reply);
    if (mib == 8) {
      EXPECT_TRUE(status.ok()) << status.error_message();
    } else {
      ExpectError(status, grpc::StatusCode::OUT_OF_RANGE, "TOO_LARGE_FOR_DEVICE");
      EXPECT_TRUE(absl::StrContains(status.error_message(), "problem.mask: its tiles: at most "))
          << status.error_message();
    }
  }
}

// 1024 tiles, each with a bitmap of its own.
TEST(DaemonMaskCache, TilesThatACallHoldsAreMemory) {
  ServerOptions options = TestOptions();
  options.admission.memory_bytes = options.admission.caller_max_bytes = 400 << 10;
  Daemon daemon(MakeCpuBackend({.threads = 1}), options);
  Problem p = SmallProblem(2048, 1);
  p.qk_head_dim = p.v_head_dim = 1;
  const auto forward = [&daemon](const Problem& problem) {
    grpc::ClientContext context;
    v1::ForwardResponse reply;
    return daemon.stub().Forward(&context, MakeForward(problem, 1), &reply);
  };
  const grpc::Status without = forward(p);
  EXPECT_TRUE(without.ok()) << without.error_message();
  ExpectError(forward(WithMask(p, "random_blocks(4,200)")), grpc::StatusCode::OUT_OF_RANGE,
              "TOO_LARGE_FOR_DEVICE");
  EXPECT_EQ(daemon.server().use().calls, 0);
}

}  // namespace
}  // namespace attnd
