// Long lists of tiles, cut into runs that several blocks visit: each architecture in the emulator
// against the float64 reference, with neighbours in a launch, shards and kept forwards
// (tests/conformance), and which lines are cut.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "attention/element.h"
#include "attention/random_problem.h"
#include "attention/shard.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/mask_choice.h"
#include "kernels/reference_backend.h"
#include "tests/conformance/conformance_launch.h"
#include "tests/conformance/long_list_cases.h"
#include "tests/emulator/device/emulated_device.h"

namespace attnd::cuda {
namespace {

// Runs every `stride`-th case of the table, the last one first.
void RunsConform(Architecture architecture, ElementType element, std::optional<MaskWay> way,
                 size_t stride) {
  CudaBackend engine(MakeEmulatedDevice({.architecture = architecture}), nullptr, way);
  const ConformanceOptions options = {.precision = EnginePrecision::HalfOperands()};
  const std::vector<ConformanceCase> cases = LongListCases(element);
  for (size_t n = cases.size(); n > 0; n -= std::min(n, stride)) {
    const ConformanceCase& test_case = cases[n - 1];
    const CaseReport report = CheckCase(engine, test_case, options);
    EXPECT_EQ(report.unsupported, 0) << test_case.name;
    for (const std::string& failure : report.failures) {
      ADD_FAILURE() << test_case.name << ": " << failure;
    }
  }
}

TEST(EmulatedListRuns, Sm70) {
  RunsConform(Architecture::kSm70, ElementType::kFloat16, MaskWay::kListed, 1);
}
TEST(EmulatedListRuns, Sm70InSmallTilesInBFloat16AsHalves) {
  RunsConform(Architecture::kSm70, ElementType::kBFloat16, MaskWay::kSmall, 3);
}
TEST(EmulatedListRuns, Sm80) {
  RunsConform(Architecture::kSm80, ElementType::kFloat16, MaskWay::kListed, 3);
}
TEST(EmulatedListRuns, Sm90) {
  RunsConform(Architecture::kSm90, ElementType::kFloat16, MaskWay::kListed, 1);
}

// O, then lse.
std::vector<float> ForwardOf(Backend& engine, const Problem& p, const ProblemInputs& inputs) {
  const auto memory = MakeHostCallMemory();
  const auto done = LaunchForward(engine, *memory, {{.problem = &p, .inputs = &inputs}});
  EXPECT_TRUE(done.ok()) << done.status();
  std::vector<float> all;
  if (!done.ok()) return all;
  const ForwardResults& results = done->results[0];
  for (int64_t n = 0; n < p.OutputElements(); ++n) {
    all.push_back(static_cast<float>(LoadElement(p.element, results.o.data(), n)));
  }
  for (int64_t n = 0; n < p.LseElements(); ++n) {
    all.push_back(LoadElement(ElementType::kFloat32, results.lse.data(), n));
  }
  return all;
}

// The scores of the first `keys` keys are −infinity: all that a row's first runs see.
void ConformsBesideInfinities(Architecture architecture, int64_t keys) {
  Problem p = LongLists(1100, 8300);
  p.element = ElementType::kFloat16;
  ProblemInputs inputs = RandomInputs(p, 3);
  for (int64_t n = 0; n < p.batch * p.q_heads * p.q_len; ++n) {
    StoreElement(p.element, inputs.q.data(), n * p.qk_head_dim, 1);
  }
  for (int64_t n = 0; n < keys; ++n) {
    StoreElement(p.element, inputs.k.data(), n * p.qk_head_dim,
                 -std::numeric_limits<float>::infinity());
  }
  CudaBackend engine(MakeEmulatedDevice({.architecture = architecture}), nullptr, MaskWay::kListed);
  ReferenceBackend reference;
  const std::vector<float> got = ForwardOf(engine, p, inputs);
  const std::vector<float> expected = ForwardOf(reference, p, inputs);
  ASSERT_EQ(got.size(), expected.size());
  int64_t wrong = 0, finite = 0;
  for (size_t n = 0; n < got.size(); ++n) {
    finite += std::isfinite(expected[n]);
    wrong +=
        std::isnan(expected[n]) ? !std::isnan(got[n]) : !(std::fabs(got[n] - expected[n]) < 0.02);
  }
  EXPECT_EQ(wrong, 0) << "of " << got.size();
  EXPECT_GT(finite, 0);
}

TEST(EmulatedListRuns, RunsThatSeeNothingButInfinities) {
  ConformsBesideInfinities(Architecture::kSm70, 3000);
  ConformsBesideInfinities(Architecture::kSm90, 3000);
}

// The lines that a forward of these kernels cuts.
std::vector<int32_t> CutLines(const Problem& p, const MaskTiling& tiling) {
  MaskPlans plans;
  const auto mask = ListMask(p, tiling, /*may_cut=*/true, plans);
  EXPECT_TRUE(mask.ok()) << mask.status();
  return mask.ok() ? mask->cuts.lines : std::vector<int32_t>();
}

TEST(EmulatedListRuns, CutsLinesMuchLongerThanOthers) {
  const MaskTiling by_rows = {.rows = 128, .keys = 64}, by_keys = {64, 128, /*by_keys=*/true};
  const Problem rows = LongLists(1100, 8300), keys = LongLists(8300, 1100);
  EXPECT_EQ(CutLines(rows, by_rows), std::vector<int32_t>{0});
  EXPECT_TRUE(CutLines(rows, by_keys).empty());
  EXPECT_EQ(CutLines(keys, by_keys), std::vector<int32_t>{0});
  EXPECT_TRUE(CutLines(keys, by_rows).empty());
  EXPECT_TRUE(CutLines(LongLists(1100, 8000), by_rows).empty()) << "merging would cost more";
  EXPECT_EQ(CutLines(LongLists(1100, 8000), {.rows = 32, .keys = 32}), std::vector<int32_t>{0});
  EXPECT_EQ(CutLines(LongLists(250, 8300), by_rows), std::vector<int32_t>()) << "one of two lines";
}

TEST(EmulatedListRuns, TheWholeMaskDecides) {
  const Problem p = LongLists(1100, 8300);
  const Problem shard = SubProblem(p, {.batch_count = 1,
                                       .kv_head_count = 1,
                                       .cut = Cut::kRows,
                                       .row_count = 128,
                                       .key_count = 8300});
  EXPECT_EQ(CutLines(shard, {.rows = 128, .keys = 64}), std::vector<int32_t>{0});
}

}  // namespace
}  // namespace attnd::cuda
