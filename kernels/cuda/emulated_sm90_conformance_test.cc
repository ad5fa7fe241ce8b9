// The cuda engine's host code and the kernels for sm_90, run in the emulator over the conformance
// table's small problems. All of them run on GPUs, in gpu_conformance_test.
#include <memory>
#include <utility>

#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/conformance/backend_conformance.h"
#include "tests/emulator/device/emulated_engine.h"
#include "tests/masks/small_masks.h"

namespace attnd::cuda {
namespace {

const bool kSm90Half =
    RegisterBackendConformance("EmulatedSm90Half", MakeEmulated<Architecture::kSm90>,
                               {.max_pairs = 2000,
                                .random_problems = 5,
                                .random_max_pairs = 4000,
                                .element = ElementType::kFloat16,
                                .precision = EnginePrecision::HalfOperands(),
                                .max_unsupported = 0});
const bool kSm90BFloat16 =
    RegisterBackendConformance("EmulatedSm90BFloat16", MakeEmulated<Architecture::kSm90>,
                               {.max_pairs = 600,
                                .random_problems = 3,
                                .random_max_pairs = 3000,
                                .element = ElementType::kBFloat16,
                                .precision = EnginePrecision::HalfOperands(),
                                .max_unsupported = 0});

// Two query heads of one KV head, which causal attention or a mask cuts.
Problem WithDropout(int64_t q_len, int64_t kv_len, uint32_t threshold, bool masked) {
  Problem p;
  p.batch = 1;
  p.q_heads = 2;
  p.kv_heads = 1;
  p.q_len = q_len;
  p.kv_len = kv_len;
  p.qk_head_dim = p.v_head_dim = 64;
  p.element = ElementType::kFloat16;
  p.causal = !masked;
  p.alignment = Alignment::kBottomRight;
  p.dropout = {threshold, 7, 9};
  if (masked) SetMask(Window(20, 0), p);
  return p;
}

void ExpectDropsAsTheReference(const Problem& p) {
  const std::unique_ptr<Backend> backend = MakeEmulated<Architecture::kSm90>();
  const CaseReport report = CheckCase(*backend, {.name = "dropout", .problem = p, .brief = true},
                                      {.precision = EnginePrecision::HalfOperands()});
  EXPECT_EQ(report.unsupported, 0);
  EXPECT_TRUE(report.failures.empty()) << absl::StrJoin(report.failures, "\n");
}

// A kernel decides ahead, tile by tile as the main kernel's blocks visit them; a threshold on
// either side of 128. The longer one has in forward two tiles of queries and six of keys, more than
// are decided at once, in backward six tiles of keys and four of queries.
TEST(EmulatedSm90, DecidesDropoutAhead) {
  for (const uint32_t threshold : {26u, 180u}) {
    for (const bool masked : {false, true}) {
      SCOPED_TRACE(testing::Message() << threshold << masked);
      ExpectDropsAsTheReference(WithDropout(150, 170, threshold, masked));
    }
  }
  ExpectDropsAsTheReference(WithDropout(200, 650, 26, /*masked=*/false));
}

}  // namespace
}  // namespace attnd::cuda
