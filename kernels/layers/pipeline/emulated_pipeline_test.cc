// Modules cut into ranges of layers on emulated GPUs.
#include <memory>

#include "tests/emulator/device/emulated_engine.h"
#include "tests/layers/pipeline_conformance.h"

namespace attnd {
namespace {

template <Architecture kArchitecture>
std::unique_ptr<cuda::CudaBackend> MakeNumbered(int) {
  return cuda::MakeEmulated<kArchitecture>();
}

INSTANTIATE_TEST_SUITE_P(
    Emulated, PipelineConformance,
    testing::Values(PipelineGpus{"sm70_float16", MakeNumbered<Architecture::kSm70>,
                                 ElementType::kFloat16, 16, 7},
                    PipelineGpus{"sm80_bfloat16", MakeNumbered<Architecture::kSm80>,
                                 ElementType::kBFloat16, 16, 7},
                    PipelineGpus{"sm80_float32", MakeNumbered<Architecture::kSm80>,
                                 ElementType::kFloat32, 16, 7},
                    PipelineGpus{"sm90_float16", MakeNumbered<Architecture::kSm90>,
                                 ElementType::kFloat16, 16, 7}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace attnd
