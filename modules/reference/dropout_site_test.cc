// Where a module's dropout stands in the generator's space: site 1 + 256 · layer + op.
#include <gtest/gtest.h>

#include <cmath>

#include "attention/reference.h"
#include "modules/attention_problem.h"
#include "modules/reference/pointwise.h"
#include "tests/layers/reference_fixture.h"

namespace attnd {
namespace {

constexpr uint32_t kThreshold = 77;

ModuleLayout DropoutLayout() {
  ModuleLayout layout{.width = 8};
  layout.blocks = {{.ops = {{ActivationOp{0, ActivationKind::kTanh}}, {DropoutOp{2, kThreshold}}}}};
  layout.layers = {{}, {}};
  return layout;
}

TEST(DropoutSite, IsTheLayerAndTheOp) {
  ReferenceFixture fixture(DropoutLayout(), 1, Rounding::kExact);
  fixture.SetRows({.batch = 2, .length = 9, .first_row = 27, .first_sequence = 3});
  fixture.inputs.dropout = {.is_training = true, .seed = 99, .offset = 0xfffffff0};
  Numbers expected = fixture.inputs.x;
  for (uint64_t layer = 0; layer < 2; ++layer) {
    for (double& value : expected) value = std::tanh(value);
    const uint64_t site = 1 + 256 * layer + 1;
    expected = ApplyDropout({.seed = 99, .offset = site << 32 | 0xfffffff0, .first_row = 27},
                            kThreshold, 8, expected);
  }
  EXPECT_EQ(fixture.Forward(), expected);
}

TEST(DropoutSite, NothingIsDroppedOutsideTraining) {
  ReferenceFixture fixture(DropoutLayout(), 1, Rounding::kExact);
  fixture.inputs.dropout.is_training = false;
  Numbers expected = fixture.inputs.x;
  for (double& value : expected) value = std::tanh(std::tanh(value));
  EXPECT_EQ(fixture.Forward(), expected);
}

TEST(DropoutSite, OfAttentionIsTheGeneratorsOffset) {
  AttentionOp op{.q = {2, 0, 2, 4}, .k = {2, 0, 2, 4}, .v = {2, 0, 2, 4}};
  op.options.dropout.threshold = kThreshold;
  ModuleLayout layout{.width = 8};
  layout.blocks = {{.ops = {{ActivationOp{0, ActivationKind::kTanh}}, {op}}}};
  layout.layers = {{}};
  ReferenceFixture fixture(layout, 1, Rounding::kExact);
  fixture.SetRows({.batch = 2, .length = 5, .first_row = 15, .first_sequence = 3});
  fixture.inputs.dropout = {.is_training = true, .seed = 99, .offset = 7};
  Numbers heads = fixture.inputs.x;
  for (double& value : heads) value = std::tanh(value);
  const Problem problem{.batch = 2,
                        .q_heads = 2,
                        .kv_heads = 2,
                        .q_len = 5,
                        .kv_len = 5,
                        .qk_head_dim = 4,
                        .v_head_dim = 4,
                        .layout = Layout::kBlhd,
                        .dropout = {kThreshold, 99, (uint64_t{2} << 32) + 7},
                        .shard = {.batch_offset = 3}};
  EXPECT_EQ(fixture.Forward(), Reference(problem, {}, heads, heads, heads).Forward().o);
}

TEST(DropoutSite, NoTwoOpsOfAModuleShareOne) {
  EXPECT_EQ(DropoutSite(0, 0), 1u);
  EXPECT_LT(DropoutSite(6, kMaxBlockOps - 1), DropoutSite(7, 0));
  EXPECT_EQ(SiteOffset(DropoutSite(kMaxModuleLayers - 1, kMaxBlockOps - 1), 0xffffffffu),
            (uint64_t{1 + 256 * 511 + 63} << 32) + 0xffffffffu);
}

}  // namespace
}  // namespace attnd
