// A kept bfloat16 forward leaves V and O on the device in backward's powers of two, made there and
// not of what the caller has: the same bits of every gradient as with tensors, for numbers that
// forward or backward loses to float16's smallest ones, whatever dropout makes of V's scale.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "attention/element.h"
#include "attention/random_problem.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/emulator/device/emulated_device.h"
#include "tests/conformance/conformance_launch.h"

namespace attnd {
namespace {

Problem BFloat16Problem(uint32_t dropout_threshold) {
  Problem p;
  p.element = ElementType::kBFloat16;
  p.batch = 2;
  p.q_heads = 4;
  p.kv_heads = 2;
  p.q_len = 70;
  p.kv_len = 75;
  p.qk_head_dim = 32;
  p.v_head_dim = 20;
  p.causal = true;
  p.alignment = Alignment::kBottomRight;
  p.dropout = {dropout_threshold, 1, 2};
  return p;
}

// Magnitudes from 2^top down to 2^−45 of that, bfloat16's subnormal numbers among them where the
// top is low, every bit of the significand used.
void SpreadMagnitudes(int top, Random& random, AlignedBytes& tensor) {
  auto* numbers = tensor.as<uint16_t>();
  for (int64_t n = 0; n < static_cast<int64_t>(tensor.size()) / 2; ++n) {
    const double significand = 1 + static_cast<double>(random.Between(0, 127)) / 128;
    const double sign = random.Chance(0.5) ? -1 : 1;
    const int exponent = top - static_cast<int>(random.Between(0, 45));
    numbers[n] = BFloat16FromFloat(static_cast<float>(sign * std::ldexp(significand, exponent)));
  }
}

void ExpectSameGradients(const Problem& p, const ProblemInputs& inputs) {
  cuda::CudaBackend engine(cuda::MakeEmulatedDevice({}));
  std::unique_ptr<CallMemory> memory = MakeHostCallMemory();
  LaunchItem item{&p, &inputs};
  item.keep = true;
  auto forward = LaunchForward(engine, *memory, {item});
  ASSERT_TRUE(forward.ok()) << forward.status();
  ASSERT_NE(forward->kept[0], nullptr);
  EXPECT_EQ(forward->kept[0]->bytes(), engine.ResidualBytes(p));
  LaunchItem whole = item, leased = item;
  whole.o = forward->results[0].o;
  whole.lse = forward->results[0].lse;
  leased.residual = forward->kept[0].get();
  auto backward = LaunchBackward(engine, *memory, {whole, leased});
  ASSERT_TRUE(backward.ok()) << backward.status();
  EXPECT_TRUE(backward->results[0] == backward->results[1]);
}

TEST(KeptBFloat16, GivesTheBitsOfTensorsForNumbersOfAnySize) {
  for (uint32_t threshold : {0, 128, 252}) {
    for (int top : {0, 100, -100}) {
      SCOPED_TRACE(testing::Message() << "dropout " << threshold << "/256, largest 2^" << top);
      const Problem p = BFloat16Problem(threshold);
      ProblemInputs inputs = RandomInputs(p, 3);
      Random random(11 + threshold);
      SpreadMagnitudes(top, random, inputs.v);
      ExpectSameGradients(p, inputs);
    }
  }
}

TEST(KeptBFloat16, GivesTheBitsOfTensorsForInfinitiesAndNaN) {
  const Problem p = BFloat16Problem(0);
  ProblemInputs inputs = RandomInputs(p, 5);
  auto* v = inputs.v.as<uint16_t>();
  v[7] = 0x7f80;            // ∞
  v[20 * 75] = 0xff80;      // −∞
  v[20 * 75 * 2] = 0xffc1;  // −NaN
  v[20 * 75 * 3 + 1] = 0x7fa0;
  ExpectSameGradients(p, inputs);
}

TEST(KeptBFloat16, IsNotKeptWhereForwardsScaleLosesWhatBackwardSees) {
  const cuda::CudaBackend engine(cuda::MakeEmulatedDevice({}));
  EXPECT_GT(engine.ResidualBytes(BFloat16Problem(252)), 0);
  EXPECT_EQ(engine.ResidualBytes(BFloat16Problem(253)), 0);
}

}  // namespace
}  // namespace attnd
