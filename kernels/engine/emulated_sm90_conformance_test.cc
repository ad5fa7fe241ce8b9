// The cuda engine's host code and the kernels for sm_90, run in the emulator over the conformance
// table. BUILD leaves out by name what takes too long here.
#include <memory>

#include "kernels/engine/cuda_backend.h"
#include "kernels/engine/device/emulated_device.h"
#include "tests/conformance/backend_conformance.h"

namespace attnd::cuda {
namespace {

std::unique_ptr<Backend> MakeEmulated() {
  return std::make_unique<CudaBackend>(MakeEmulatedDevice({.architecture = Architecture::kSm90}));
}

const bool kHalf = RegisterBackendConformance("EmulatedSm90Half", MakeEmulated,
                                              {.random_problems = 40,
                                               .random_max_pairs = 20000,
                                               .element = ElementType::kFloat16,
                                               .precision = EnginePrecision::HalfOperands(),
                                               .max_unsupported = 0});
const bool kBFloat16 = RegisterBackendConformance("EmulatedSm90BFloat16", MakeEmulated,
                                                  {.max_pairs = 3000,
                                                   .random_problems = 20,
                                                   .random_max_pairs = 10000,
                                                   .element = ElementType::kBFloat16,
                                                   .precision = EnginePrecision::HalfOperands(),
                                                   .max_unsupported = 0});

}  // namespace
}  // namespace attnd::cuda
