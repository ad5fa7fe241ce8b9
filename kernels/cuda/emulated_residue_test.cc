// Strided and dilated masks by residue classes on the cuda engine's kernels, forced, so that small
// problems go that way too: each architecture in the emulator against the float64 reference, with
// repeats, shards, neighbours in a launch and kept forwards (tests/conformance). Also which way the
// engine chooses, and what it says of it.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/masks/mask_description.h"
#include "attention/residue_classes.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/conformance/residue_case.h"
#include "tests/emulator/device/emulated_engine.h"

namespace attnd::cuda {
namespace {

std::vector<ResidueCase> Table() {
  return {
      {"two_classes_of_several_tiles", 270, 70, Stride(2, 1)},
      {"rows_of_one_tile_each", 40, 50, Stride(3, 2)},
      {"eight", 70, 61, Stride(8, 3)},
      {"longer_than_everything", 6, 9, Stride(400, 13)},
      {"as_long_as_the_rows", 8, 8, Stride(8, 0)},
      {"more_keys_than_classes_of_rows", 5, 90, Stride(9, 4)},
      {"causal_by_the_mask", 60, 70, And(Stride(3, 2), Leaf(RelativeWindow{-1, 0}))},
      {"causal_by_the_call", 60, 70, Stride(2, 1), [](Problem& p) { p.causal = true; }},
      {"window_behind_the_phase", 60, 60, And(Stride(6, 5), Leaf(RelativeWindow{2, 40}))},
      {"window_by_both", 70, 70, And(Stride(6, 5), Leaf(RelativeWindow{30, 60})),
       [](Problem& p) { p.window_left = 40, p.window_right = 20; }},
      // Long enough for shards of some rows; where a row begins to see keys tells how it is summed.
      {"window_by_both_in_shards_of_rows", 430, 430,
       And(Stride(3, 2), Leaf(RelativeWindow{30, 60})),
       [](Problem& p) {
         p.window_left = 40;
         p.window_right = 20;
       },
       true},
      {"dilated", 70, 70, Leaf(Dilated{4, 5, 5})},
      {"key_lengths", 40, 60, Stride(4, 1),
       [](Problem& p) {
         p.kv_lengths = {60, 21};
       }},
      {"offsets", 40, 60, Stride(5, 2),
       [](Problem& p) {
         p.alignment = Alignment::kOffsets;
         p.offsets = {-13, 30};
       }},
      {"packed", 50, 60, Stride(5, 2),
       [](Problem& p) {
         p.layout = Layout::kPackedThd;
         p.cu_seqlens_q = {0, 3, 50};
         p.cu_seqlens_k = {0, 31, 60};
       }},
      {"packed_without_rows", 30, 40, Stride(5, 2),
       [](Problem& p) {
         p.layout = Layout::kPackedHtd;
         p.cu_seqlens_q = {0, 0, 30};
         p.cu_seqlens_k = {0, 20, 40};
       }},
      {"heads_inside", 40, 40, Stride(3, 1), [](Problem& p) { p.layout = Layout::kBlhd; }},
      {"softcap", 40, 40, Stride(3, 1), [](Problem& p) { p.softcap = 4; }},
  };
}

// Every `stride`-th and whole ones; of these every kWholeResidueStride-th in whole, the rest are
// brief: one launch each way.
constexpr size_t kWholeResidueStride = 4;
std::vector<ConformanceCase> Cases(ElementType element, size_t stride) {
  std::vector<ConformanceCase> cases;
  size_t n = 0;
  for (const ResidueCase& named : Table()) {
    if (n++ % stride != 0 && !named.is_whole) continue;
    cases.push_back(named.Of(element));
    cases.back().brief = cases.size() % kWholeResidueStride != 1 && !named.is_whole;
  }
  return cases;
}

std::unique_ptr<CudaBackend> Engine(Architecture architecture, std::optional<MaskWay> way) {
  return MakeEmulatedEngine({.architecture = architecture}, way);
}

void Conforms(Architecture architecture, ElementType element, size_t stride) {
  const std::unique_ptr<CudaBackend> engine = Engine(architecture, MaskWay::kResidue);
  const ConformanceOptions options = {.precision = EnginePrecision::HalfOperands()};
  for (const ConformanceCase& test_case : Cases(element, stride)) {
    const CaseReport report = CheckCase(*engine, test_case, options);
    EXPECT_EQ(report.unsupported, 0) << test_case.name;
    for (const std::string& failure : report.failures) {
      ADD_FAILURE() << test_case.name << ": " << failure;
    }
  }
}

TEST(EmulatedResidue, Sm70Conforms) { Conforms(Architecture::kSm70, ElementType::kFloat16, 1); }
TEST(EmulatedResidue, Sm70ConformsInBFloat16AsHalves) {
  Conforms(Architecture::kSm70, ElementType::kBFloat16, 3);
}
TEST(EmulatedResidue, Sm80Conforms) { Conforms(Architecture::kSm80, ElementType::kFloat16, 2); }
TEST(EmulatedResidue, Sm80ConformsInBFloat16) {
  Conforms(Architecture::kSm80, ElementType::kBFloat16, 8);
}
TEST(EmulatedResidue, Sm90Conforms) { Conforms(Architecture::kSm90, ElementType::kFloat16, 2); }

std::string KernelOf(const Backend& engine, const Problem& p, Direction direction) {
  const auto kernel = engine.KernelForMask(p, direction);
  return kernel.ok() ? kernel->kernel + ": " + kernel->reason : kernel.status().ToString();
}

TEST(EmulatedResidue, IsChosenByPredictedTimeAndSaysSo) {
  const auto engine = Engine(Architecture::kSm70, std::nullopt);
  Problem p = Sized(16384, 16384);
  p.element = ElementType::kFloat16;
  p.qk_head_dim = p.v_head_dim = 64;
  SetMask(Stride(64, 0), p);
  EXPECT_EQ(KernelOf(*engine, p, Direction::kForward),
            "cuda_forward_d64_f32_linear_residue: rows of one residue together: predicted 2.7 % "
            "of the time without a mask, by lists of tiles 100 %");
  EXPECT_EQ(KernelOf(*engine, p, Direction::kBackward).find("cuda_backward_d64_f32_linear"), 0u);
  p.dropout.threshold = 26;
  const std::string by_lists = KernelOf(*engine, p, Direction::kForward);
  EXPECT_NE(by_lists.find("not by residues, problem.dropout: drawn for blocks of scores"),
            std::string::npos)
      << by_lists;
  p = Sized(256, 256);
  p.element = ElementType::kFloat16;
  SetMask(Stride(64, 0), p);
  const std::string small = KernelOf(*engine, p, Direction::kForward);
  EXPECT_EQ(small.find("cuda_forward_d32_f32_small: "), 0u) << small;
  EXPECT_NE(small.find("not by residues, predicted to take longer"), std::string::npos) << small;
}

TEST(EmulatedResidue, IsNamedWhereItIsForcedAndCannotRun) {
  const auto engine = Engine(Architecture::kSm70, MaskWay::kResidue);
  Problem p = Sized(64, 64);
  p.element = ElementType::kFloat16;
  SetMask(Stride(4, 0), p);
  p.denominator = DenominatorKind::kZeroRest;
  EXPECT_EQ(engine->Supports(p, Direction::kForward),
            absl::UnimplementedError(
                "kernel residue: problem.denominator: counts what other classes have"));
}

}  // namespace
}  // namespace attnd::cuda
