// The cuda engine's host code and the kernels for sm_80, run in the emulator over the conformance
// table's small problems. All of them run on GPUs, in gpu_conformance_test.
#include <memory>

#include "kernels/cuda/cuda_backend.h"
#include "tests/conformance/backend_conformance.h"
#include "tests/emulator/device/emulated_engine.h"

namespace attnd::cuda {
namespace {

const bool kSm80Half =
    RegisterBackendConformance("EmulatedSm80Half", MakeEmulated<Architecture::kSm80>,
                               {.max_pairs = 2000,
                                .random_problems = 5,
                                .random_max_pairs = 4000,
                                .element = ElementType::kFloat16,
                                .precision = EnginePrecision::HalfOperands(),
                                .max_unsupported = 0});
const bool kSm80BFloat16 =
    RegisterBackendConformance("EmulatedSm80BFloat16", MakeEmulated<Architecture::kSm80>,
                               {.max_pairs = 600,
                                .random_problems = 3,
                                .random_max_pairs = 3000,
                                .element = ElementType::kBFloat16,
                                .precision = EnginePrecision::HalfOperands(),
                                .max_unsupported = 0});

const bool kSm80Float = RegisterBackendConformance(
    "EmulatedSm80Float", MakeEmulated<Architecture::kSm80>,
    {.max_pairs = 600,
     .random_problems = 3,
     .random_max_pairs = 3000,
     .element = ElementType::kFloat32,
     .precision = {.operand_underflow = 0x1p-48, .query_gradient_unit = 0x1p-50},
     .mask_stride = 4,
     .max_unsupported = 126});

}  // namespace
}  // namespace attnd::cuda
