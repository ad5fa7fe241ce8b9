#include "proto/attnd/v1/module_codec.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/layers/random_module.h"

namespace attnd {
namespace {

TEST(ModuleCodec, RandomLayoutsComeBackAsTheyWere) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    Random random(seed);
    const ModuleLayout layout = RandomLayout(random);
    v1::ModuleLayout wire;
    ASSERT_TRUE(wire.ParseFromString(EncodeModuleLayout(layout).SerializeAsString()));
    absl::StatusOr<ModuleLayout> back = DecodeModuleLayout(wire);
    ASSERT_TRUE(back.ok()) << "seed " << seed << ": " << back.status();
    EXPECT_EQ(EncodeModuleLayout(*back).SerializeAsString(), wire.SerializeAsString());
    EXPECT_TRUE(ModuleGraph::Make(*back).ok()) << "seed " << seed;
    ASSERT_EQ(back->blocks.size(), layout.blocks.size());
    for (size_t n = 0; n < layout.blocks.size(); ++n) {
      ASSERT_EQ(back->blocks[n].ops.size(), layout.blocks[n].ops.size());
      for (size_t op = 0; op < layout.blocks[n].ops.size(); ++op) {
        EXPECT_EQ(back->blocks[n].ops[op].kind.index(), layout.blocks[n].ops[op].kind.index());
      }
    }
  }
}

TEST(ModuleCodec, EveryFieldOfAttentionComesBack) {
  Problem options;
  options.scale = 0.5f;
  options.softcap = 30;
  options.alignment = Alignment::kOffsets;
  options.offsets = {-3};
  options.causal = true;
  options.window_left = 5;
  options.alibi_slopes = {0.5f, 0.25f};
  options.denominator = DenominatorKind::kSink;
  options.sink_logits = {1, -1};
  options.dropout.threshold = 26;
  AttentionOp op{.q = {2, 3, 2, 4}, .k = {5, 6, 1, 4}, .v = {7, 8, 1, 9}, .options = options};
  op.rotary = Rotary{{1, 0.5f}, 1.5f, true};
  op.mask = MaskSpec{.pattern = {MaskExpr{.op = RelativeWindow{1, 2}}}, .pattern_of = {0}};
  op.q_norm = 1;
  op.k_norm = 2;
  op.qk_norm_epsilon = 1e-6f;
  op.qk_norm_weight_offset = 1;
  op.qk_norm_round_before_weight = true;
  const ModuleLayout layout{.width = 8, .blocks = {{.ops = {{op, true}}}}, .layers = {{}}};
  auto back = DecodeModuleLayout(EncodeModuleLayout(layout));
  ASSERT_TRUE(back.ok()) << back.status();
  const auto& got = std::get<AttentionOp>(back->blocks[0].ops[0].kind);
  EXPECT_TRUE(back->blocks[0].ops[0].wide);
  EXPECT_TRUE(got.options == op.options);
  EXPECT_TRUE(got.mask == op.mask);
  EXPECT_EQ(got.rotary->inverse_frequency, op.rotary->inverse_frequency);
  EXPECT_EQ(got.rotary->attention_factor, 1.5f);
  EXPECT_TRUE(got.rotary->interleaved);
  EXPECT_EQ(got.v.value, 7);
  EXPECT_EQ(got.v.first_column, 8);
  EXPECT_EQ(got.v.heads, 1);
  EXPECT_EQ(got.v.dim, 9);
  EXPECT_EQ(got.q_norm, 1);
  EXPECT_EQ(got.k_norm, 2);
  EXPECT_EQ(got.qk_norm_epsilon, 1e-6f);
  EXPECT_EQ(got.qk_norm_weight_offset, 1);
  EXPECT_TRUE(got.qk_norm_round_before_weight);
}

v1::ModuleLayout SmallLayout() {
  v1::ModuleLayout wire;
  wire.set_version(1);
  wire.set_width(8);
  wire.set_element(v1::ELEMENT_FLOAT32);
  wire.set_parameter_element(v1::ELEMENT_FLOAT32);
  v1::Block& block = *wire.add_block();
  block.add_op()->mutable_activation()->set_kind(v1::ACTIVATION_KIND_TANH);
  v1::AttentionOp& attention = *block.add_op()->mutable_attention();
  for (v1::Heads* heads : {attention.mutable_q(), attention.mutable_k(), attention.mutable_v()}) {
    heads->set_value(2);
    heads->set_heads(2);
    heads->set_dim(4);
  }
  wire.add_layer();
  return wire;
}

struct BadLayout {
  std::string message;
  std::function<void(v1::ModuleLayout&)> spoil;
};

v1::Problem& Options(v1::ModuleLayout& l) {
  return *l.mutable_block(0)->mutable_op(1)->mutable_attention()->mutable_options();
}
v1::Op& FirstOp(v1::ModuleLayout& l) { return *l.mutable_block(0)->mutable_op(0); }

void ExpectRefused(const std::vector<BadLayout>& cases) {
  ASSERT_TRUE(DecodeModuleLayout(SmallLayout()).ok());
  for (const BadLayout& bad : cases) {
    v1::ModuleLayout wire = SmallLayout();
    bad.spoil(wire);
    const absl::Status status = DecodeModuleLayout(wire).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.message;
    EXPECT_EQ(status.message(), bad.message);
  }
}

TEST(ModuleCodec, RefusesWhatTheValuesCannotHold) {
  ExpectRefused({
      {"version: expected 1..1, got 2", [](auto& l) { l.set_version(2); }},
      {"block: expected 1..8, got 9",
       [](auto& l) {
         while (l.block_size() < 9) l.add_block();
       }},
      {"layer: expected 1..512, got 513",
       [](auto& l) {
         while (l.layer_size() < 513) l.add_layer();
       }},
      {"block[0].op: expected 1..64, got 65",
       [](auto& l) {
         while (l.block(0).op_size() < 65) l.mutable_block(0)->add_op();
       }},
      {"element: expected ELEMENT_FLOAT16, ELEMENT_BFLOAT16 or ELEMENT_FLOAT32, got 0",
       [](auto& l) { l.clear_element(); }},
      {"parameter_element: expected ELEMENT_FLOAT16, ELEMENT_BFLOAT16 or ELEMENT_FLOAT32, got 9",
       [](auto& l) { l.set_parameter_element(static_cast<v1::Element>(9)); }},
      {"block[0].op[0].norm.kind: expected 1..2, got 0",
       [](auto& l) { FirstOp(l).mutable_norm(); }},
      {"block[0].op[0].activation.kind: expected 1..6, got 7",
       [](auto& l) {
         FirstOp(l).mutable_activation()->set_kind(static_cast<v1::ActivationKind>(7));
       }},
      {"block[0].op[0].binary.kind: expected 1..2, got 0",
       [](auto& l) { FirstOp(l).mutable_binary(); }},
      {"block[0].op[0].dropout.p: expected 0 ≤ p < 1 that does not round to 1 in steps of 1/256, "
       "got nan",
       [](auto& l) {
         FirstOp(l).mutable_dropout()->set_p(std::numeric_limits<float>::quiet_NaN());
       }},
  });
}

TEST(ModuleCodec, TakesLayoutsOf256KiBAndNoMore) {
  v1::ModuleLayout wire = SmallLayout();
  std::string& prefix = *wire.mutable_layer(0)->mutable_prefix();
  prefix.assign(kMaxLayoutBytes - 100, 'a');
  prefix.append(kMaxLayoutBytes - wire.ByteSizeLong(), 'a');
  EXPECT_TRUE(DecodeModuleLayout(wire).ok());
  prefix.push_back('a');
  EXPECT_EQ(DecodeModuleLayout(wire).status().message(),
            "layout: expected at most 262144 bytes, got 262145");
}

TEST(ModuleCodec, RefusesOptionsThatAreTheCalls) {
  const std::string at = "block[0].op[1].attention.options.";
  const std::string rest = ": expected none in a layout, got some";
  ExpectRefused({
      {at + "batch" + rest, [](auto& l) { Options(l).set_batch(1); }},
      {at + "kv_len" + rest, [](auto& l) { Options(l).set_kv_len(1); }},
      {at + "element" + rest, [](auto& l) { Options(l).set_element(v1::ELEMENT_FLOAT16); }},
      {at + "layout" + rest, [](auto& l) { Options(l).set_layout(v1::LAYOUT_BHLD); }},
      {at + "lengths" + rest, [](auto& l) { Options(l).mutable_lengths(); }},
      {at + "bias" + rest, [](auto& l) { Options(l).mutable_bias(); }},
      {at + "bool_mask" + rest, [](auto& l) { Options(l).mutable_bool_mask(); }},
      {at + "shard" + rest, [](auto& l) { Options(l).mutable_shard(); }},
      {at + "allow_nondeterministic" + rest,
       [](auto& l) { Options(l).set_allow_nondeterministic(true); }},
      {at + "dropout.seed" + rest, [](auto& l) { Options(l).mutable_dropout()->set_seed(1); }},
      {at + "mask.id" + rest, [](auto& l) { Options(l).mutable_mask()->set_id("x"); }},
      {at + "mask.origin" + rest, [](auto& l) { Options(l).mutable_mask()->mutable_origin(); }},
      {at + "alignment: expected one of top_left, bottom_right, offsets, got none",
       [](auto& l) { Options(l).mutable_alignment(); }},
      {at + "alignment: expected true when present, got false",
       [](auto& l) { Options(l).mutable_alignment()->set_bottom_right(false); }},
      {at + "denominator: expected one of softmax, zero_rest, sink, got none",
       [](auto& l) { Options(l).mutable_denominator(); }},
      {at + "alibi.slope: expected q.heads entries, got 0",
       [](auto& l) { Options(l).mutable_alibi(); }},
  });
}

TEST(ModuleCodec, OptimizersComeBackAndNothingIsRefused) {
  const OptimizerSpec specs[] = {{},
                                 {.kind = OptimizerKind::kSgd, .momentum = 0.9, .nesterov = true},
                                 {.kind = OptimizerKind::kSgd, .momentum = 0.9, .dampening = 0.1},
                                 {.kind = OptimizerKind::kAdamW,
                                  .beta1 = 0.9,
                                  .beta2 = 0.999,
                                  .epsilon = 1e-8,
                                  .coupled_decay = true,
                                  .amsgrad = true,
                                  .groups = {0, 3, 1}}};
  for (const OptimizerSpec& spec : specs) {
    auto back = DecodeOptimizer(EncodeOptimizer(spec));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(back->kind, spec.kind);
    EXPECT_EQ(back->momentum, spec.momentum);
    EXPECT_EQ(back->dampening, spec.dampening);
    EXPECT_EQ(back->nesterov, spec.nesterov);
    EXPECT_EQ(back->beta1, spec.beta1);
    EXPECT_EQ(back->beta2, spec.beta2);
    EXPECT_EQ(back->epsilon, spec.epsilon);
    EXPECT_EQ(back->coupled_decay, spec.coupled_decay);
    EXPECT_EQ(back->amsgrad, spec.amsgrad);
    EXPECT_EQ(back->groups, spec.groups);
  }
  EXPECT_EQ(DecodeOptimizer({}).status().message(),
            "optimizer: expected one of sgd, adamw, none, got nothing");
}

TEST(ModuleCodec, LimitsAreCountsAndAMode) {
  v1::ModuleLimits wire;
  wire.set_max_rows(uint64_t{1} << 32);
  wire.set_kept_rows(7);
  auto limits = DecodeModuleLimits(wire);
  ASSERT_TRUE(limits.ok()) << limits.status();
  EXPECT_EQ(limits->max_rows, int64_t{1} << 32);
  EXPECT_EQ(limits->kept_rows, 7);
  EXPECT_FALSE(limits->recompute.has_value());
  wire.set_recompute(v1::RECOMPUTE_LAYERS);
  EXPECT_EQ(DecodeModuleLimits(wire)->recompute, Recompute::kLayers);
  wire.set_recompute(static_cast<v1::Recompute>(4));
  EXPECT_EQ(DecodeModuleLimits(wire).status().message(), "limits.recompute: expected 0..3, got 4");
  wire.set_kept_rows(~uint64_t{0});
  EXPECT_EQ(DecodeModuleLimits(wire).status().message(),
            "limits.kept_rows: expected at most 4294967296, got 18446744073709551615");
}

}  // namespace
}  // namespace attnd
