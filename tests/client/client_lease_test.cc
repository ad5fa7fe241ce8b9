// The client's residuals against real servers: the same bits with leases as without, whatever
// becomes of them, and nothing left behind.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "client/attention_client.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/fixtures/daemon_fixture.h"
#include "tests/fixtures/unique_name.h"

namespace attnd {
namespace {

std::string NewSocket() { return UniqueName("unix-abstract:attnd_lease_"); }

ServerOptions OptionsAt(const std::string& address) {
  ServerOptions options = TestOptions();
  options.listen = {address};
  return options;
}

std::unique_ptr<Daemon> NewDaemon(const ServerOptions& options) {
  return std::make_unique<Daemon>(MakeCpuBackend({.threads = 1}), options);
}

// Cuts every call into many shards.
std::unique_ptr<AttentionClient> NewClient(const std::vector<std::string>& addresses,
                                           int64_t shard_bytes = 4096,
                                           int64_t stream_above_bytes = int64_t{8} << 20) {
  ClientOptions options;
  options.addresses = addresses;
  options.channels_per_address = 2;
  options.shard_bytes = shard_bytes;
  options.stream_above_bytes = stream_above_bytes;
  auto client = AttentionClient::Connect(options);
  CHECK(client.ok()) << client.status();
  return *std::move(client);
}

// A call's tensors and results; results start as NaN.
struct Call {
  explicit Call(const Problem& p, uint64_t seed)
      : problem(p),
        in(RandomInputs(p, seed)),
        o(p.OutputElements() * ElementBytes(p.element)),
        lse(p.LseElements() * 4),
        d_q(in.q.size()),
        d_k(in.k.size()),
        d_v(in.v.size()),
        d_bias(p.bias ? p.bias->shape.elements() * 4 : 0),
        d_sink(p.batch * p.q_heads * 4) {}

  absl::StatusOr<CallReceipt> Forward(AttentionClient& client, Residual* keep) {
    return client.Forward(
        problem,
        {in.q.data(), in.k.data(), in.v.data(), in.mask_bits.as<uint8_t>(), in.bias.data()},
        {o.data(), lse.as<float>()}, {}, keep);
  }
  absl::StatusOr<CallReceipt> Backward(AttentionClient& client, const Residual* residual) {
    for (AlignedBytes* out : {&d_q, &d_k, &d_v, &d_bias, &d_sink}) {
      std::memset(out->data(), 0xff, static_cast<size_t>(out->size()));
    }
    return client.Backward(
        problem,
        {in.q.data(), in.k.data(), in.v.data(), in.mask_bits.as<uint8_t>(), in.bias.data(),
         o.data(), lse.as<float>(), in.d_o.data(), in.d_lse.as<float>()},
        {d_q.data(), d_k.data(), d_v.data(), d_bias.as<float>(), d_sink.as<float>()}, {}, residual);
  }
  std::string Gradients() const {
    std::string all;
    auto add = [&](const AlignedBytes& t) {
      all.append(reinterpret_cast<const char*>(t.data()), static_cast<size_t>(t.size()));
    };
    for (const AlignedBytes* t : {&d_q, &d_k, &d_v}) add(*t);
    if (problem.bias && problem.bias->want_gradient) add(d_bias);
    if (problem.denominator == DenominatorKind::kSink) add(d_sink);
    return all;
  }

  Problem problem;
  ProblemInputs in;
  AlignedBytes o, lse, d_q, d_k, d_v, d_bias, d_sink;
};

Problem MultiHead() {
  Problem p = PlainProblem(2, 4, 64, 64);
  p.element = ElementType::kFloat16;
  return p;
}

// One forward that is kept, and the gradients that a backward without the residual gives.
struct Kept {
  Kept(AttentionClient& client, const Problem& problem, uint64_t seed) : call(problem, seed) {
    auto forward = call.Forward(client, &residual);
    EXPECT_TRUE(forward.ok()) << forward.status();
    auto backward = call.Backward(client, nullptr);
    EXPECT_TRUE(backward.ok()) << backward.status();
    if (!forward.ok() || !backward.ok()) return;
    shards = forward->shards;
    leased = forward->leased;
    stateless_bytes = backward->bytes_sent;
    expected = call.Gradients();
  }
  // Backward by the residual gives the same bits. Returns the receipt.
  CallReceipt ExpectSame(AttentionClient& client) {
    auto backward = call.Backward(client, &residual);
    EXPECT_TRUE(backward.ok()) << backward.status();
    EXPECT_EQ(call.Gradients() == expected, true);
    return backward.ok() ? *backward : CallReceipt();
  }

  Call call;
  Residual residual;
  int64_t shards = 0, leased = 0, stateless_bytes = 0;
  std::string expected;
};

void WaitForNoLeases(Daemon& daemon) {
  while (daemon.server().leases().leases != 0 || daemon.server().staging_used() != 0) {
    std::this_thread::yield();
  }
}

TEST(ClientLease, GivesTheSameBitsInAnyNumberOfShardsWhenProblemsAreRandom) {
  auto daemon = NewDaemon(OptionsAt(NewSocket()));
  auto client = NewClient({daemon->address()});
  for (uint64_t seed = 0; seed < 80; ++seed) {
    Problem problem = RandomProblem(seed, {.max_pairs = 1 << 12, .max_head_dim = 32});
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << ProblemText(problem));
    Kept kept(*client, problem, seed);
    CallReceipt receipt = kept.ExpectSame(*client);
    EXPECT_EQ(receipt.leased, kept.leased);
    receipt = kept.ExpectSame(*client);  // a retained graph
    EXPECT_EQ(receipt.leased, kept.leased);
    if (testing::Test::HasFailure()) return;
  }
  WaitForNoLeases(*daemon);
}

TEST(ClientLease, GivesTheSameBitsWhenCallsAreStreamed) {
  ServerOptions options = OptionsAt(NewSocket());
  auto daemon = NewDaemon(options);
  auto client = NewClient({daemon->address()}, 1 << 16, 1);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Problem problem = RandomProblem(seed, {.max_pairs = 1 << 12, .max_head_dim = 32});
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << ProblemText(problem));
    Kept kept(*client, problem, seed);
    EXPECT_EQ(kept.ExpectSame(*client).leased, kept.leased);
  }
  Kept kept(*client, MultiHead(), 1);
  EXPECT_EQ(kept.leased, kept.shards);
  daemon.reset();
  daemon = NewDaemon(options);
  EXPECT_EQ(kept.ExpectSame(*client).leased, 0);
  WaitForNoLeases(*daemon);
}

TEST(ClientLease, SendsAFifthOfTheBytes) {
  auto daemon = NewDaemon(OptionsAt(NewSocket()));
  auto client = NewClient({daemon->address()});
  Kept kept(*client, MultiHead(), 1);
  kept.call.in.d_lse = AlignedBytes();
  EXPECT_GT(kept.shards, 1);
  EXPECT_EQ(kept.leased, kept.shards);
  EXPECT_GT(kept.residual.bytes_held(), 0);
  auto leased = kept.call.Backward(*client, &kept.residual);
  auto stateless = kept.call.Backward(*client, nullptr);
  ASSERT_TRUE(leased.ok() && stateless.ok());
  EXPECT_GE(stateless->bytes_sent, 5 * leased->bytes_sent);
}

TEST(ClientLease, IsGivenBackWhenItsResidualGoes) {
  auto daemon = NewDaemon(OptionsAt(NewSocket()));
  auto client = NewClient({daemon->address()});
  {
    Kept kept(*client, MultiHead(), 1);
    EXPECT_EQ(daemon->server().leases().leases, kept.shards);
    Residual moved = std::move(kept.residual);
    EXPECT_GT(moved.bytes_held(), 0);
    EXPECT_EQ(kept.residual.bytes_held(), 0);
  }
  WaitForNoLeases(*daemon);
}

TEST(ClientLease, IsGivenBackWhenTheClientGoesBeforeIt) {
  auto daemon = NewDaemon(OptionsAt(NewSocket()));
  auto client = NewClient({daemon->address()});
  Kept kept(*client, MultiHead(), 1);
  client.reset();
  WaitForNoLeases(*daemon);
  EXPECT_EQ(kept.residual.bytes_held(), 0);
  client = NewClient({daemon->address()});
  EXPECT_EQ(kept.ExpectSame(*client).leased, 0);
}

TEST(ClientLease, ResendsEverythingAfterARestart) {
  ServerOptions options = OptionsAt(NewSocket());
  auto daemon = NewDaemon(options);
  auto client = NewClient({daemon->address()});
  Kept kept(*client, MultiHead(), 1);
  daemon.reset();
  daemon = NewDaemon(options);
  CallReceipt receipt = kept.ExpectSame(*client);
  EXPECT_EQ(receipt.leased, 0);
  EXPECT_EQ(kept.residual.bytes_held(), 0);  // it is known to be lost now
  EXPECT_EQ(kept.ExpectSame(*client).bytes_sent, kept.stateless_bytes);
}

TEST(ClientLease, SendsAtOnceToAnotherReplicaWhenItsOwnIsAway) {
  auto first = NewDaemon(OptionsAt(NewSocket())), second = NewDaemon(OptionsAt(NewSocket()));
  auto client = NewClient({first->address(), second->address()});
  Kept kept(*client, MultiHead(), 1);
  EXPECT_GT(first->server().leases().leases, 0);
  EXPECT_GT(second->server().leases().leases, 0);
  EXPECT_EQ(kept.ExpectSame(*client).leased, kept.shards);  // each at its own
  int64_t seconds = second->server().leases().leases;
  first.reset();
  EXPECT_EQ(kept.ExpectSame(*client).leased, seconds);
}

TEST(ClientLease, UsesWhatWasKeptWhenOnlySomeShardsWere) {
  ServerOptions options = OptionsAt(NewSocket());
  options.leases.max_leases = 3;
  auto daemon = NewDaemon(options);
  auto client = NewClient({daemon->address()});
  Kept kept(*client, MultiHead(), 1);
  EXPECT_EQ(kept.leased, 3);
  EXPECT_GT(kept.shards, 3);
  EXPECT_EQ(kept.ExpectSame(*client).leased, 3);
}

TEST(ClientLease, IsEmptyWhenTheServerKeepsNothing) {
  ServerOptions options = OptionsAt(NewSocket());
  options.leases.memory_bytes = options.leases.caller_bytes = 0;
  auto daemon = NewDaemon(options);
  auto client = NewClient({daemon->address()});
  Kept kept(*client, MultiHead(), 1);
  EXPECT_EQ(kept.residual.bytes_held(), 0);
  EXPECT_EQ(kept.ExpectSame(*client).leased, 0);
}

TEST(ClientLease, IsNotUsedForAnotherProblem) {
  auto daemon = NewDaemon(OptionsAt(NewSocket()));
  auto client = NewClient({daemon->address()});
  Kept kept(*client, MultiHead(), 1);
  Problem causal = MultiHead();
  causal.causal = true;
  Kept other(*client, causal, 1);
  auto backward = other.call.Backward(*client, &kept.residual);
  ASSERT_TRUE(backward.ok()) << backward.status();
  EXPECT_EQ(backward->leased, 0);
  EXPECT_EQ(other.call.Gradients() == other.expected, true);
}

// A bias gradient that only backward asks for needs another cut than forward's.
TEST(ClientLease, IsNotUsedWhenTheBiasGradientNeedsAnotherCut) {
  auto daemon = NewDaemon(OptionsAt(NewSocket()));
  auto client = NewClient({daemon->address()});
  Problem problem = MultiHead();
  for (bool forward_knows : {false, true}) {
    problem.bias = Bias{ElementType::kFloat32, {1, 1, 64, 64}, forward_knows};
    Call call(problem, 1);
    Residual residual;
    ASSERT_TRUE(call.Forward(*client, &residual).ok());
    call.problem.bias->want_gradient = true;
    ASSERT_TRUE(call.Backward(*client, nullptr).ok());
    std::string expected = call.Gradients();
    auto backward = call.Backward(*client, &residual);
    ASSERT_TRUE(backward.ok()) << backward.status();
    EXPECT_EQ(backward->leased > 0, forward_knows);
    EXPECT_EQ(call.Gradients() == expected, true);
  }
}

TEST(ClientLease, ServesSeveralBackwardsAtOnceAndLosesThemAllTogether) {
  ServerOptions options = OptionsAt(NewSocket());
  auto daemon = NewDaemon(options);
  auto client = NewClient({daemon->address()});
  Kept kept(*client, MultiHead(), 1);
  for (bool lost : {false, true}) {
    if (lost) {
      daemon.reset();
      daemon = NewDaemon(options);
    }
    std::vector<std::thread> threads;
    for (int n = 0; n < 4; ++n) {
      threads.emplace_back([&] {
        Call mine(MultiHead(), 1);
        std::memcpy(mine.o.data(), kept.call.o.data(), static_cast<size_t>(mine.o.size()));
        std::memcpy(mine.lse.data(), kept.call.lse.data(), static_cast<size_t>(mine.lse.size()));
        auto backward = mine.Backward(*client, &kept.residual);
        EXPECT_TRUE(backward.ok()) << backward.status();
        EXPECT_EQ(mine.Gradients() == kept.expected, true);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(ClientLease, IsRenewedWhileItsResidualLives) {
  ServerOptions options = OptionsAt(NewSocket());
  auto daemon = NewDaemon(options);
  ClientOptions short_lived;
  short_lived.addresses = {daemon->address()};
  short_lived.residual_ttl = absl::Seconds(3);
  auto client = AttentionClient::Connect(short_lived);
  ASSERT_TRUE(client.ok());
  Kept kept(**client, MultiHead(), 1);
  absl::Time end = daemon->server().leases().next_end;
  while (daemon->server().leases().next_end <= end) std::this_thread::yield();
  EXPECT_EQ(kept.ExpectSame(**client).leased, kept.shards);
}

}  // namespace
}  // namespace attnd
