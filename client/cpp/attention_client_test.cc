#include "client/cpp/attention_client.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <stop_token>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "client/cpp/fake_server.h"
#include "kernels/reference_backend.h"

namespace attnd {
namespace {

// Outputs start as NaN, so an element that nobody writes differs.
AlignedBytes Unwritten(int64_t bytes) {
  AlignedBytes tensor(bytes);
  std::memset(tensor.data(), 0xff, bytes);
  return tensor;
}

struct Outputs {
  explicit Outputs(const Problem& p)
      : o(Unwritten(p.OutputElements() * ElementBytes(p.element))),
        lse(Unwritten(p.LseElements() * 4)),
        d_q(Unwritten(p.QueryElements() * ElementBytes(p.element))),
        d_k(Unwritten(p.KeyElements() * ElementBytes(p.element))),
        d_v(Unwritten(p.ValueElements() * ElementBytes(p.element))),
        d_bias(Unwritten(p.bias ? p.bias->shape.elements() * 4 : 0)),
        d_sink(Unwritten(p.batch * p.q_heads * 4)) {}
  AlignedBytes o, lse, d_q, d_k, d_v, d_bias, d_sink;

  ForwardOutputs forward() { return {o.data(), lse.as<float>()}; }
  BackwardOutputs backward() {
    return {d_q.data(), d_k.data(), d_v.data(), d_bias.as<float>(), d_sink.as<float>()};
  }
};

ForwardTensors ForwardInputs(const ProblemInputs& in) {
  return {in.q.data(), in.k.data(), in.v.data(), in.mask_bits.as<uint8_t>(), in.bias.data()};
}

BackwardTensors BackwardInputs(const ProblemInputs& in, const Outputs& out) {
  return {in.q.data(),         in.k.data(),  in.v.data(),         in.mask_bits.as<uint8_t>(),
          in.bias.data(),      out.o.data(), out.lse.as<float>(), in.d_o.data(),
          in.d_lse.as<float>()};
}

// What the engine gives when nothing is cut.
Outputs Unsharded(const Problem& p, const ProblemInputs& in) {
  Outputs out(p);
  ForwardCall forward{.problem = &p,
                      .q = in.q.data(),
                      .k = in.k.data(),
                      .v = in.v.data(),
                      .mask_bits = in.mask_bits.as<uint8_t>(),
                      .bias = in.bias.data(),
                      .o = out.o.data(),
                      .lse = out.lse.as<float>()};
  EXPECT_TRUE(ReferenceBackend().Forward({forward}).ok());
  BackwardCall backward{.problem = &p,
                        .q = in.q.data(),
                        .k = in.k.data(),
                        .v = in.v.data(),
                        .mask_bits = in.mask_bits.as<uint8_t>(),
                        .bias = in.bias.data(),
                        .o = out.o.data(),
                        .lse = out.lse.as<float>(),
                        .d_o = in.d_o.data(),
                        .d_lse = in.d_lse.as<float>(),
                        .d_q = out.d_q.data(),
                        .d_k = out.d_k.data(),
                        .d_v = out.d_v.data(),
                        .d_bias = out.d_bias.as<float>(),
                        .d_sink = out.d_sink.as<float>()};
  EXPECT_TRUE(ReferenceBackend().Backward({backward}).ok());
  return out;
}

bool Same(const AlignedBytes& a, const AlignedBytes& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

std::unique_ptr<AttentionClient> Connected(ClientOptions options) {
  absl::StatusOr<std::unique_ptr<AttentionClient>> client =
      AttentionClient::Connect(std::move(options));
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

std::string SocketPath(const char* name) {
  return absl::StrCat("unix:", testing::TempDir(), "/", name, ".", getpid());
}

Problem SmallProblem() {
  Problem p;
  p.batch = 2;
  p.q_heads = p.kv_heads = 2;
  p.q_len = p.kv_len = 8;
  p.qk_head_dim = p.v_head_dim = 16;
  return p;
}

// A problem, its inputs and a place for its outputs.
struct Case {
  explicit Case(const Problem& problem) : p(problem), in(RandomInputs(p, 1)), out(p) {}
  absl::StatusOr<CallReceipt> Forward(AttentionClient& client, const CallOptions& options = {}) {
    return client.Forward(p, ForwardInputs(in), out.forward(), options);
  }
  Problem p;
  ProblemInputs in;
  Outputs out;
};

TEST(AttentionClient, GivesTheUnshardedBitsHoweverACallIsCut) {
  FakeServer server("127.0.0.1:0");
  for (int64_t shard_bytes : {int64_t{1}, int64_t{20'000}, int64_t{8} << 20}) {
    auto client = Connected({.addresses = {server.address()}, .shard_bytes = shard_bytes});
    for (uint64_t seed = 0; seed < 150; ++seed) {
      Problem p = RandomProblem(seed, {.max_pairs = 1 << 10, .max_head_dim = 40});
      ProblemInputs in = RandomInputs(p, seed);
      SCOPED_TRACE(absl::StrCat("seed ", seed, " shard_bytes ", shard_bytes, ": ", ProblemText(p)));
      Outputs expected = Unsharded(p, in), got(p);
      absl::StatusOr<CallReceipt> forward = client->Forward(p, ForwardInputs(in), got.forward());
      ASSERT_TRUE(forward.ok()) << forward.status();
      EXPECT_TRUE(Same(got.o, expected.o) && Same(got.lse, expected.lse));
      absl::StatusOr<CallReceipt> backward =
          client->Backward(p, BackwardInputs(in, expected), got.backward());
      ASSERT_TRUE(backward.ok()) << backward.status();
      EXPECT_TRUE(Same(got.d_q, expected.d_q) && Same(got.d_k, expected.d_k) &&
                  Same(got.d_v, expected.d_v));
      if (p.bias && p.bias->want_gradient) EXPECT_TRUE(Same(got.d_bias, expected.d_bias));
      if (p.denominator == DenominatorKind::kSink) EXPECT_TRUE(Same(got.d_sink, expected.d_sink));
      if (shard_bytes > 20'000) EXPECT_EQ(forward->shards, 1);
    }
  }
}

}  // namespace
}  // namespace attnd
