// Modules cut into ranges of layers on emulated GPUs.
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "kernels/engine/cuda_backend.h"
#include "kernels/engine/device/emulated_device.h"
#include "modules/cuda/cuda_module_engine.h"
#include "modules/pipeline/pipeline_comparison.h"

namespace attnd {
namespace {

class EmulatedPipeline : public testing::TestWithParam<std::pair<Architecture, ElementType>> {
 protected:
  static constexpr int kGpus = 3;

  EmulatedPipeline() {
    for (int n = 0; n < kGpus; ++n) {
      gpus_.push_back(std::make_unique<cuda::CudaBackend>(
          cuda::MakeEmulatedDevice({.architecture = GetParam().first})));
      devices_.push_back({"gpu", "", MakeCudaModuleEngine(*gpus_.back())});
    }
  }

  std::vector<std::unique_ptr<cuda::CudaBackend>> gpus_;
  std::vector<PipelineDevice> devices_;
};

TEST_P(EmulatedPipeline, GivesTheBitsOfOneGpu) {
  const ElementType element = GetParam().second;
  const std::unique_ptr<ModuleEngine> one = MakeCudaModuleEngine(*gpus_[0]);
  PipelineEngine several(std::move(devices_));
  struct Case {
    int layout;  // of FourLayers
    std::vector<int64_t> wishes;
    Recompute mode;
  };
  for (const Case& each : {Case{0, {0, 0, 1, 1}, Recompute::kNone},       // bert
                           Case{3, {1, 2, 2, 0}, Recompute::kLayers}}) {  // decoder
    const auto [name, layout] = FourLayers(element, 16)[each.layout];
    ReferenceFixture fixture(WithWishes(layout, each.wishes), 7, Rounding::kElements);
    fixture.SetRows(KnownRows(layout, 2, 7));
    ExpectTheBitsOfOneDevice(*one, several, fixture, each.mode, name);
  }
}

// What a device keeps for itself counts too.
TEST_P(EmulatedPipeline, CutsWhatDoesNotFitOneGpu) {
  const ModuleLayout layout = FourLayers(GetParam().second, 16)[0].layout;
  ReferenceFixture fixture(layout, 7, Rounding::kElements);
  fixture.SetRows(KnownRows(layout, 2, 7));
  const ModuleLimits limits = EngineUnderTest::LimitsOf(fixture, Recompute::kNone);
  const std::unique_ptr<ModuleEngine> one = MakeCudaModuleEngine(*gpus_[0]);
  PipelineEngine several(std::move(devices_));
  EngineUnderTest alone(*one, fixture, limits);
  const int64_t room = alone.instance().plan().bytes() - 1;
  EngineUnderTest cut(several, fixture, limits, {}, {int64_t{1} << 40, {0, room, room}});
  const absl::Span<const EnginePlan> parts = cut.instance().plan().parts();
  ASSERT_EQ(parts.size(), 2);
  EXPECT_EQ(parts[0].device, 1);
  EXPECT_EQ(parts[1].device, 2);
  for (const EnginePlan& part : parts) EXPECT_LE(part.bytes(), room);
  EXPECT_TRUE(cut.Run(fixture.inputs, fixture.dy).HasBitsOf(alone.Run(fixture.inputs, fixture.dy)));
}

INSTANTIATE_TEST_SUITE_P(, EmulatedPipeline,
                         testing::Values(std::pair{Architecture::kSm70, ElementType::kFloat16},
                                         std::pair{Architecture::kSm80, ElementType::kBFloat16},
                                         std::pair{Architecture::kSm80, ElementType::kFloat32},
                                         std::pair{Architecture::kSm90, ElementType::kFloat16}));

}  // namespace
}  // namespace attnd
