#include "server/call_parts.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/engine_call.h"
#include "tests/pipeline_fixture.h"

namespace attnd {
namespace {

// A problem of one of the layouts that can be cut, whose parts are aligned, with options at random.
Problem CuttableProblem(uint64_t seed) {
  Random random(seed);
  Problem p;
  const Layout layouts[] = {Layout::kBhld, Layout::kBlhd, Layout::kPackedHtd};
  p.layout = layouts[random.Between(0, 2)];
  p.batch = p.layout == Layout::kBlhd ? random.Between(2, 5) : random.Between(1, 4);
  p.kv_heads = random.Between(2, 4);
  p.q_heads = p.kv_heads * random.Between(1, 3);
  p.q_len = 16 * random.Between(1, 5);
  p.kv_len = 16 * random.Between(1, 9);
  p.qk_head_dim = p.v_head_dim = 8 * random.Between(1, 3);
  const ElementType elements[] = {ElementType::kFloat32, ElementType::kFloat16,
                                  ElementType::kBFloat16};
  p.element = elements[random.Between(0, 2)];
  p.alignment = random.Chance(0.5) ? Alignment::kTopLeft : Alignment::kBottomRight;
  p.causal = random.Chance(0.5);
  if (IsPacked(p.layout)) {
    p.cu_seqlens_q = p.cu_seqlens_k = {0};
    for (int64_t n = 1; n <= p.batch; ++n) {
      p.cu_seqlens_q.push_back(static_cast<int32_t>(p.q_len * n / p.batch));
      p.cu_seqlens_k.push_back(static_cast<int32_t>(p.kv_len * n / p.batch));
    }
  } else if (random.Chance(0.3)) {
    for (int64_t n = 0; n < p.batch; ++n) {
      p.kv_lengths.push_back(static_cast<int32_t>(random.Between(0, p.kv_len)));
    }
  }
  if (random.Chance(0.3)) p.alibi_slopes.assign(p.q_heads * (p.batch % 2 ? 1 : p.batch), 0.25f);
  for (size_t n = 0; n < p.alibi_slopes.size(); ++n) p.alibi_slopes[n] += 0.1f * n;
  auto shape = [&] {
    const bool entry = random.Chance(0.5), head = random.Chance(0.5);
    return BroadcastShape{entry ? p.batch : 1, head ? p.q_heads : 1, p.MaxQueryLength(),
                          p.MaxKeyLength()};
  };
  if (random.Chance(0.3)) p.bool_mask = BoolMask{shape()};
  if (random.Chance(0.3)) p.bias = Bias{ElementType::kFloat32, shape(), false};
  if (random.Chance(0.3)) p.dropout = {.threshold = 64, .seed = seed};
  if (random.Chance(0.3)) p.softcap = 3;
  if (random.Chance(0.2)) p.denominator = DenominatorKind::kZeroRest;
  p.shard.batch_offset = random.Between(0, 3);
  CHECK(Validate(p).ok()) << Validate(p);
  return p;
}

class CallPartsTest : public testing::Test {
 protected:
  CallPartsTest()
      : engine_(MakeCpuBackend({.threads = 1})),
        staging_(*StagingPool::Create(int64_t{16} << 20)),
        cost_(1e9),
        admission_({.memory_bytes = int64_t{16} << 20}, *engine_, cost_, clock_) {}

  template <class Request>
  AdmittedCall Landed(const Request& request, Direction direction) {
    auto call = admission_.Admit(DecodedRequest(request, direction), {.id = 1});
    AdmittedCall landed = attnd::Landed(std::move(call), staging_);
    std::memset(landed.staged().outputs.data(), 0xff, landed.staged().outputs.size());
    return landed;
  }
  std::string Bytes(const AdmittedCall& call, Tensor tensor, size_t bytes) {
    return std::string(reinterpret_cast<const char*>(call.staged()[tensor]), bytes);
  }
  void Forward(AdmittedCall& call, const CallParts::Part& part) {
    const ForwardCall forward =
        EngineForward(part.problem, part.places, call.staged().workspace, {});
    CHECK(engine_->Forward({&forward, 1}).ok());
  }
  void Backward(AdmittedCall& call, const CallParts::Part& part) {
    const BackwardCall backward =
        EngineBackward(part.problem, part.places, call.staged().workspace, {});
    CHECK(engine_->Backward({&backward, 1}).ok());
  }
  // Part after part, several at a time.
  template <class Compute>
  void InPieces(AdmittedCall& call, const Compute& compute) {
    const CallParts parts(call.call());
    Random random(static_cast<uint64_t>(parts.count()));
    for (int64_t begin = 0; begin < parts.count();) {
      const int64_t end = random.Between(begin + 1, parts.count());
      compute(call, parts.Of(begin, end, call.staged().at));
      begin = end;
    }
  }

  RealClock clock_;
  std::unique_ptr<Backend> engine_;
  StagingPool staging_;
  CostModel cost_;
  Admission admission_;
};

TEST_F(CallPartsTest, GiveTogetherTheBitsOfTheWhole) {
  int cut = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const Problem problem = CuttableProblem(seed);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << ProblemText(problem));
    const v1::ForwardRequest request = MakeForward(problem, seed);
    const v1::ForwardResponse expected = ComputeForward(*engine_, problem, request);
    AdmittedCall forward = Landed(request, Direction::kForward);
    cut += CallParts(forward.call()).count() > 1;
    InPieces(forward, [this](auto& call, const auto& part) { Forward(call, part); });
    ASSERT_TRUE(Bytes(forward, Tensor::kO, expected.o().size()) == expected.o());
    ASSERT_TRUE(Bytes(forward, Tensor::kLse, expected.lse().size()) == expected.lse());

    const v1::BackwardRequest gradient = MakeBackward(problem, seed, expected);
    const v1::BackwardResponse gradients = ComputeBackward(*engine_, problem, gradient);
    AdmittedCall backward = Landed(gradient, Direction::kBackward);
    InPieces(backward, [this](auto& call, const auto& part) { Backward(call, part); });
    ASSERT_TRUE(Bytes(backward, Tensor::kDQ, gradients.d_q().size()) == gradients.d_q());
    ASSERT_TRUE(Bytes(backward, Tensor::kDK, gradients.d_k().size()) == gradients.d_k());
    ASSERT_TRUE(Bytes(backward, Tensor::kDV, gradients.d_v().size()) == gradients.d_v());
  }
  EXPECT_GT(cut, 150);  // the others have masks of some packed heads, or unaligned parts
}

TEST_F(CallPartsTest, GiveEachPartItsSinks) {
  Problem problem = SmallProblem(16, 32);
  problem.denominator = DenominatorKind::kSink;
  for (int n = 0; n < 32; ++n) problem.sink_logits.push_back(0.1f * static_cast<float>(n));
  problem.kv_heads = 2;  // 16 sinks each: 64 bytes
  const v1::ForwardRequest request = MakeForward(problem, 1);
  const v1::ForwardResponse forward = ComputeForward(*engine_, problem, request);
  const v1::BackwardRequest gradient = MakeBackward(problem, 1, forward);
  const v1::BackwardResponse expected = ComputeBackward(*engine_, problem, gradient);
  AdmittedCall backward = Landed(gradient, Direction::kBackward);
  EXPECT_EQ(CallParts(backward.call()).count(), 2);
  InPieces(backward, [this](auto& call, const auto& part) { Backward(call, part); });
  EXPECT_EQ(Bytes(backward, Tensor::kDSink, expected.d_sink().size()), expected.d_sink());
  EXPECT_EQ(Bytes(backward, Tensor::kDK, expected.d_k().size()), expected.d_k());
}

TEST_F(CallPartsTest, AreWholeInTheOrderOfTheBytes) {
  Problem problem = SmallProblem(16, 4);  // 512 bytes of q a head
  const AttentionCall one = DecodedCall(problem);
  const CallParts heads(one);
  EXPECT_EQ(heads.count(), 4);
  EXPECT_EQ(heads.Complete(Tensor::kQ, 0), 0);
  EXPECT_EQ(heads.Complete(Tensor::kQ, 511), 0);
  EXPECT_EQ(heads.Complete(Tensor::kQ, 512), 1);
  EXPECT_EQ(heads.Complete(Tensor::kQ, 2047), 3);
  EXPECT_EQ(heads.Complete(Tensor::kQ, 2048), 4);
  problem.batch = 3;
  const AttentionCall three = DecodedCall(problem);
  const CallParts entries(three);
  EXPECT_EQ(entries.count(), 3);
  EXPECT_EQ(entries.Complete(Tensor::kQ, 2047), 0);
  EXPECT_EQ(entries.Complete(Tensor::kQ, 4096), 2);
}

// A tensor that all parts read is there for none of them before its last byte.
TEST_F(CallPartsTest, WaitForWhatTheyShare) {
  Problem problem = SmallProblem(16, 4);
  problem.bool_mask = BoolMask{{1, 1, 16, 16}};
  const AttentionCall call = DecodedCall(problem);
  const CallParts parts(call);
  EXPECT_EQ(parts.count(), 4);
  EXPECT_EQ(parts.Complete(Tensor::kMaskBits, 31), 0);
}

TEST_F(CallPartsTest, AreOneWhereTheyCannotBeComputedApart) {
  auto count = [](const Problem& problem) { return CallParts(DecodedCall(problem)).count(); };
  Problem interleaved = SmallProblem(16, 4);
  interleaved.layout = Layout::kBlhd;
  EXPECT_EQ(count(interleaved), 1);
  interleaved.batch = 2;
  EXPECT_EQ(count(interleaved), 2);

  Problem unaligned = SmallProblem(17, 4);  // 68 bytes of lse a head
  EXPECT_EQ(count(unaligned), 1);

  Problem packed = SmallProblem(32, 4);
  packed.batch = 2;
  packed.cu_seqlens_q = packed.cu_seqlens_k = {0, 16, 32};
  packed.layout = Layout::kPackedHtd;
  EXPECT_EQ(count(packed), 4);
  packed.layout = Layout::kPackedThd;
  EXPECT_EQ(count(packed), 1);

  Problem summed = SmallProblem(16, 4);
  summed.bias = Bias{ElementType::kFloat32, {1, 4, 16, 16}, false};
  EXPECT_EQ(count(summed), 4);
  summed.bias->want_gradient = true;
  EXPECT_EQ(count(summed), 1);
}

}  // namespace
}  // namespace attnd
