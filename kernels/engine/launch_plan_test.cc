// What admission is told beforehand about a launch against what its plan then takes.
#include "kernels/engine/launch_plan.h"

#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "gtest/gtest.h"

namespace attnd::cuda {
namespace {

int64_t Taken(const LaunchPlan& plan) {
  int64_t bytes = plan.arena.bytes();
  for (const ArenaLayout& held : plan.held) bytes += held.bytes();
  return bytes;
}

// Rows' padding, regions' alignment and descriptors allow for some more, but not for a tensor.
TEST(LaunchPlan, TakesWhatAdmissionIsTold) {
  int kept_differently = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Problem p = RandomProblem(seed);
    if (p.element == ElementType::kFloat32) p.element = ElementType::kBFloat16;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << ProblemText(p));
    const Problem* problem = &p;
    const int64_t slack = 8192 + 256 * p.batch * p.q_heads;
    auto forward = SelectForward(KernelRows(), p);
    if (forward.ok()) {
      const int64_t told = ForwardArenaBytes(p, *forward), keeping = KeptForwardBytes(p);
      const int64_t taken = Taken(PlanForward({&problem, 1}, *forward, {false}));
      const int64_t kept = Taken(PlanForward({&problem, 1}, *forward, {true}));
      EXPECT_LE(taken, told);
      EXPECT_GE(taken + slack + told / 8, told);
      EXPECT_LE(kept, told + keeping);
      EXPECT_EQ(keeping > 0, p.element == ElementType::kBFloat16);
      kept_differently += keeping > 0;
    }
    auto backward = SelectBackward(KernelRows(), p);
    if (backward.ok()) {
      const int64_t told = BackwardArenaBytes(p, *backward);
      const int64_t taken = Taken(PlanBackward({&problem, 1}, *backward, {false}));
      EXPECT_LE(taken, told);
      EXPECT_LE(Taken(PlanBackward({&problem, 1}, *backward, {true})), told);
    }
  }
  EXPECT_GT(kept_differently, 50);
}

// A large one, whose small things do not count: q, k, v and o, and once more v and o if it is kept.
TEST(LaunchPlan, ReservesVAndOTwiceOnlyWhereABFloat16ForwardIsKept) {
  Problem p;
  p.batch = 4;
  p.q_heads = p.kv_heads = 8;
  p.q_len = p.kv_len = 2048;
  p.qk_head_dim = p.v_head_dim = 64;
  for (ElementType element : {ElementType::kFloat16, ElementType::kBFloat16}) {
    p.element = element;
    const double tensor = 4 * 8 * 2048 * 64 * 2;
    auto forward = SelectForward(KernelRows(), p);
    ASSERT_TRUE(forward.ok()) << forward.status();
    EXPECT_NEAR(static_cast<double>(ForwardArenaBytes(p, *forward)) / tensor, 4, 0.1);
    EXPECT_NEAR(static_cast<double>(KeptForwardBytes(p)) / tensor,
                element == ElementType::kBFloat16 ? 2 : 0, 0.05);
  }
}

}  // namespace
}  // namespace attnd::cuda
