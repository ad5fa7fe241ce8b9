// Strided and dilated masks by residue classes, forced, so that small problems go that way too:
// the conformance table's own cases of that form, and larger ones with every option that classes
// take, against the float64 reference. Also which way the engine chooses, and what it says of it.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/masks/mask_description.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/conformance/residue_case.h"

namespace attnd {
namespace {

std::vector<ResidueCase> Table() {
  return {
      {"two_classes_of_several_tiles", 600, 530, Stride(2, 1)},
      {"rows_of_one_tile_each", 300, 300, Stride(7, 3)},
      {"longer_than_everything", 40, 50, Stride(1000, 13)},
      {"longer_than_32_bits_of_rows", 40, 50, Stride(4000000000u, 3999999990u)},
      {"as_long_as_the_rows", 48, 48, Stride(48, 0)},
      {"more_keys_than_classes_of_rows", 5, 90, Stride(9, 4)},
      {"causal_by_the_mask", 200, 230, And(Stride(3, 2), Leaf(RelativeWindow{-1, 0}))},
      {"causal_by_the_call", 200, 230, Stride(3, 2), [](Problem& p) { p.causal = true; }},
      {"window_behind_the_phase", 190, 190, And(Stride(6, 5), Leaf(RelativeWindow{2, 40}))},
      {"window_by_both", 190, 190, And(Stride(6, 5), Leaf(RelativeWindow{50, 60})),
       [](Problem& p) { p.window_left = 70, p.window_right = 20; }},
      {"window_by_both_in_shards_of_rows", 430, 430,
       And(Stride(3, 2), Leaf(RelativeWindow{50, 60})),
       [](Problem& p) { p.window_left = 70, p.window_right = 20; }},
      {"dilated", 260, 260, Leaf(Dilated{4, 16, 16})},
      {"dilated_to_one_side", 260, 260, Leaf(Dilated{3, -1, 5})},
      {"key_lengths", 130, 170, Stride(4, 1),
       [](Problem& p) {
         p.kv_lengths = {170, 61};
       }},
      {"offsets", 130, 170, Stride(5, 2),
       [](Problem& p) {
         p.alignment = Alignment::kOffsets;
         p.offsets = {-33, 90};
       }},
      {"packed", 150, 190, Stride(5, 2),
       [](Problem& p) {
         p.layout = Layout::kPackedThd;
         p.cu_seqlens_q = {0, 3, 150};
         p.cu_seqlens_k = {0, 101, 190};
       }},
      {"packed_without_rows", 60, 90, Stride(5, 2),
       [](Problem& p) {
         p.layout = Layout::kPackedHtd;
         p.cu_seqlens_q = {0, 0, 60};
         p.cu_seqlens_k = {0, 40, 90};
       }},
      {"heads_inside", 140, 140, Stride(3, 1), [](Problem& p) { p.layout = Layout::kBlhd; }},
      {"zero_rest", 140, 140, Stride(3, 1),
       [](Problem& p) {
         p.denominator = DenominatorKind::kZeroRest;
         p.kv_lengths = {140, 100};
       }},
      {"sink", 140, 140, Stride(3, 1),
       [](Problem& p) {
         p.denominator = DenominatorKind::kSink;
         p.sink_logits = {0.5f, -1};
       }},
      {"softcap", 140, 140, Stride(3, 1), [](Problem& p) { p.softcap = 4; }},
  };
}

std::vector<ConformanceCase> Cases() {
  std::vector<ConformanceCase> cases;
  for (const ResidueCase& named : Table()) {
    for (ElementType element :
         {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16}) {
      cases.push_back(named.Of(element));
    }
  }
  for (ConformanceCase& c : NamedConformanceCases()) {
    if (c.problem.mask != nullptr && ResidueClassesOf(c.problem).ok()) {
      cases.push_back(std::move(c));
    }
  }
  return cases;
}

TEST(CpuResidue, ConformsWhereverItIsForced) {
  std::unique_ptr<Backend> engine =
      MakeCpuBackend({.threads = 3, .mask_kernel = CpuMaskKernel::kResidue});
  const std::vector<ConformanceCase> cases = Cases();
  EXPECT_GT(cases.size(), 3 * Table().size() + 15) << "the table's own strides count too";
  for (const ConformanceCase& test_case : cases) {
    const CaseReport report = CheckCase(*engine, test_case, {});
    EXPECT_EQ(report.unsupported, 0) << test_case.name;
    for (const std::string& failure : report.failures) {
      ADD_FAILURE() << test_case.name << ": " << failure;
    }
  }
}

std::string KernelOf(const Backend& engine, const Problem& p) {
  const auto kernel = engine.KernelForMask(p, Direction::kForward);
  return kernel.ok() ? kernel->kernel + ": " + kernel->reason : kernel.status().ToString();
}

TEST(CpuResidue, IsChosenByPredictedTimeAndSaysSo) {
  std::unique_ptr<Backend> engine = MakeCpuBackend({.threads = 1});
  Problem p = Sized(4096, 4096);
  SetMask(Stride(64, 0), p);
  EXPECT_EQ(KernelOf(*engine, p).find("cpu_forward_float32_residue: "), 0u) << KernelOf(*engine, p);
  p.dropout.threshold = 26;
  EXPECT_EQ(KernelOf(*engine, p),
            "cpu_forward_float32_listed: lists of tiles: 100 % of the scores are visited; not by "
            "residues, problem.dropout: drawn for blocks of scores");
  p.dropout.threshold = 0;
  SetMask(Stride(4096, 0), p);
  EXPECT_EQ(KernelOf(*engine, p),
            "cpu_forward_float32_listed: lists of tiles: 1.56 % of the scores are visited; not by "
            "residues, predicted to take longer");
  SetMask(Leaf(RelativeWindow{5000, 5000}), p);
  EXPECT_EQ(KernelOf(*engine, p), "cpu_forward_float32: the mask hides nothing");
}

TEST(CpuResidue, IsNamedWhereItIsForcedAndCannotRun) {
  Problem p = Sized(64, 64);
  SetMask(Stride(4, 0), p);
  p.dropout.threshold = 26;
  std::unique_ptr<Backend> residue = MakeCpuBackend({.mask_kernel = CpuMaskKernel::kResidue});
  EXPECT_EQ(
      residue->Supports(p, Direction::kForward),
      absl::UnimplementedError("kernel residue: problem.dropout: drawn for blocks of scores"));
  std::unique_ptr<Backend> dense = MakeCpuBackend({.mask_kernel = CpuMaskKernel::kDense});
  EXPECT_EQ(dense->Supports(p, Direction::kBackward),
            absl::UnimplementedError("kernel dense: the mask hides scores"));
}

}  // namespace
}  // namespace attnd
