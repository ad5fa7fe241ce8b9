// Modules cut into ranges of layers on GPUs, real or emulated, against one GPU: tests instantiate
// PipelineConformance with what they have.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "kernels/layers/cuda/cuda_module_engine.h"
#include "tests/layers/pipeline_comparison.h"

namespace attnd {

// GPUs of one architecture.
struct PipelineGpus {
  std::string name;
  std::function<std::unique_ptr<cuda::CudaBackend>(int number)> make;
  ElementType element = ElementType::kFloat16;
  int64_t width = 0, length = 0;  // of the known layers
};
inline std::ostream& operator<<(std::ostream& out, const PipelineGpus& gpus) {
  return out << gpus.name;
}

class PipelineConformance : public testing::TestWithParam<PipelineGpus> {
 protected:
  PipelineConformance() {
    std::vector<PipelineDevice> devices;
    for (int n = 0; n < 3; ++n) {
      gpus_.push_back(GetParam().make(n));
      devices.push_back({"gpu", "", MakeCudaModuleEngine(*gpus_.back())});
    }
    one_ = MakeCudaModuleEngine(*gpus_[0]);
    several_ = std::make_unique<PipelineEngine>(std::move(devices));
  }

  std::vector<std::unique_ptr<cuda::CudaBackend>> gpus_;
  std::unique_ptr<ModuleEngine> one_, several_;
};

TEST_P(PipelineConformance, GivesTheBitsOfOneGpu) {
  const auto& [text, make, element, width, length] = GetParam();
  struct Case {
    int layout;  // of FourLayers
    std::vector<int64_t> wishes;
    Recompute mode;
  };
  for (const Case& each : {Case{0, {0, 0, 1, 1}, Recompute::kNone},       // bert
                           Case{3, {1, 2, 2, 0}, Recompute::kLayers}}) {  // decoder
    const auto [name, layout] = FourLayers(element, width)[each.layout];
    ReferenceFixture fixture(WithWishes(layout, each.wishes), 7, Rounding::kElements);
    fixture.SetRows(KnownRows(layout, 2, length));
    ExpectTheBitsOfOneDevice(*one_, *several_, fixture, each.mode, name);
  }
}

// Memory that a device keeps for itself counts too.
TEST_P(PipelineConformance, CutsWhatDoesNotFitOneGpu) {
  const auto& [text, make, element, width, length] = GetParam();
  const ModuleLayout layout = FourLayers(element, width)[0].layout;
  ReferenceFixture fixture(layout, 7, Rounding::kElements);
  fixture.SetRows(KnownRows(layout, 2, length));
  const ModuleLimits limits = EngineUnderTest::LimitsOf(fixture, Recompute::kNone);
  EngineUnderTest alone(*one_, fixture, limits);
  const int64_t room = alone.instance().plan().bytes() - 1;
  EngineUnderTest cut(*several_, fixture, limits, {}, {int64_t{1} << 40, {0, room, room}});
  const absl::Span<const EnginePlan> parts = cut.instance().plan().parts();
  ASSERT_EQ(parts.size(), 2);
  EXPECT_EQ(parts[0].device, 1);
  EXPECT_EQ(parts[1].device, 2);
  for (const EnginePlan& part : parts) EXPECT_LE(part.bytes(), room);
  EXPECT_TRUE(cut.Run(fixture.inputs, fixture.dy).HasBitsOf(alone.Run(fixture.inputs, fixture.dy)));
}

}  // namespace attnd
