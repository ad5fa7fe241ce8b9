// dQ's fixed point at the ends of its range: rows that reach the bound which scales them, and rows
// that are a billionth of it.
#include <cmath>
#include <vector>

#include "attention/element.h"
#include "attention/random_problem.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/emulated_device.h"

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
    AlignedBytes q = Rows(p.q_len, 0, 0), keys = Rows(p.kv_len, k, -k);
    AlignedBytes values = Rows(p.kv_len, v, -v), o = Rows(p.q_len, 0, 0);
    AlignedBytes upstream = Rows(p.q_len, d_o, d_o), d_q = Rows(p.q_len, 0, 0);
    AlignedBytes d_k = Rows(p.kv_len, 0, 0), d_v = Rows(p.kv_len, 0, 0);
    std::vector<float> lses(p.q_len, static_cast<float>(lse));
    BackwardCall call;
    call.problem = &p;
    call.q = q.data();
    call.k = keys.data();
    call.v = values.data();
    call.o = o.data();
    call.lse = lses.data();
    call.d_o = upstream.data();
    call.d_q = d_q.data();
    call.d_k = d_k.data();
    call.d_v = d_v.data();
    CudaBackend backend(MakeEmulatedDevice({}));
    AlignedBytes workspace(backend.WorkspaceBytes(p, Direction::kBackward));
    call.workspace = workspace.data();
    EXPECT_TRUE(backend.Backward({call}).ok());
    const double first = LoadElement(p.element, d_q.data(), 0);
    for (int64_t n = 0; n < p.q_len * p.qk_head_dim; ++n) {
      if (LoadElement(p.element, d_q.data(), n) != first) return std::nan("");
    }
    return first;
  }
  AlignedBytes Rows(int64_t rows, float even, float odd) const {
    AlignedBytes tensor(rows * p.qk_head_dim * 2);
    for (int64_t n = 0; n < rows * p.qk_head_dim; ++n) {
      StoreElement(p.element, tensor.data(), n, n / p.qk_head_dim % 2 == 0 ? even : odd);
    }
    return tensor;
  }
  Problem p;
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

// A softcap that is far away changes nothing but that a second integer is there.
TEST(FixedPoint, HoldsRowsOfPThatSumToSevenWhereItHasASecondInteger) {
  for (int64_t head_dim : {64, 128, 256}) {
    Alternating rows(head_dim);
    rows.p.softcap = 1000;
    const double exact =
        0.25 * kKey * kValue * kUpstream * static_cast<double>(head_dim) * std::exp(1.95);
    const double found = rows.Run(kKey, kValue, kUpstream, std::log(256) - 1.95);
    EXPECT_NEAR(found, exact, exact * 0.003) << head_dim;
  }
}

// With an lse that is 20 too large a row is 2e-9 of its bound, half a unit of the first integer.
// P has four bits there.
TEST(FixedPoint, ResolvesRowsFarBelowTheirBoundWhereItHasASecondInteger) {
  for (int64_t head_dim : {64, 128, 256}) {
    Alternating rows(head_dim);
    rows.p.kv_len = 2;
    rows.p.softcap = 1000;
    const double exact = 0.25 * 1024 * 1024 * 32 * static_cast<double>(head_dim) * std::exp(-20.0);
    const double found = rows.Run(1024, 1024, 32, std::log(2) + 20);
    EXPECT_NEAR(found, exact, exact * 0.08) << head_dim;
  }
}

}  // namespace
}  // namespace attnd::cuda
