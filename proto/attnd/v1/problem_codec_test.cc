#include "proto/attnd/v1/problem_codec.h"

#include <google/protobuf/text_format.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <string>

#include "attention/masks/mask_description.h"
#include "attention/random_problem.h"

namespace attnd {
namespace {

TEST(ProblemCodec, ProblemsComeBackWithoutTheirMask) {
  for (const bool masks : {false, true}) {
    for (uint64_t seed = 0; seed < 300; ++seed) {
      Problem p = RandomProblem(seed, {.masks = masks});
      const v1::Problem wire = EncodeProblem(p);
      EXPECT_EQ(wire.has_mask(), p.mask != nullptr) << "seed " << seed;
      const auto back = DecodeProblemFields(wire);
      ASSERT_TRUE(back.ok()) << "seed " << seed << ": " << back.status();
      p.mask = nullptr;
      p.mask_origin = {};
      p.mask_share = 1;
      EXPECT_TRUE(*back == p) << "seed " << seed << ": " << wire.DebugString();
    }
  }
}

// Field by field, since one that is read from and written to a wrong place would come back too.
TEST(ProblemCodec, EachValueStandsInItsField) {
  Problem p;
  p.batch = 2;
  p.q_heads = 6;
  p.kv_heads = 3;
  p.q_len = 7;
  p.kv_len = 9;
  p.qk_head_dim = 16;
  p.v_head_dim = 8;
  p.element = ElementType::kBFloat16;
  p.layout = Layout::kPackedHtd;
  p.scale = 0.5f;
  p.softcap = 30;
  p.alignment = Alignment::kOffsets;
  p.offsets = {-3, 4};
  p.causal = true;
  p.window_left = 5;
  p.kv_lengths = {1, 2};
  p.cu_seqlens_q = {0, 3, 7};
  p.cu_seqlens_k = {0, 4, 9};
  p.bool_mask = BoolMask{{2, 6, 1, 5}};
  p.bias = Bias{ElementType::kFloat16, {1, 6, 4, 5}, true};
  p.alibi_slopes = {0.25f};
  p.dropout = {64, 11, 12};
  p.denominator = DenominatorKind::kSink;
  p.sink_logits = {1.5f};
  p.accumulate = AccumulateType::kFloat16;
  p.allow_nondeterministic = true;
  p.shard = {3, 4, 10};
  v1::Problem expected;
  ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(R"(
      batch: 2 q_heads: 6 kv_heads: 3 q_len: 7 kv_len: 9 qk_head_dim: 16 v_head_dim: 8
      element: ELEMENT_BFLOAT16 layout: LAYOUT_PACKED_HTD scale: 0.5 softcap: 30
      alignment { offsets { offset: [-3, 4] } } causal: true window { left: 5 right: -1 }
      lengths { kv_len: [1, 2] cu_seqlens_q: [0, 3, 7] cu_seqlens_k: [0, 4, 9] }
      bool_mask { shape: [2, 6, 1, 5] }
      bias { element: ELEMENT_FLOAT16 shape: [1, 6, 4, 5] want_gradient: true }
      alibi { slope: 0.25 } dropout { p: 0.25 seed: 11 offset: 12 }
      denominator { sink { logit: 1.5 } } accumulate: ACCUMULATE_FLOAT16
      allow_nondeterministic: true shard { batch_offset: 3 q_head_offset: 4 total_q_heads: 10 })",
                                                            &expected));
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(EncodeProblem(p), expected))
      << EncodeProblem(p).DebugString();
  const auto back = DecodeProblemFields(expected);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_TRUE(*back == p);
}

TEST(ProblemCodec, KnownMasksAreSentByTheirId) {
  Problem p = RandomProblem(1, {.masks = true});
  p.mask_origin.row_begin = 3;
  const v1::Problem wire = EncodeProblem(p, MaskForm::kId);
  EXPECT_EQ(wire.mask().id(), std::string(p.mask->id().begin(), p.mask->id().end()));
  EXPECT_EQ(wire.mask().pattern_size(), 0);
  EXPECT_EQ(wire.mask().origin().row_begin(), 3);
}

TEST(ProblemCodec, OptionsNameTheirPathAndLeaveSizesAlone) {
  v1::Problem wire;
  wire.set_causal(true);
  const auto options = DecodeProblemOptions(wire, "op.options");
  ASSERT_TRUE(options.ok()) << options.status();
  Problem expected;
  expected.causal = true;
  EXPECT_TRUE(*options == expected);
  wire.mutable_dropout()->set_p(0.999f);
  EXPECT_EQ(DecodeProblemOptions(wire, "op.options").status().message(),
            "op.options.dropout.p: expected 0 ≤ p < 1 that does not round to 1 in steps of 1/256, "
            "got 0.999");
}

}  // namespace
}  // namespace attnd
