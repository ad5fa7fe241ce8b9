// Captured attention maps of the cuda engine, its kernels run in the emulator, against the float64
// reference: 1e-3 with 16-bit operands, 2e-6 in float32.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "kernels/cuda/cuda_backend.h"
#include "tests/conformance/capture_cases.h"
#include "tests/emulator/device/emulated_engine.h"

namespace attnd::cuda {
namespace {

std::unique_ptr<Backend> Emulated(Architecture architecture, double max_slice_seconds = 1e9) {
  return MakeEmulatedEngine({.architecture = architecture, .max_slice_seconds = max_slice_seconds});
}

TEST(EmulatedCapture, Sm70) {
  const auto gpu = Emulated(Architecture::kSm70);
  EXPECT_TRUE(gpu->SupportsCapture().ok());
  const std::vector<CaptureCase> cases = CaptureCases(ElementType::kFloat16);
  EXPECT_EQ(CheckCaptures(*gpu, cases, 1e-3), cases.size());
  CheckRandomCaptures(*gpu, ElementType::kFloat16, 60, 3000, 1e-3);
  CheckRandomCaptures(*gpu, ElementType::kBFloat16, 20, 3000, 1e-3);
}

TEST(EmulatedCapture, Sm80) {
  const auto gpu = Emulated(Architecture::kSm80);
  EXPECT_TRUE(gpu->SupportsCapture().ok());
  const std::vector<CaptureCase> cases = CaptureCases(ElementType::kBFloat16);
  EXPECT_EQ(CheckCaptures(*gpu, cases, 1e-3), cases.size());
  CheckRandomCaptures(*gpu, ElementType::kFloat16, 30, 3000, 1e-3);
  CheckRandomCaptures(*gpu, ElementType::kBFloat16, 30, 3000, 1e-3);
}

TEST(EmulatedCapture, Sm80Float) {
  const auto gpu = Emulated(Architecture::kSm80);
  const std::vector<CaptureCase> cases = CaptureCases(ElementType::kFloat32);
  EXPECT_EQ(CheckCaptures(*gpu, cases, 2e-6), cases.size() - 1);  // no head dimension of 256
  CheckRandomCaptures(*gpu, ElementType::kFloat32, 60, 3000, 2e-4);
}

// They run sm_80's kernels.
TEST(EmulatedCapture, Sm90) {
  const auto gpu = Emulated(Architecture::kSm90);
  EXPECT_TRUE(gpu->SupportsCapture().ok());
  CheckRandomCaptures(*gpu, ElementType::kFloat16, 10, 3000, 1e-3);
}

TEST(EmulatedCapture, SlicesChangeNoBit) {
  const Problem p = DenseProblem(2, 2, 300, 300, ElementType::kFloat16);
  const CaptureRequest request = {.block = 48, .keep_map = true};
  for (Architecture architecture : {Architecture::kSm70, Architecture::kSm80}) {
    const auto whole = Emulated(architecture), sliced = Emulated(architecture, 1e-9);
    const CapturedMap a = CapturableForward(*whole, p, 9).Capture(request);
    const CapturedMap b = CapturableForward(*sliced, p, 9).Capture(request);
    EXPECT_EQ(a.pooled, b.pooled);
    EXPECT_EQ(a.map, b.map);
    EXPECT_EQ(a.skewness, b.skewness);
  }
}

}  // namespace
}  // namespace attnd::cuda
