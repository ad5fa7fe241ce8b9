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

TEST(Landing, CopiesNonTemporallyAtEveryAlignmentAndLength) {
  std::vector<std::byte> from(400), to(400);
  for (size_t n = 0; n < from.size(); ++n) from[n] = static_cast<std::byte>(n * 7 + 1);
  for (size_t at = 0; at < 18; ++at) {
    for (size_t size = 0; size < 260; ++size) {
      std::fill(to.begin(), to.end(), std::byte{0xee});
      CopyNonTemporal(to.data() + at, from.data() + 3, size);
      ASSERT_EQ(std::memcmp(to.data() + at, from.data() + 3, size), 0) << at << " " << size;
      ASSERT_EQ(to[at + size], std::byte{0xee});
      if (at > 0) ASSERT_EQ(to[at - 1], std::byte{0xee});
    }
  }
}

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
