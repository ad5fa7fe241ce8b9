// mask_skipping: what the CPU engine saves by a mask by description, against its own dense call:
// milliseconds of both, the share of scores that the mask shows, and the skip efficiency
// E = (dense / masked) · share, where 1 is perfect.
//
//   bazel-bin/tests/benchmarks/mask_skipping [length [head_dim [rounds]]]
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/mask_plans.h"
#include "attention/masks/mask_description.h"
#include "attention/problem.h"
#include "attention/random_problem.h"
#include "base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/fixtures/call_outputs.h"

namespace attnd {
namespace {

MaskExpr Window(int32_t left, int32_t right) { return {RelativeWindow{left, right}, {}}; }
MaskExpr Both(MaskExpr a, MaskExpr b) { return {AllOf{}, {std::move(a), std::move(b)}}; }
MaskExpr Either(MaskExpr a, MaskExpr b) { return {AnyOf{}, {std::move(a), std::move(b)}}; }

struct Named {
  const char* name;
  MaskExpr mask;
};

std::vector<Named> Masks(int64_t n) {
  const auto root = static_cast<int32_t>(std::lround(std::sqrt(n)));
  const MaskExpr causal = Window(-1, 0);
  Segment documents;
  for (int64_t d = 0; d <= 8; ++d) documents.cu.push_back(static_cast<uint32_t>(n * d / 8));
  const MaskExpr longformer = Either(
      Window(root, root), {Global{{0}, {static_cast<uint32_t>(root)}, GlobalDirection::kBoth}, {}});
  const MaskExpr random = {RandomBlocks{64, static_cast<uint32_t>(n / 640), 7, false},
                           {longformer}};
  return {{"causal", causal},
          {"window 256", Window(256, 0)},
          {"band", Window(root, root)},
          {"document", Both({documents, {}}, causal)},
          {"blocked", {BlockWindow{64, -1, 0, {}}, {}}},
          {"longformer", longformer},
          {"bigbird", Either(longformer, random)},
          {"strided 64", {StrideRel{64, 0}, {}}}};
}

double Seconds(Backend& engine, const Problem& p, const ProblemInputs& in, bool backward) {
  const auto start = std::chrono::steady_clock::now();
  Outputs out = RunForward(engine, p, in);
  const auto between = std::chrono::steady_clock::now();
  if (!backward) return std::chrono::duration<double>(between - start).count();
  RunBackward(engine, p, in, out.o, out.lse, out);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// In turns, medians.
void Compare(Backend& engine, const Problem& dense, const Named& named, int rounds) {
  Problem masked = dense;
  const MaskCall call = MaskCallOf(dense);
  auto mask = MaskDescription::Make({.pattern = {named.mask}, .pattern_of = {0}}, call);
  CHECK(mask.ok()) << mask.status();
  masked.mask = *std::move(mask);
  MaskPlans plans;
  auto plan = plans.Get(masked, HostMaskOptions());
  CHECK(plan.ok()) << plan.status();
  const double share = static_cast<double>((*plan)->PlanAt(0, 0).visible) /
                       (static_cast<double>(dense.q_len) * static_cast<double>(dense.kv_len));
  const ProblemInputs in = RandomInputs(dense, 1);
  for (bool backward : {false, true}) {
    std::vector<double> of_dense, of_masked;
    for (int round = 0; round < rounds; ++round) {
      of_dense.push_back(Seconds(engine, dense, in, backward));
      of_masked.push_back(Seconds(engine, masked, in, backward));
    }
    std::sort(of_dense.begin(), of_dense.end());
    std::sort(of_masked.begin(), of_masked.end());
    const double d = of_dense[rounds / 2], m = of_masked[rounds / 2];
    std::printf("%-12s %-18s dense %8.1f ms  masked %8.1f ms  %6.2f x  shown %6.2f %%  E %.2f\n",
                named.name, backward ? "forward+backward" : "forward", 1e3 * d, 1e3 * m, d / m,
                100 * share, d / m * share);
    std::fflush(stdout);
  }
}

int Main(int argc, char** argv) {
  const int64_t n = argc > 1 ? std::atoi(argv[1]) : 4096;
  Problem p;
  p.batch = 1;
  p.q_heads = p.kv_heads = 8;
  p.q_len = p.kv_len = n;
  p.qk_head_dim = p.v_head_dim = argc > 2 ? std::atoi(argv[2]) : 64;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 5;
  auto engine = MakeCpuBackend({});
  for (const Named& named : Masks(n)) Compare(*engine, p, named, rounds);
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) { return attnd::Main(argc, argv); }
