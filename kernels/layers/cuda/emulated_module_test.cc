// The cuda engine of modules on emulated GPUs.
#include <memory>

#include "tests/conformance/module_conformance.h"
#include "tests/emulator/device/emulated_engine.h"

namespace attnd {
namespace {

INSTANTIATE_TEST_SUITE_P(
    Emulated, ModuleConformance,
    testing::Values(ConformanceDevice{"sm70_float16", cuda::MakeEmulated<Architecture::kSm70>,
                                      ElementType::kFloat16, 13, 8},
                    ConformanceDevice{"sm80_bfloat16", cuda::MakeEmulated<Architecture::kSm80>,
                                      ElementType::kBFloat16, 13, 48},
                    ConformanceDevice{"sm80_float32", cuda::MakeEmulated<Architecture::kSm80>,
                                      ElementType::kFloat32, 13, 8},
                    ConformanceDevice{"sm90_float16", cuda::MakeEmulated<Architecture::kSm90>,
                                      ElementType::kFloat16, 13, 4}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace attnd
