#include "kernels/reference_backend.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "attention/random_problem.h"
#include "attention/reference.h"

namespace attnd {
namespace {

constexpr float kUntouched = 12345;

// A small problem with every tensor of both directions.
struct Fixture {
  Problem p{.batch = 2,
            .q_heads = 2,
            .kv_heads = 1,
            .q_len = 5,
            .kv_len = 7,
            .qk_head_dim = 3,
            .v_head_dim = 4,
            .element = ElementType::kFloat16};
  ProblemInputs in;
  AlignedBytes o, d_q, d_k, d_v;
  std::vector<float> lse, d_bias, d_sink;

  explicit Fixture(BroadcastShape bias) {
    p.bias = Bias{ElementType::kFloat32, bias, true};
    p.denominator = DenominatorKind::kSink;
    p.sink_logits = {0.5f, -1.0f};
    in = RandomInputs(p, 1);
    o = AlignedBytes(2 * p.OutputElements());
    d_q = AlignedBytes(2 * p.QueryElements());
    d_k = AlignedBytes(2 * p.KeyElements());
    d_v = AlignedBytes(2 * p.ValueElements());
    lse.resize(p.LseElements(), kUntouched);
    d_bias.resize(bias.elements(), kUntouched);
    d_sink.resize(p.batch * p.q_heads, kUntouched);
  }

  ForwardCall Forward() {
    ForwardCall call;
    call.problem = &p;
    call.q = in.q.data();
    call.k = in.k.data();
    call.v = in.v.data();
    call.bias = in.bias.data();
    call.o = o.data();
    call.lse = lse.data();
    return call;
  }
  BackwardCall Backward() {
    BackwardCall call;
    call.problem = &p;
    call.q = in.q.data();
    call.k = in.k.data();
    call.v = in.v.data();
    call.bias = in.bias.data();
    call.o = o.data();
    call.lse = lse.data();
    call.d_o = in.d_o.data();
    call.d_q = d_q.data();
    call.d_k = d_k.data();
    call.d_v = d_v.data();
    call.d_bias = d_bias.data();
    call.d_sink = d_sink.data();
    return call;
  }
};

void RunBoth(Fixture& f) {
  ReferenceBackend backend;
  ForwardCall forward = f.Forward();
  ASSERT_TRUE(backend.Forward({&forward, 1}).ok());
  BackwardCall backward = f.Backward();
  ASSERT_TRUE(backend.Backward({&backward, 1}).ok());
}

TEST(ReferenceBackend, RoundsEachResultOnceToItsElementType) {
  Fixture f({1, 1, 1, 1});
  RunBoth(f);
  ReferenceOutputs exact =
      Reference(f.p, {f.in.q.data(), f.in.k.data(), f.in.v.data(), nullptr, f.in.bias.data()})
          .Forward();
  for (int64_t n = 0; n < f.p.OutputElements(); ++n) {
    ASSERT_EQ(f.o.as<uint16_t>()[n], Float16FromFloat(static_cast<float>(exact.o[n]))) << n;
  }
  for (int64_t n = 0; n < f.p.LseElements(); ++n) {
    ASSERT_EQ(f.lse[n], static_cast<float>(exact.lse[n]));
  }
}

TEST(ReferenceBackend, AddsABroadcastBiasGradientByHeadThenByBatchEntryInFloat32) {
  Fixture whole({1, 1, 1, 7}), addends({2, 2, 1, 7});
  for (int64_t n = 0; n < 4; ++n) {  // the same bias for each batch entry and head
    std::copy_n(whole.in.bias.as<float>(), 7, addends.in.bias.as<float>() + 7 * n);
  }
  ProblemInputs same = RandomInputs(whole.p, 1);
  addends.in.d_o = std::move(same.d_o);
  addends.in.d_lse = std::move(same.d_lse);
  RunBoth(whole);
  RunBoth(addends);
  const std::vector<float>& u = addends.d_bias;
  for (int64_t j = 0; j < 7; ++j) {
    float first = u[j] + u[7 + j], second = u[14 + j] + u[21 + j];
    EXPECT_EQ(whole.d_bias[j], first + second) << j;
  }
}

TEST(ReferenceBackend, GivesEachBatchEntrysShareOfTheSinkGradient) {
  Fixture f({1, 1, 1, 1});
  RunBoth(f);
  for (float d_sink : f.d_sink) {
    EXPECT_NE(d_sink, kUntouched);
    EXPECT_TRUE(std::isfinite(d_sink));
  }
  EXPECT_NE(f.d_sink[0], f.d_sink[2]);
}

TEST(ReferenceBackend, LeavesAStoppedCallAndRunsTheOthers) {
  Fixture stopped({1, 1, 1, 1}), other({1, 1, 1, 1});
  ReferenceBackend backend;
  std::stop_source source;
  source.request_stop();
  ForwardCall calls[] = {stopped.Forward(), other.Forward()};
  calls[0].stop = source.get_token();
  ASSERT_TRUE(backend.Forward(calls).ok());
  EXPECT_EQ(stopped.lse[0], kUntouched);
  EXPECT_NE(other.lse[0], kUntouched);
}

TEST(ReferenceBackend, ReportsWhatRan) {
  Fixture f({1, 1, 1, 1});
  f.p.accumulate = AccumulateType::kFloat16;  // it has float64 alone
  ReferenceBackend backend;
  EXPECT_TRUE(backend.Supports(f.p, Direction::kForward).ok());
  EXPECT_EQ(backend.WorkspaceBytes(f.p, Direction::kBackward), 0);
  ForwardCall call = f.Forward();
  absl::StatusOr<LaunchReport> report = backend.Forward({&call, 1});
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->kernel, "reference_forward_f64");
  EXPECT_EQ(report->accumulate, AccumulateType::kFloat32);
  EXPECT_TRUE(report->deterministic);
}

}  // namespace
}  // namespace attnd
