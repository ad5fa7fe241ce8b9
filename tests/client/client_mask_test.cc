// The client's masks by description against real daemons: the engine's bits however a call is cut,
// and whatever a daemon has forgotten; large masks travel once.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/problem.h"
#include "attention/random_problem.h"
#include "client/attention_client.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/fixtures/call_outputs.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/unique_name.h"
#include "tests/masks/small_masks.h"

namespace attnd {
namespace {

Problem Sized(int64_t length) {
  Problem p;
  p.batch = 2;
  p.q_heads = 4;
  p.kv_heads = 2;
  p.q_len = p.kv_len = length;
  p.qk_head_dim = p.v_head_dim = 32;
  return p;
}

Problem WithMask(Problem p, std::vector<MaskPattern> patterns, std::vector<uint32_t> pattern_of) {
  SetMask(SpecOf(std::move(patterns), std::move(pattern_of)), p);
  return p;
}

// Some kilobytes, another pattern for every other head.
Problem WithLists(int64_t length = 256) {
  RowIntervals intervals{.r = 1};
  for (int64_t row = 0; row < length; ++row) {
    intervals.begin.push_back(static_cast<uint32_t>(row * 37 % (length / 2)));
    intervals.end.push_back(intervals.begin.back() + static_cast<uint32_t>(row * 13 % 90));
  }
  return WithMask(Sized(length), {std::move(intervals), Window(40, 9)}, {0, 1, 0, 1});
}

std::unique_ptr<AttentionClient> Connect(std::vector<std::string> addresses, int64_t shard_bytes) {
  auto client =
      AttentionClient::Connect({.addresses = std::move(addresses), .shard_bytes = shard_bytes});
  CHECK(client.ok()) << client.status();
  return *std::move(client);
}

std::unique_ptr<AttentionClient> Connect(const std::string& address, int64_t shard_bytes) {
  return Connect(std::vector<std::string>{address}, shard_bytes);
}

struct Result {
  Outputs out;
  CallReceipt forward, backward;
};

Result Both(AttentionClient& client, const Problem& p, const ProblemInputs& in) {
  Result run{.out = Outputs(p), .forward = {}, .backward = {}};
  auto forward = client.Forward(p, ForwardInputs(in), run.out.forward());
  CHECK(forward.ok()) << forward.status();
  auto backward = client.Backward(p, BackwardInputs(in, run.out), run.out.backward());
  CHECK(backward.ok()) << backward.status();
  run.forward = *forward;
  run.backward = *backward;
  return run;
}

TEST(ClientMask, GivesTheEnginesBitsHoweverItIsCut) {
  Daemon daemon(MakeCpuBackend({.threads = 2}));
  auto engine = MakeCpuBackend({.threads = 2});
  const Problem p = WithLists();
  const ProblemInputs in = RandomInputs(p, 1);
  const Outputs expected = RunWhole(*engine, p, in);
  for (int64_t shard_bytes : {1 << 24, 100'000, 30'000}) {
    const Result run = Both(*Connect(daemon.address(), shard_bytes), p, in);
    EXPECT_TRUE(run.out == expected);
    EXPECT_GE(run.forward.shards, shard_bytes < 1 << 24 ? 2 : 1);
  }
}

TEST(ClientMask, AWindowByDescriptionIsAWindow) {
  Daemon daemon(MakeCpuBackend({.threads = 2}));
  auto client = Connect(daemon.address(), 1 << 24);
  Problem option = Sized(200);
  option.window_left = 30;
  option.window_right = 2;
  const Problem p = WithMask(Sized(200), {Window(30, 2)}, {0});
  const ProblemInputs in = RandomInputs(option, 3);
  EXPECT_TRUE(Both(*client, p, in).out == Both(*client, option, in).out);
}

TEST(ClientMask, ALargeMaskTravelsOnce) {
  Daemon daemon(MakeCpuBackend({.threads = 2}));
  auto client = Connect(daemon.address(), 1 << 24);
  const Problem p = WithLists();
  const ProblemInputs in = RandomInputs(p, 1);
  const Result first = Both(*client, p, in);
  ASSERT_EQ(first.forward.shards, 1);
  uint64_t named = static_cast<uint64_t>(first.backward.shards);  // all calls but the first
  EXPECT_EQ(daemon.server().masks().hits, named);
  const Result second = Both(*client, p, in);
  EXPECT_TRUE(second.out == first.out);
  named += static_cast<uint64_t>(second.forward.shards + second.backward.shards);
  EXPECT_EQ(daemon.server().masks().hits, named);
  EXPECT_EQ(daemon.server().masks().misses, 0u);
}

TEST(ClientMask, EachReplicaAsksForAMaskOnce) {
  Daemon one(MakeCpuBackend({.threads = 1})), two(MakeCpuBackend({.threads = 1}));
  auto client = Connect({one.address(), two.address()}, 1 << 24);
  const Problem p = WithLists();
  const ProblemInputs in = RandomInputs(p, 1);
  for (int round = 0; round < 6; ++round) Both(*client, p, in);  // they take turns
  EXPECT_EQ(one.server().masks().misses + two.server().masks().misses, 1u);
  EXPECT_GE(one.server().masks().hits, 2u);
  EXPECT_GE(two.server().masks().hits, 2u);
}

TEST(ClientMask, NobodyNoticesThatADaemonHasForgotten) {
  const std::string address = UniqueName("unix-abstract:attnd_mask_");
  ServerOptions options = TestOptions();
  options.listen = {address};
  auto daemon = std::make_unique<Daemon>(MakeCpuBackend({.threads = 2}), options);
  auto client = Connect(address, 30'000);
  const Problem p = WithLists();
  const ProblemInputs in = RandomInputs(p, 1);
  const Outputs first = Both(*client, p, in).out;
  daemon.reset();
  daemon = std::make_unique<Daemon>(MakeCpuBackend({.threads = 2}), options);
  const Result again = Both(*client, p, in);
  EXPECT_TRUE(again.out == first);
  EXPECT_GE(daemon->server().masks().misses, 1u);
}

TEST(ClientMask, NobodyNoticesThatThereIsNoRoom) {
  ServerOptions options = TestOptions();
  options.masks = {.bytes = 4096, .bytes_of_caller = 4096};
  Daemon daemon(MakeCpuBackend({.threads = 2}), options);
  auto client = Connect(daemon.address(), 1 << 24);
  const ProblemInputs in = RandomInputs(Sized(256), 1);
  auto engine = MakeCpuBackend({.threads = 2});
  for (int round = 0; round < 3; ++round) {
    for (int64_t length : {256, 512}) {
      const Problem p = WithLists(length);
      const ProblemInputs inputs = RandomInputs(p, 1);
      EXPECT_TRUE(Both(*client, p, inputs).out == RunWhole(*engine, p, inputs));
    }
  }
  EXPECT_LE(daemon.server().masks().bytes, 4096);
}

TEST(ClientMask, ABackwardOnALeaseOutlivesItsMask) {
  ServerOptions options = TestOptions();
  options.masks = {.bytes = 20'000, .bytes_of_caller = 20'000};
  Daemon daemon(MakeCpuBackend({.threads = 2}), options);
  auto client = Connect(daemon.address(), 1 << 24);
  auto engine = MakeCpuBackend({.threads = 2});
  const Problem p = WithLists();
  const ProblemInputs in = RandomInputs(p, 1);
  Outputs out(p);
  Residual kept;
  auto forward = client->Forward(p, ForwardInputs(in), out.forward(), {}, &kept);
  ASSERT_TRUE(forward.ok()) << forward.status();
  for (int64_t length : {300, 400, 500, 600, 700}) {  // push it out
    const Problem other = WithLists(length);
    Both(*client, other, RandomInputs(other, 2));
  }
  auto backward = client->Backward(p, BackwardInputs(in, out), out.backward(), {}, &kept);
  ASSERT_TRUE(backward.ok()) << backward.status();
  EXPECT_TRUE(out == RunWhole(*engine, p, in));
}

// More than a megabyte of lists on the wire, and more than a message of the daemons below takes.
Problem WithLongLists() {
  Problem p = Sized(4096);
  p.batch = 1;
  p.q_heads = p.kv_heads = 1;
  p.kv_len = 2048;
  p.qk_head_dim = p.v_head_dim = 8;
  RowIntervals intervals{.r = 100};
  for (uint32_t row = 0; row < 4096; ++row) {
    for (uint32_t run = 0; run < 100; ++run) {
      intervals.begin.push_back(20 * run);
      intervals.end.push_back(20 * run + 1 + (row * 7 + run) % 13);
    }
  }
  return WithMask(p, {std::move(intervals)}, {0});
}

ServerOptions SmallMessages(const std::string& address) {
  ServerOptions options = TestOptions();
  options.listen = {address};
  options.transport.max_message_bytes = 1 << 20;
  return options;
}

// Over TCP in chunks, over a unix socket in shared memory; whole, by id, and whole again.
TEST(ClientMask, AMaskLargerThanAMessageIsAMask) {
  const std::string path = UniqueName("unix:/tmp/attnd_client_mask_");
  auto engine = MakeCpuBackend({.threads = 2});
  const Problem p = WithLongLists();
  const ProblemInputs in = RandomInputs(p, 1);
  const Outputs expected = RunWhole(*engine, p, in);
  for (const std::string& address : {std::string("127.0.0.1:0"), path}) {
    SCOPED_TRACE(address);
    auto daemon = std::make_unique<Daemon>(MakeCpuBackend({.threads = 2}), SmallMessages(address));
    auto client = Connect(daemon->address(), 1 << 24);
    const Result first = Both(*client, p, in);
    EXPECT_TRUE(first.out == expected);
    EXPECT_EQ(first.forward.shared, address == path ? 1 : 0);
    EXPECT_EQ(daemon->server().masks().hits, 1u);  // the backward's
    if (address != path) continue;
    daemon.reset();
    daemon = std::make_unique<Daemon>(MakeCpuBackend({.threads = 2}), SmallMessages(address));
    EXPECT_TRUE(Both(*client, p, in).out == expected);
    EXPECT_EQ(daemon->server().masks().hits, 1u);
  }
}

TEST(ClientMask, ALongMaskThatADaemonRefusesSaysTheLimit) {
  ServerOptions options = SmallMessages("127.0.0.1:0");
  options.masks.bytes_of_caller = 1 << 20;
  Daemon daemon(MakeCpuBackend({.threads = 2}), options);
  const Problem p = WithLongLists();
  const ProblemInputs in = RandomInputs(p, 1);
  Outputs out(p);
  const absl::Status status =
      Connect(daemon.address(), 1 << 24)->Forward(p, ForwardInputs(in), out.forward()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << status;
  EXPECT_NE(status.message().find("mask_data: expected at most 1048576 bytes"),
            absl::string_view::npos)
      << status;
}

// Between the forward and a backward on its residual; sooner or later, wherever it is.
TEST(ClientMask, ALeasedBackwardOutlivesARestartAndAnothersMasks) {
  const std::string address = UniqueName("unix-abstract:attnd_lease_");
  ServerOptions options = TestOptions();
  options.listen = {address};
  auto engine = MakeCpuBackend({.threads = 2});
  const Problem p = WithLists();
  const ProblemInputs in = RandomInputs(p, 1);
  const Outputs expected = RunWhole(*engine, p, in);
  auto daemon = std::make_unique<Daemon>(MakeCpuBackend({.threads = 2}), options);
  auto client = Connect(address, 1 << 24), stranger = Connect(address, 1 << 24);
  for (const char* what : {"a restart", "a foreign caller"}) {
    SCOPED_TRACE(what);
    Outputs out(p);
    Residual kept;
    auto forward = client->Forward(p, ForwardInputs(in), out.forward(), {}, &kept);
    ASSERT_TRUE(forward.ok()) << forward.status();
    EXPECT_EQ(forward->leased, 1);
    if (what == std::string("a restart")) {
      daemon.reset();
      daemon = std::make_unique<Daemon>(MakeCpuBackend({.threads = 2}), options);
    } else {
      const Problem other = WithLists(320);
      Both(*stranger, other, RandomInputs(other, 2));
      EXPECT_TRUE(Both(*stranger, p, in).out == expected);
    }
    auto backward = client->Backward(p, BackwardInputs(in, out), out.backward(), {}, &kept);
    ASSERT_TRUE(backward.ok()) << backward.status();
    EXPECT_TRUE(out == expected);
  }
}

// Its daemon is gone: the other has neither residual nor mask.
TEST(ClientMask, ALeasedBackwardGoesToAnotherReplica) {
  auto engine = MakeCpuBackend({.threads = 2});
  const Problem p = WithLists();
  const ProblemInputs in = RandomInputs(p, 1);
  const Outputs expected = RunWhole(*engine, p, in);
  auto one = std::make_unique<Daemon>(MakeCpuBackend({.threads = 1}));
  auto two = std::make_unique<Daemon>(MakeCpuBackend({.threads = 1}));
  auto client = Connect({one->address(), two->address()}, 1 << 24);
  Outputs out(p);
  Residual kept;
  auto forward = client->Forward(p, ForwardInputs(in), out.forward(), {}, &kept);
  ASSERT_TRUE(forward.ok()) << forward.status();
  (one->server().leases().leases > 0 ? one : two).reset();
  auto backward = client->Backward(p, BackwardInputs(in, out), out.backward(), {}, &kept);
  ASSERT_TRUE(backward.ok()) << backward.status();
  EXPECT_TRUE(out == expected);
}

TEST(ClientMask, SaysWhatIsWrong) {
  Daemon daemon(MakeCpuBackend({.threads = 2}));
  auto client = Connect(daemon.address(), 1 << 24);
  Problem p = WithLists();
  p.mask_origin.row_begin = 1;  // its last row lies outside
  const ProblemInputs in = RandomInputs(Sized(256), 1);
  Outputs out(p);
  auto forward = client->Forward(p, ForwardInputs(in), out.forward());
  EXPECT_EQ(forward.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(forward.status().message().find("problem.mask.extents.rows"), absl::string_view::npos)
      << forward.status();
}

}  // namespace
}  // namespace attnd
