// dQ's fixed point at the ends of its range: rows that reach the bound which scales them, and rows
// that are a billionth of it.
#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "attention/element.h"
#include "attention/random_problem.h"
#include "base/round_up.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/emulator/device/emulated_device.h"
#include "kernels/rules/backward_passes.h"
#include "kernels/tiles.h"
#include "tests/conformance/conformance_launch.h"

namespace attnd::cuda {
namespace {

// Every score is 0, and keys of even and odd number differ by sign alone: with o = 0 all terms of a
// row of dQ have one sign, and their sum is scale·‖dO‖·‖V‖·max|K|.
struct Alternating {
  explicit Alternating(int64_t head_dim) {
    p.batch = p.q_heads = p.kv_heads = 1;
    p.q_len = 3;
    p.kv_len = 256;
    p.qk_head_dim = p.v_head_dim = head_dim;
    p.scale = 0.25f;
    p.element = ElementType::kFloat16;
  }
  // Each number of d_q, which are all the same; NaN if they are not.
  double Run(float k, float v, float d_o, double lse) const {
    ProblemInputs inputs = RandomInputs(p, 1);
    FillRows(inputs.q, 0, 0);
    FillRows(inputs.k, k, -k);
    FillRows(inputs.v, v, -v);
    FillRows(inputs.d_o, d_o, d_o);
    const std::vector<float> lses(p.q_len, static_cast<float>(lse));
    const auto* lse_bytes = reinterpret_cast<const std::byte*>(lses.data());
    const LaunchItem item = {.problem = &p,
                             .inputs = &inputs,
                             .o = Bytes(p.OutputElements() * 2),
                             .lse = Bytes(lse_bytes, lse_bytes + lses.size() * sizeof(float)),
                             .with_d_lse = false};
    CudaBackend backend(MakeEmulatedDevice({.architecture = architecture}));
    auto launched = LaunchBackward(backend, *MakeHostCallMemory(), {item});
    EXPECT_TRUE(launched.ok()) << launched.status();
    if (!launched.ok()) return std::nan("");
    const std::byte* d_q = launched->results[0].d_q.data();
    const double first = LoadElement(p.element, d_q, 0);
    for (int64_t n = 0; n < p.q_len * p.qk_head_dim; ++n) {
      if (LoadElement(p.element, d_q, n) != first) return std::nan("");
    }
    return first;
  }
  void FillRows(AlignedBytes& tensor, float even, float odd) const {
    for (int64_t n = 0; n < tensor.size() / 2; ++n) {
      StoreElement(p.element, tensor.data(), n, n / p.qk_head_dim % 2 == 0 ? even : odd);
    }
  }
  Problem p;
  Architecture architecture = Architecture::kSm70;
};

// Just below powers of two, where the bound leaves the least room.
constexpr float kKey = 1.9990234f, kValue = 1.9375f, kUpstream = 1.03125f;

TEST(FixedPoint, HoldsRowsThatReachTheirBound) {
  for (int64_t head_dim : {64, 128, 256}) {
    Alternating rows(head_dim);
    const double exact = 0.25 * kKey * kValue * kUpstream * static_cast<double>(head_dim);
    const double found = rows.Run(kKey, kValue, kUpstream, std::log(256));
    EXPECT_NEAR(found, exact, exact * 0.003) << head_dim;
  }
}

TEST(FixedPoint, HoldsRowsOfPThatSumToSevenWhereForwardAccumulatesInFloat16) {
  for (int64_t head_dim : {64, 128, 256}) {
    Alternating rows(head_dim);
    rows.p.accumulate = AccumulateType::kFloat16;
    const double exact =
        0.25 * kKey * kValue * kUpstream * static_cast<double>(head_dim) * std::exp(1.95);
    const double found = rows.Run(kKey, kValue, kUpstream, std::log(256) - 1.95);
    EXPECT_NEAR(found, exact, exact * 0.003) << head_dim;
  }
}

// With an lse that is 20 too large a row is 2e-9 of its bound, half a unit of the first integer.
// P has four bits there. Where rows choose (sm_90), these do: their o is 0.
TEST(FixedPoint, ResolvesRowsFarBelowTheirBoundWhereItHasASecondInteger) {
  using enum Architecture;
  for (auto [architecture, head_dim] :
       {std::pair(kSm70, 64), {kSm70, 128}, {kSm70, 256}, {kSm90, 64}}) {
    Alternating rows(head_dim);
    rows.architecture = architecture;
    rows.p.kv_len = 2;
    rows.p.accumulate = AccumulateType::kFloat16;
    const double exact = 0.25 * 1024 * 1024 * 32 * static_cast<double>(head_dim) * std::exp(-20.0);
    const double found = rows.Run(1024, 1024, 32, std::log(2) + 20);
    EXPECT_NEAR(found, exact, exact * 0.08) << head_dim;
  }
}

// The second integer, if each of a row's tiles leaves as much as it can, all of one sign: a half in
// units 2^-RestBits, rounded once more; with sm_90's sums beyond 2^22 another 2^8.
TEST(FixedPoint, HoldsWhatRoundingLeavesOfTheMostTiles) {
  int checked = 0;
  for (Architecture architecture :
       {Architecture::kSm70, Architecture::kSm80, Architecture::kSm90}) {
    for (const KernelRow& row : KernelRowsOf(architecture)) {
      if (row.kind != KernelKind::kBackward || !row.ordered) continue;
      ++checked;
      for (int64_t keys = 1; keys <= kMaxLength; keys += keys < 128 ? 1 : keys / 128) {
        const int64_t tiles = DivideUp(keys, row.tile.kv_rows);
        const double rests = static_cast<double>(tiles) / 2 + 256;
        const double most =
            std::ldexp(rests, FixedPoint::RestBits(static_cast<int>(keys))) + tiles / 2.0;
        ASSERT_LT(most, 0x1p31) << keys << " keys in tiles of " << row.tile.kv_rows;
      }
    }
  }
  EXPECT_GT(checked, 20);
}

}  // namespace
}  // namespace attnd::cuda
