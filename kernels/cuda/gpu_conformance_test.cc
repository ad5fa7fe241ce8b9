// The cuda engine on a GPU over the conformance table. Fails without a usable device.
#include <iostream>
#include <memory>

#include "base/check.h"
#include "gtest/gtest.h"
#include "kernels/registry/registry.h"
#include "tests/conformance/backend_conformance.h"
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

const bool kFloat = RegisterBackendConformance("GpuFloat", MakeGpu,
                                               {.random_problems = 100,
                                                .random_max_pairs = 20000,
                                                .element = ElementType::kFloat32,
                                                .precision = {.operand_underflow = 0x1p-48},
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

}  // namespace
}  // namespace attnd
