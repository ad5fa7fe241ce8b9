// The conformance table's smaller cases on every vector target that this processor has, not the
// best alone: AVX2 and SSE4 run where AVX-512 would be chosen, and the scalar fallback anywhere.
// What is multiplied on tiles is run whole, since cpu_backend_test reaches no tiles on most
// machines.
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/matrix_tiles.h"
#include "tests/conformance/backend_conformance.h"
#include "tests/cpu_tiles/emulated_tiles.h"

namespace attnd {
namespace {

// A vector target, and what multiplies its tiles if anything does.
struct Target {
  int64_t vectors;
  const TileUnit* tiles;

  std::string name() const {
    const std::string target = hwy::TargetName(vectors);
    return tiles == nullptr ? target : target + "_" + tiles->name;
  }
};

class CpuTargets : public testing::TestWithParam<Target> {
 protected:
  void SetUp() override { Choose(GetParam()); }
  void TearDown() override { Choose({0, kOwnTiles}); }

 private:
  static void Choose(const Target& target) {
    hwy::SetSupportedTargetsForTest(target.vectors);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    ChooseMatrixTiles(target.tiles);
  }
  static inline const TileUnit* const kOwnTiles = MatrixTiles();
};

TEST_P(CpuTargets, Conforms) {
  std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 2});
  ASSERT_EQ(backend->info().architecture, GetParam().name());
  ConformanceOptions options;
  options.max_pairs = 8000;
  options.random_problems = GetParam().tiles == nullptr ? 20 : 60;
  std::vector<ConformanceCase> cases = NamedConformanceCases();
  for (ConformanceCase& c : RandomConformanceCases(options)) cases.push_back(std::move(c));
  int checked = 0;
  for (const ConformanceCase& test_case : cases) {
    const Problem& p = test_case.problem;
    const bool is_large = p.batch * p.q_heads * p.q_len * p.kv_len > options.max_pairs;
    const bool is_on_tiles = GetParam().tiles != nullptr && p.element != ElementType::kFloat32;
    if (is_large && !is_on_tiles) continue;
    for (const std::string& failure : CheckCase(*backend, test_case, options).failures) {
      ADD_FAILURE() << test_case.name << ": " << failure;
    }
    ++checked;
  }
  EXPECT_GT(checked, 100);
}

std::vector<Target> Targets() {
  std::vector<Target> targets;
  const int64_t compiled = CompiledCpuTargets();
  for (int64_t bit = 1; bit <= compiled && bit > 0; bit <<= 1) {
    if ((compiled & hwy::SupportedTargets() & bit) == 0) continue;
    targets.push_back({bit, nullptr});
    if (bit != HWY_AVX3) continue;
    for (const TileUnit* tiles : {MatrixTiles(), EmulatedTiles()}) {
      if (tiles != nullptr) targets.push_back({bit, tiles});
    }
  }
  return targets;
}

INSTANTIATE_TEST_SUITE_P(All, CpuTargets, testing::ValuesIn(Targets()),
                         [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace attnd
