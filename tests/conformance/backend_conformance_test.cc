// Proof of the conformance table: the reference engine and honest float32 engines pass it, and each
// of many deliberate mistakes fails it.
#include "tests/conformance/backend_conformance.h"

#include <gtest/gtest.h>

#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "kernels/reference_backend.h"
#include "tests/conformance/naive_backend.h"

namespace attnd {
namespace {

constexpr int64_t kMaxPairs = 6500;  // keeps these slow engines' tests short

const bool kReference = RegisterBackendConformance(
    "Reference", [] { return std::make_unique<ReferenceBackend>(); },
    {.max_pairs = kMaxPairs, .random_problems = 20, .random_max_pairs = 2000});

const bool kFloat32 = RegisterBackendConformance(
    "NaiveFloat32", [] { return std::make_unique<NaiveBackend>(); },
    {.max_pairs = kMaxPairs, .random_problems = 100, .random_max_pairs = 2000});

const bool kHalfOperands = RegisterBackendConformance(
    "NaiveHalfOperands",
    [] { return std::make_unique<NaiveBackend>(Mistake::kNone, /*rounds_operands=*/true); },
    {.max_pairs = kMaxPairs,
     .random_max_pairs = 2000,
     .precision = EnginePrecision::HalfOperands()});

TEST(ConformanceCases, HaveNamesOfTheirOwnAndValidProblems) {
  std::set<std::string> names;
  for (const ConformanceCase& c : NamedConformanceCases()) {
    EXPECT_TRUE(names.insert(c.name).second) << c.name;
    EXPECT_TRUE(Validate(c.problem).ok()) << c.name << ": " << Validate(c.problem);
  }
}

// A mistake, and cases each of which must notice it.
struct Control {
  Mistake mistake;
  std::vector<std::string> cases;
};

const Control kControls[] = {
    {Mistake::kSwappedAlignment, {"causal_top_left_float16", "causal_bottom_right_float32"}},
    {Mistake::kCausalOffByOne, {"causal_bottom_right_bfloat16", "packed_thd_causal"}},
    {Mistake::kWindowRightOffByOne, {"window_0_5_top_left", "window_0_0_bottom_right"}},
    {Mistake::kWindowLeftOffByOne, {"window_5_0_top_left", "window_2_none_bottom_right"}},
    {Mistake::kMaskOffByOne, {"bool_mask_1_1_1_47", "all_masks_together_float16"}},
    {Mistake::kKeyLengthIgnored, {"kv_lengths_float32", "causal_kv_lengths_top_left"}},
    {Mistake::kOneOffsetForAll, {"causal_offsets_per_batch", "packed_htd_offsets"}},
    {Mistake::kNeighbourSequence, {"packed_thd_float16", "packed_htd_float32"}},
    {Mistake::kMaskForgotten, {"mask_window_alone", "mask_bits_zero_rest"}},
    {Mistake::kMaskTransposed, {"mask_window_alone", "mask_blocks_causal"}},
    {Mistake::kMaskNeighbourKey, {"mask_row_intervals_alone", "mask_stride_col_dropout"}},
    {Mistake::kMaskOfFirstHead, {"mask_per_head_alone", "mask_bigbird_alone"}},
    {Mistake::kMaskOfKvHead, {"mask_per_head_alone", "mask_per_entry_sink"}},
    {Mistake::kMaskOfFirstEntry, {"mask_per_entry_alone", "mask_prefix_alone"}},
    {Mistake::kMaskOfEntryNumber, {"mask_per_head_alone", "mask_per_entry_causal"}},
    {Mistake::kMaskWithoutAlignment, {"mask_window_offsets", "mask_dilated_kv_lengths"}},
    {Mistake::kMaskListsMoved, {"mask_bits_alone", "mask_row_intervals_offsets"}},
    {Mistake::kMaskOfFirstOffset, {"mask_window_offsets", "mask_dilated_kv_lengths"}},
    {Mistake::kMaskRemainder, {"mask_stride_rel_alone", "mask_stride_rel_sink"}},
    {Mistake::kMaskOriginIgnored, {"mask_per_entry_alone", "mask_prefix_bias"}},
    {Mistake::kMaskOriginSwapped, {"mask_bits_origin", "mask_groups_origin"}},
    {Mistake::kMaxForLse, {"lengths_1_33", "usual_64_float16"}},
    {Mistake::kScaleAfterSoftmax, {"head_dim_64", "usual_128_bfloat16"}},
    {Mistake::kNoRescale, {"lengths_31_65", "usual_64_float32"}},
    {Mistake::kHalfScores, {"usual_64_float32", "huge_logits_float32"}},
    {Mistake::kZeroRestIgnored, {"zero_rest_float16", "causal_zero_rest_bfloat16"}},
    {Mistake::kPaddingIsRest,
     {"mask_window_zero_rest_kv_lengths_causal", "mask_bits_zero_rest_kv_lengths_causal"}},
    {Mistake::kSinkNotInLse, {"sink_float16", "causal_sink_float32"}},
    {Mistake::kUniformEmptyRow, {"no_row_sees_a_key_float16", "zero_rest_with_empty_rows"}},
    {Mistake::kNanLeak, {"causal_top_left_lengths_31_65", "nan_stays_with_its_rows_causal_value"}},
    {Mistake::kNanSwallowed, {"nan_surfaces_from_query", "nan_surfaces_from_bias"}},
    {Mistake::kDropoutUnscaled, {"dropout_128", "dropout_26"}},
    {Mistake::kShardIgnored, {"dropout_of_a_shard", "dropout_of_the_last_shard"}},
    {Mistake::kWrongKvHead, {"bhld_heads_4_2", "blhd_heads_6_3"}},
    {Mistake::kBiasBeforeSoftcap, {"softcap_bias_alibi_dropout_float32"}},
    {Mistake::kAlibiOneSided, {"alibi_both_sides"}},
    {Mistake::kUnscaledDk, {"usual_64_bfloat16", "head_dim_40"}},
    {Mistake::kDropoutNotReplayed, {"dropout_26", "packed_thd_grouped_dropout"}},
    {Mistake::kNoSoftcapSlope, {"softcap_5_float16", "softcap_50_bfloat16"}},
    {Mistake::kLseGradientIgnored, {"head_dim_16", "usual_64_float16"}},
    {Mistake::kDeltaIgnored, {"head_dim_16", "causal_zero_rest_float32"}},
    {Mistake::kOwnLse, {"head_dim_16", "one_of_everything_float32"}},
    {Mistake::kGroupOverwritten, {"head_dim_16", "bhld_heads_8_1"}},
    {Mistake::kBiasGradientOverwritten, {"bias_1_1_1_47", "bias_1_2_1_1"}},
    {Mistake::kBiasGradientOrder, {"bias_1_1_1_47", "bias_1_1_33_1"}},
    {Mistake::kUnwrittenEmptyRow, {"no_row_sees_a_key_float32", "zero_rest_with_empty_rows"}},
    {Mistake::kWritesBehindEnd, {"one_of_everything_float16", "head_dim_7"}},
    {Mistake::kDependsOnBatch, {"head_dim_7", "packed_htd_float32"}},
};

// The case of this name, or of this name and an element.
ConformanceCase CaseNamed(const std::string& name) {
  for (ConformanceCase& test_case : NamedConformanceCases()) {
    if (test_case.name == name) return test_case;
    for (const char* element : {"_float16", "_bfloat16", "_float32"}) {
      if (test_case.name == name + element) return test_case;
    }
  }
  ADD_FAILURE() << "no case " << name;
  return {};
}

TEST(ConformanceCases, NoticeEachDeliberateMistake) {
  EXPECT_EQ(std::size(kControls), static_cast<size_t>(Mistake::kMistakeCount) - 1);
  for (const Control& control : kControls) {
    NaiveBackend backend(control.mistake);
    for (const std::string& name : control.cases) {
      CaseReport report = CheckCase(backend, CaseNamed(name), {});
      EXPECT_FALSE(report.failures.empty())
          << name << " passes with mistake " << static_cast<int>(control.mistake);
    }
  }
}

}  // namespace
}  // namespace attnd
