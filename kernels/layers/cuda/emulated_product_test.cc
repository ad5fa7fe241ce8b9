// Products of layers on emulated GPUs: their numbers, hazards of shared memory, and which kernels
// ran.
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/round_up.h"
#include "kernels/layers/cuda/cuda_device.h"
#include "modules/arena.h"
#include "tests/emulator/device/emulated_device.h"
#include "tests/emulator/device/emulated_engine.h"
#include "tests/layers/engine_fixture.h"
#include "tests/layers/product_conformance.h"
#include "tests/layers/reference_fixture.h"

namespace attnd {
namespace {

using Names = std::set<std::string>;

template <Architecture kArchitecture>
std::unique_ptr<cuda::CudaBackend> MakeEmulatedForProducts() {
  return cuda::MakeEmulatedEngine(
      {.architecture = kArchitecture, .shared = {.count_conflicts = false, .detect_races = true}});
}

bool IsProduct(const std::string& name) { return name.rfind("product_", 0) == 0; }
bool IsSmall(const KernelRow& row) { return row.small && !row.wide; }
bool IsLarge(const KernelRow& row) { return IsProduct(NameOf(row)) && !row.small && !row.wide; }
bool IsWide(const KernelRow& row) { return row.wide; }
// An engine that makes all products in tiles of a size, the others of which it `lacks`, without
// conflicts of banks, and tells the kernels that ran.
std::unique_ptr<cuda::CudaBackend> MakeOf(bool (*is_size)(const KernelRow&), Names* names,
                                          int multiprocessors = 2) {
  cuda::EmulatedDeviceOptions options = {
      .architecture = is_size == IsWide ? Architecture::kSm90 : Architecture::kSm80,
      .multiprocessors = multiprocessors,
      // Banks are counted by thread, and products of warpgroups read by whole panels.
      .shared = {.count_conflicts = is_size != IsWide, .detect_races = true},
      .observer = [names](const KernelRow& row, const emulator::LaunchReport& report) {
        const std::string name = NameOf(row);
        names->insert(name);
        if (!IsProduct(name)) return;
        for (const emulator::BankReport& bank : report.banks) {
          EXPECT_EQ(bank.conflicts, 0) << name << " " << bank.site.line();
        }
      }};
  options.lacks = [is_size](const KernelRow& row) {
    return IsProduct(NameOf(row)) && !is_size(row);
  };
  return cuda::MakeEmulatedEngine(options);
}

INSTANTIATE_TEST_SUITE_P(
    Emulated, ProductConformance,
    testing::Values(ConformanceDevice{"sm70_float16", MakeEmulatedForProducts<Architecture::kSm70>,
                                      ElementType::kFloat16},
                    ConformanceDevice{"sm80_float16", MakeEmulatedForProducts<Architecture::kSm80>,
                                      ElementType::kFloat16},
                    ConformanceDevice{"sm90_float16", MakeEmulatedForProducts<Architecture::kSm90>,
                                      ElementType::kFloat16},
                    ConformanceDevice{"sm90_bfloat16", MakeEmulatedForProducts<Architecture::kSm90>,
                                      ElementType::kBFloat16},
                    ConformanceDevice{"sm80_bfloat16", MakeEmulatedForProducts<Architecture::kSm80>,
                                      ElementType::kBFloat16},
                    ConformanceDevice{"sm80_float32", MakeEmulatedForProducts<Architecture::kSm80>,
                                      ElementType::kFloat32},
                    ConformanceDevice{"sm70_float32", MakeEmulatedForProducts<Architecture::kSm70>,
                                      ElementType::kFloat32}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Emulated, FloatProductConformance,
    testing::Values(ConformanceDevice{"sm80", MakeEmulatedForProducts<Architecture::kSm80>,
                                      ElementType::kFloat32},
                    ConformanceDevice{"sm70", MakeEmulatedForProducts<Architecture::kSm70>,
                                      ElementType::kFloat32}),
    [](const auto& info) { return info.param.name; });

TEST(Products, HaveTheSameBitsInTilesOfAnySize) {
  for (ElementType element :
       {ElementType::kFloat16, ElementType::kBFloat16, ElementType::kFloat32}) {
    SCOPED_TRACE(ElementName(element));
    Names large, small, wide;
    const std::vector<double> numbers = NumbersOfProducts(*MakeOf(IsLarge, &large), element);
    EXPECT_EQ(numbers, NumbersOfProducts(*MakeOf(IsSmall, &small), element));
    EXPECT_FALSE(numbers.empty());
    // Gradients: 2 multiprocessors make whole tiles of both widths, 4 cut one of five tiles, of 128
    // columns, into items of 4 parts, and 12 cut all of both widths into items of one. Other
    // products: 100 make all in tiles of 64 rows.
    for (int multiprocessors : {2, 4, 12, 100}) {
      if (element == ElementType::kFloat32) continue;
      SCOPED_TRACE(multiprocessors);
      EXPECT_EQ(numbers, NumbersOfProducts(*MakeOf(IsWide, &wide, multiprocessors), element));
    }
    Names products;
    for (const std::string& name : small) {
      if (IsProduct(name)) products.insert(name.substr(0, name.find("_small")));
    }
    EXPECT_EQ(products.size(), 3u);
    for (const std::string& name : products) {
      EXPECT_EQ(small.count(name), 0u) << name;
      EXPECT_EQ(large.count(name), 1u) << name;
      const size_t is_half = element == ElementType::kFloat32 ? 0 : 1;
      const bool is_gradient = name.find("depth_depth") != std::string::npos;
      EXPECT_EQ(wide.count(name + "_wide"), is_half) << name;
      EXPECT_EQ(wide.count(name + "_small_wide"), is_gradient ? 0 : is_half) << name;
    }
  }
}

// The sums C = A·B + A'·B' + A"·B", and how many launches made them. `apart`: each product after
// the one before has ended.
struct Added {
  Bytes sums;
  int launches = 0;
};
Added AddedProducts(ElementType element, ElementType sums, int multiprocessors, bool apart) {
  constexpr int64_t kRows = 200, kColumns = 136, kDepth = 72;
  Added added;
  cuda::CudaBackend engine(
      cuda::MakeEmulatedDevice({.architecture = Architecture::kSm90,
                                .multiprocessors = multiprocessors,
                                .observer = [&](const KernelRow& row, const auto&) {
                                  added.launches += IsProduct(NameOf(row)) ? 1 : 0;
                                }}));
  CudaDevice device(engine);
  Random random(7);
  const int64_t sums_bytes = kRows * kColumns * ElementBytes(sums);
  std::byte* next = device.Allocate(device.OwnBytes() + (int64_t{1} << 20)).value();
  const auto place = [&next](int64_t bytes) {
    return std::exchange(next, next + RoundUp(bytes, kTensorAlignment));
  };
  const auto put = [&](int64_t numbers) {
    const Bytes values =
        BytesOf(RandomNumbers(random, numbers, Rounder(Rounding::kElements), element), element);
    std::byte* const to = place(numbers * 2);
    EXPECT_TRUE(device.Put(element, values.data(), {to, element}, numbers).ok());
    return to;
  };
  std::vector<WeightProduct> products;
  std::byte* const c = place(sums_bytes);
  for (int n = 0; n < 3; ++n) {
    std::byte *const a = put(kRows * kDepth), *const b = put(kDepth * kColumns);
    products.push_back({.rows = kRows,
                        .a = {a, element},
                        .weight = {.weight = {b, element},
                                   .rows = kDepth,
                                   .columns = kColumns,
                                   .operand = element},
                        .c = {c, sums},
                        .add = n > 0});
  }
  for (const WeightProduct& product : products) {
    device.Multiply(product);
    if (apart) {
      EXPECT_TRUE(device.Finish().ok());
    }
  }
  added.sums.resize(sums_bytes);
  EXPECT_TRUE(device.Get({c, sums}, sums, added.sums.data(), kRows * kColumns).ok());
  EXPECT_TRUE(device.Finish().ok());
  return added;
}

TEST(Products, ThatAddToOneTensorAreOneLaunch) {
  for (ElementType element : {ElementType::kFloat16, ElementType::kBFloat16}) {
    for (ElementType sums : {element, ElementType::kFloat32}) {
      // A product has 8 short tiles.
      for (const auto& [multiprocessors, launches] :
           {std::pair(1, 3), {11, 2}, {12, 1}, {100, 1}}) {
        SCOPED_TRACE(
            absl::StrCat(ElementName(element), " ", ElementName(sums), " ", multiprocessors));
        const Added apart = AddedProducts(element, sums, multiprocessors, true);
        const Added together = AddedProducts(element, sums, multiprocessors, false);
        EXPECT_EQ(apart.launches, 3);
        EXPECT_EQ(together.launches, launches);
        EXPECT_EQ(together.sums, apart.sums);
      }
    }
  }
}

// Names of the kernels that a product of this depth runs.
Names KernelsOf(Architecture architecture, ElementType element, int64_t depth) {
  Names names;
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
  constexpr ElementType kHalf = ElementType::kFloat16, kBrain = ElementType::kBFloat16;
  EXPECT_EQ(KernelsOf(Architecture::kSm70, kHalf, 16), Names{"product_rows_rows"});
  EXPECT_EQ(KernelsOf(Architecture::kSm80, kBrain, 16), Names{"product_rows_rows_bf16_small"});
  EXPECT_EQ(KernelsOf(Architecture::kSm90, kHalf, 16), Names{"product_rows_rows_small_wide"});
  EXPECT_EQ(KernelsOf(Architecture::kSm70, kHalf, 12), Names{"dense_product"});
  EXPECT_EQ(KernelsOf(Architecture::kSm70, kBrain, 16), Names{"dense_product"});
  constexpr ElementType kFloat = ElementType::kFloat32;
  EXPECT_EQ(KernelsOf(Architecture::kSm80, kFloat, 12), Names{"product_rows_rows_tf32x3_small"});
  EXPECT_EQ(KernelsOf(Architecture::kSm80, kFloat, 10), Names{"dense_product"});
  EXPECT_EQ(KernelsOf(Architecture::kSm70, kFloat, 16), Names{"dense_product"});
}

}  // namespace
}  // namespace attnd
