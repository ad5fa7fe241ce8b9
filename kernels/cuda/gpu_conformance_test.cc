// The cuda engine on a GPU over the conformance table. Fails without a usable device.
#include <iostream>
#include <memory>

#include "base/check.h"
#include "gtest/gtest.h"
#include "kernels/registry/registry.h"
#include "tests/conformance/backend_conformance.h"
#include "tests/conformance/hidden_numbers.h"
#include "tests/conformance/long_list_cases.h"

namespace attnd {
namespace {

std::unique_ptr<Backend> MakeGpu() {
  auto backend = MakeBackend("cuda", {.memory_fraction = 0.05});  // room for other runs
  CHECK(backend.ok()) << backend.status();
  const BackendInfo& info = (*backend)->info();
  std::cout << "device: " << info.device << " " << info.architecture << " " << info.uuid << "\n";
  return *std::move(backend);
}

const bool kHalf = RegisterBackendConformance("GpuHalf", MakeGpu,
                                              {.random_problems = 200,
                                               .random_max_pairs = 20000,
                                               .element = ElementType::kFloat16,
                                               .precision = EnginePrecision::HalfOperands(),
                                               .max_unsupported = 0});
const bool kBFloat16 = RegisterBackendConformance("GpuBFloat16", MakeGpu,
                                                  {.random_problems = 100,
                                                   .random_max_pairs = 20000,
                                                   .element = ElementType::kBFloat16,
                                                   .precision = EnginePrecision::HalfOperands(),
                                                   .max_unsupported = 0});

const bool kFloat = RegisterBackendConformance(
    "GpuFloat", MakeGpu,
    {.random_problems = 100,
     .random_max_pairs = 20000,
     .element = ElementType::kFloat32,
     .precision = {.operand_underflow = 0x1p-48, .query_gradient_unit = 0x1p-50},
     .max_unsupported = 126});

void LongListsConform(ElementType element, int64_t head_dim) {
  const std::unique_ptr<Backend> engine = MakeGpu();
  const ConformanceOptions options = {.precision = EnginePrecision::HalfOperands()};
  for (ConformanceCase& test_case : LongListCases(element)) {
    test_case.problem.qk_head_dim = test_case.problem.v_head_dim = head_dim;
    test_case.brief = false;
    const CaseReport report = CheckCase(*engine, test_case, options);
    EXPECT_EQ(report.unsupported, 0) << test_case.name;
    for (const std::string& failure : report.failures) {
      ADD_FAILURE() << test_case.name << ": " << failure;
    }
  }
}
TEST(GpuLongLists, Half) { LongListsConform(ElementType::kFloat16, 128); }
TEST(GpuLongLists, BFloat16) { LongListsConform(ElementType::kBFloat16, 64); }

// Every width of a kernel, and more tiles than the table's.
void HiddenNumbersConform(ElementType element, const EnginePrecision& precision) {
  const std::unique_ptr<Backend> engine = MakeGpu();
  const std::unique_ptr<CallMemory> memory = MakeHostCallMemory();
  for (const int64_t head_dim : {32, 96, 128, 256}) {
    for (const HiddenNumberCase& of : HiddenNumberCases(element, 200, head_dim)) {
      for (const std::string& failure : CheckHiddenNumbers(*engine, of, *memory, precision)) {
        ADD_FAILURE() << of.name << " D " << head_dim << ": " << failure;
      }
    }
  }
  for (const HiddenNumberCase& of : HiddenNumberCases(element, 700, 64)) {
    for (const std::string& failure : CheckHiddenNumbers(*engine, of, *memory, precision)) {
      ADD_FAILURE() << of.name << " of 700 rows: " << failure;
    }
  }
}
TEST(GpuHiddenNumbers, Half) {
  HiddenNumbersConform(ElementType::kFloat16, EnginePrecision::HalfOperands());
}
TEST(GpuHiddenNumbers, BFloat16) {
  HiddenNumbersConform(ElementType::kBFloat16, EnginePrecision::HalfOperands());
}
TEST(GpuHiddenNumbers, Float) {
  HiddenNumbersConform(ElementType::kFloat32,
                       {.operand_underflow = 0x1p-48, .query_gradient_unit = 0x1p-50});
}

}  // namespace
}  // namespace attnd
