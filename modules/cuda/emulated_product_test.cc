// Products of layers on emulated GPUs: their numbers, hazards of shared memory, and which kernels
// ran.
#include <memory>
#include <set>
#include <string>

#include "kernels/engine/device/emulated_device.h"
#include "modules/cuda/cuda_device.h"
#include "modules/cuda/product_conformance.h"

namespace attnd {
namespace {

template <Architecture kArchitecture>
std::unique_ptr<cuda::CudaBackend> MakeEmulated() {
  return std::make_unique<cuda::CudaBackend>(cuda::MakeEmulatedDevice(
      {.architecture = kArchitecture, .shared = {.count_conflicts = false, .detect_races = true}}));
}

INSTANTIATE_TEST_SUITE_P(
    Emulated, ProductConformance,
    testing::Values(
        ConformanceDevice{"sm70_float16", MakeEmulated<Architecture::kSm70>, ElementType::kFloat16},
        ConformanceDevice{"sm80_float16", MakeEmulated<Architecture::kSm80>, ElementType::kFloat16},
        ConformanceDevice{"sm80_bfloat16", MakeEmulated<Architecture::kSm80>,
                          ElementType::kBFloat16}),
    [](const auto& info) { return info.param.name; });

// Names of the kernels that a product of this depth runs.
std::set<std::string> KernelsOf(Architecture architecture, ElementType element, int64_t depth) {
  std::set<std::string> names;
  cuda::CudaBackend engine(cuda::MakeEmulatedDevice(
      {.architecture = architecture,
       .shared = {.count_conflicts = true, .detect_races = false},
       .observer = [&](const KernelRow& row, const emulator::LaunchReport&) {
         names.insert(NameOf(row));
       }}));
  CudaDevice device(engine);
  auto* memory = device.Allocate(device.OwnBytes() + (int64_t{1} << 20)).value();
  const WeightMatrix weight{
      .weight = {memory, element}, .rows = 8, .columns = depth, .operand = element};
  device.Multiply({.rows = 3,
                   .a = {memory + (1 << 18), element},
                   .weight = weight,
                   .is_transposed = true,
                   .c = {memory + (1 << 19), element}});
  EXPECT_TRUE(device.Finish().ok());
  return names;
}

TEST(Products, AreOnTensorCoresWhereTheirRowsAreWholeChunks) {
  using Names = std::set<std::string>;
  constexpr ElementType kHalf = ElementType::kFloat16, kBrain = ElementType::kBFloat16;
  EXPECT_EQ(KernelsOf(Architecture::kSm70, kHalf, 16), Names{"product_rows_rows"});
  EXPECT_EQ(KernelsOf(Architecture::kSm80, kBrain, 16), Names{"product_rows_rows_bf16"});
  EXPECT_EQ(KernelsOf(Architecture::kSm90, kHalf, 16), Names{"product_rows_rows"});
  EXPECT_EQ(KernelsOf(Architecture::kSm70, kHalf, 12), Names{"dense_product"});
  EXPECT_EQ(KernelsOf(Architecture::kSm70, kBrain, 16), Names{"dense_product"});
  EXPECT_EQ(KernelsOf(Architecture::kSm80, ElementType::kFloat32, 16), Names{"dense_product"});
}

}  // namespace
}  // namespace attnd
