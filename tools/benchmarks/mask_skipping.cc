// mask_skipping: what the CPU engine saves by a mask by description, against its own dense call:
// processor milliseconds of both, the share of scores that the mask shows, and the skip efficiency
// E = (dense / masked) · share, where 1 is perfect. Where a mask can go by residues too, both ways
// are forced in turn: the last column is the chosen one's time over that of the better.
//
//   bazel-bin/tools/benchmarks/mask_skipping [length [head_dim [rounds [part of a name]]]]
#include <time.h>

#include <algorithm>
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
  const auto tenth = static_cast<uint32_t>(n / 640);
  const MaskExpr random = {RandomBlocks{64, tenth, 7, false}, {longformer}};
  const MaskExpr smaller = {RandomBlocks{32, 2 * tenth, 7, false}, {longformer}};
  const MaskExpr every_third = {StrideCol{3, 0, 2}, {}};
  return {{"causal", causal},
          {"window 256", Window(256, 0)},
          {"band", Window(root, root)},
          {"document", Both({documents, {}}, causal)},
          {"blocked", {BlockWindow{64, -1, 0, {}}, {}}},
          {"longformer", longformer},
          {"bigbird", Either(longformer, random)},
          {"stof bigbird", Either(longformer, smaller)},
          {"random 32s", {RandomBlocks{32, tenth, 7, false}, {}}},
          {"two of three", every_third},
          {"prefix", Either(causal, {Prefix{{static_cast<uint32_t>(n / 4)}}, {}})},
          {"dilated 4", {Dilated{4, 16, 16}, {}}},
          {"strided 2", {StrideRel{2, 0}, {}}},
          {"strided 64", {StrideRel{64, 0}, {}}},
          {"strided 64 causal", Both({StrideRel{64, 0}, {}}, causal)},
          {"strided 256", {StrideRel{256, 0}, {}}},
          {"strided 1024", {StrideRel{1024, 0}, {}}},
          {"strided 3000", {StrideRel{3000, 0}, {}}}};
}

// Adds up all threads: what else the machine does must not count.
double ProcessorSeconds() {
  timespec now;
  CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now) == 0);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// One problem's tensors, whose memory has been touched before anything is timed.
class Trial {
 public:
  explicit Trial(const Problem& p) : in_(RandomInputs(p, 1)), out_(p) {}

  double Forward(Backend& engine, const Problem& p) {
    ForwardCall call{.problem = &p, .q = in_.q.data(), .k = in_.k.data(), .v = in_.v.data()};
    call.o = out_.o.data();
    call.lse = out_.lse.as<float>();
    const double start = ProcessorSeconds();
    CHECK(engine.Forward({&call, 1}).ok());
    return ProcessorSeconds() - start;
  }

  double Backward(Backend& engine, const Problem& p) {
    if (workspace_.size() == 0) {
      workspace_ = AlignedBytes(engine.WorkspaceBytes(p, Direction::kBackward));
    }
    BackwardCall call{.problem = &p, .q = in_.q.data(), .k = in_.k.data(), .v = in_.v.data()};
    call.o = out_.o.data();
    call.lse = out_.lse.as<float>();
    call.d_o = in_.d_o.data();
    call.d_q = out_.d_q.data();
    call.d_k = out_.d_k.data();
    call.d_v = out_.d_v.data();
    call.workspace = workspace_.data();
    const double start = ProcessorSeconds();
    CHECK(engine.Backward({&call, 1}).ok());
    return ProcessorSeconds() - start;
  }

 private:
  const ProblemInputs in_;
  Outputs out_;
  AlignedBytes workspace_{0};
};

// The engine as it chooses, and made to go each way.
struct Engines {
  std::unique_ptr<Backend> chosen = MakeCpuBackend({});
  std::unique_ptr<Backend> listed = MakeCpuBackend({.mask_kernel = CpuMaskKernel::kListed});
  std::unique_ptr<Backend> residue = MakeCpuBackend({.mask_kernel = CpuMaskKernel::kResidue});
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// In turns, medians.
void Compare(const Engines& engines, const Problem& dense, const Named& named, int rounds) {
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
  const bool both = engines.residue->Supports(masked, Direction::kForward).ok();
  struct Side {
    Backend* engine;
    const Problem* problem;
    std::vector<double> forward, backward;
  };
  std::vector<Side> sides = {{engines.chosen.get(), &dense, {}, {}},
                             {engines.chosen.get(), &masked, {}, {}}};
  if (both) {
    sides.push_back({engines.listed.get(), &masked, {}, {}});
    sides.push_back({engines.residue.get(), &masked, {}, {}});
  }
  Trial trial(dense);
  for (int round = 0; round <= rounds; ++round) {
    for (Side& side : sides) {
      const double forward = trial.Forward(*side.engine, *side.problem);
      const double backward = trial.Backward(*side.engine, *side.problem);
      if (round == 0) continue;  // it compiles the mask
      side.forward.push_back(forward);
      side.backward.push_back(backward);
    }
  }
  for (bool backward : {false, true}) {
    auto ms = [&](const Side& side) {
      return 1e3 * Median(backward ? side.backward : side.forward);
    };
    const double d = ms(sides[0]), m = ms(sides[1]);
    std::printf("%-17s %-8s dense %8.1f ms  masked %8.1f ms  %6.2f x  shown %6.2f %%  E %.2f",
                named.name, backward ? "backward" : "forward", d, m, d / m, 100 * share,
                d / m * share);
    if (both) {
      const double listed = ms(sides[2]), residue = ms(sides[3]);
      std::printf("  listed %8.1f  residue %8.1f  chosen %.2f", listed, residue,
                  m / std::min(listed, residue));
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

int Main(int argc, char** argv) {
  const int64_t n = argc > 1 ? std::atoi(argv[1]) : 4096;
  Problem p = PlainProblem(1, 8, n, argc > 2 ? std::atoi(argv[2]) : 64);
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 5;
  const std::string part = argc > 4 ? argv[4] : "";
  const Engines engines;
  for (const Named& named : Masks(n)) {
    if (std::string(named.name).find(part) != std::string::npos) {
      Compare(engines, p, named, rounds);
    }
  }
  return 0;
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) { return attnd::Main(argc, argv); }
