#include "server/landing.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "attention/random_problem.h"
#include "tests/pipeline_fixture.h"

namespace attnd {
namespace {

TEST(Landing, PutsEachTensorInItsPlace) {
  for (int64_t length : {3, 40000}) {  // one piece, and several that the pool shares
    Problem problem = SmallProblem(length);
    v1::ForwardRequest request = MakeForward(problem, 5);
    AttentionCall call = DecodedCall(problem, Priority::kNormal, 5);
    AlignedBytes q(static_cast<int64_t>(request.q().size())), k(q.size()), v(q.size());
    std::array<std::byte*, kTensors> at = {};
    at[static_cast<int>(Tensor::kQ)] = q.data();
    at[static_cast<int>(Tensor::kK)] = k.data();
    at[static_cast<int>(Tensor::kV)] = v.data();
    ThreadPool pool(2);
    EXPECT_EQ(Land(call, at.data(), pool), 3 * q.size());
    EXPECT_EQ(std::memcmp(q.data(), request.q().data(), request.q().size()), 0);
    EXPECT_EQ(std::memcmp(k.data(), request.k().data(), request.k().size()), 0);
    EXPECT_EQ(std::memcmp(v.data(), request.v().data(), request.v().size()), 0);
  }
}

}  // namespace
}  // namespace attnd
