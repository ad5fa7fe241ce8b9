// The cuda engine's host code and the sm70 kernels, run in the emulator over the conformance table.
// BUILD leaves out by name what takes too long here.
#include <memory>

#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/emulated_device.h"
#include "tests/backend_conformance.h"

namespace attnd::cuda {
namespace {

std::unique_ptr<Backend> MakeEmulated() {
  return std::make_unique<CudaBackend>(MakeEmulatedDevice({}));
}

// Head dimensions above 128 have no kernel yet: 11 cases, both directions.
constexpr int kWiderHeads = 22;

const bool kHalf = RegisterBackendConformance("EmulatedHalf", MakeEmulated,
                                              {.random_problems = 0,
                                               .element = ElementType::kFloat16,
                                               .precision = EnginePrecision::HalfOperands(),
                                               .max_unsupported = kWiderHeads});
const bool kBFloat16 = RegisterBackendConformance("EmulatedBFloat16", MakeEmulated,
                                                  {.max_pairs = 4000,
                                                   .random_problems = 0,
                                                   .element = ElementType::kBFloat16,
                                                   .precision = EnginePrecision::HalfOperands(),
                                                   .max_unsupported = kWiderHeads});

}  // namespace
}  // namespace attnd::cuda
