// The cuda engine's host code and the sm70 kernels, run in the emulator over the conformance table.
// BUILD leaves out by name what takes too long here, as do most cases of masks by description, and
// most cases are brief: the GPU's run of the table has all.
#include <memory>

#include "kernels/cuda/cuda_backend.h"
#include "tests/conformance/backend_conformance.h"
#include "tests/emulator/device/emulated_engine.h"

namespace attnd::cuda {
namespace {

// Every case's numbers, both ways; the same bits on repeat, beside others, in shards and on what
// was kept depend less on the case. No multiple of the periods in which the table varies its
// options.
constexpr int kWholeStride = 5;

const bool kHalf = RegisterBackendConformance("EmulatedHalf", MakeEmulated<Architecture::kSm70>,
                                              {.random_problems = 25,
                                               .random_max_pairs = 8000,
                                               .element = ElementType::kFloat16,
                                               .precision = EnginePrecision::HalfOperands(),
                                               // Every kind with three or four of 16 options.
                                               .mask_stride = 5,
                                               .whole_stride = kWholeStride,
                                               .max_unsupported = 0});
const bool kBFloat16 =
    RegisterBackendConformance("EmulatedBFloat16", MakeEmulated<Architecture::kSm70>,
                               {.max_pairs = 6000,
                                .random_problems = 25,
                                .random_max_pairs = 8000,
                                .element = ElementType::kBFloat16,
                                .precision = EnginePrecision::HalfOperands(),
                                .whole_stride = kWholeStride,
                                .max_unsupported = 0,
                                .shares_range = true});
const bool kFloat = RegisterBackendConformance("EmulatedFloat", MakeEmulated<Architecture::kSm70>,
                                               {.max_pairs = 6000,
                                                .random_problems = 15,
                                                .random_max_pairs = 4000,
                                                .element = ElementType::kFloat32,
                                                .precision = {.operand_underflow = 0x1p-39,
                                                              .gradient_underflow = 0x1p-34,
                                                              .query_gradient_unit = 0x1p-50},
                                                .mask_stride = 4,
                                                .whole_stride = kWholeStride,
                                                .max_unsupported = 34,
                                                .shares_range = true});

}  // namespace
}  // namespace attnd::cuda
