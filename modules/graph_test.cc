#include "modules/graph.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "modules/check_rows.h"
#include "modules/op_uses.h"
#include "tests/layers/random_module.h"

namespace attnd {
namespace {

// norm → packed qkv → attention (rotary, QK-norm) → linear → dropout → add → MLP → add.
ModuleLayout PreNormLayout() {
  ModuleLayout layout{.width = 16, .memory_width = 4};
  ModuleBlock block;
  block.parameters = {{"norm", {16}},     {"qkv", {48, 16}}, {"q_norm", {8}},    {"k_norm", {8}},
                      {"proj", {16, 16}}, {"up", {16, 32}},  {"down", {16, 32}}, {"bias", {16}}};
  AttentionOp attention{.q = {3, 0, 2, 8}, .k = {3, 16, 2, 8}, .v = {3, 32, 2, 8}};
  attention.rotary = Rotary{.inverse_frequency = {1, 0.1f, 0.01f, 0.001f}};
  attention.q_norm = 2;
  attention.k_norm = 3;
  attention.qk_norm_epsilon = 1e-6f;
  block.ops = {{NormOp{.input = 0, .kind = NormKind::kRms, .epsilon = 1e-5f, .weight = 0}},
               {LinearOp{.input = 2, .weight = 1}},
               {attention},
               {LinearOp{.input = 4, .weight = 4}},
               {DropoutOp{.input = 5, .threshold = 26}},
               {BinaryOp{.kind = BinaryKind::kAdd, .a = 0, .b = 6}},
               {LinearOp{.input = 7, .weight = 5, .transposed = true}},
               {ActivationOp{.input = 8, .kind = ActivationKind::kSilu}},
               {LinearOp{.input = 9, .weight = 6, .bias = 7}},
               {BinaryOp{.kind = BinaryKind::kAdd, .a = 7, .b = 10}}};
  layout.blocks = {block};
  layout.layers = {{.block = 0, .prefix = "h.0."}, {.block = 0, .prefix = "h.1.", .frozen = {0}}};
  return layout;
}

template <class Op>
Op& At(ModuleLayout& layout, int op) {
  return std::get<Op>(layout.blocks[0].ops[op].kind);
}
AttentionOp& Attention(ModuleLayout& layout) { return At<AttentionOp>(layout, 2); }
void SetShape(ModuleLayout& layout, int parameter, std::vector<int64_t> shape) {
  layout.blocks[0].parameters[parameter].shape = std::move(shape);
}

TEST(ModuleGraph, FindsTheShapeOfEveryValue) {
  auto graph = ModuleGraph::Make(PreNormLayout());
  ASSERT_TRUE(graph.ok()) << graph.status();
  std::vector<int64_t> columns;
  for (const ValueShape& shape : graph->shapes(0).values) columns.push_back(shape.columns);
  EXPECT_EQ(columns, (std::vector<int64_t>{16, 4, 16, 48, 16, 16, 16, 16, 32, 32, 16, 16}));
  EXPECT_EQ(graph->shapes(0).attention_ops, std::vector<int64_t>{2});
  EXPECT_EQ(graph->LastUses(0), (std::vector<int64_t>{5, -1, 1, 2, 3, 4, 5, 9, 7, 8, 9, 10}));
}

TEST(ModuleGraph, WideOutputsReachTheNextLayerAndNotX) {
  ModuleLayout layout = PreNormLayout();
  layout.element = ElementType::kFloat16;
  layout.blocks[0].ops.back().wide = true;
  auto graph = ModuleGraph::Make(layout);
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(graph->ElementOf(0, kInputValue), ElementType::kFloat16);
  EXPECT_EQ(graph->ElementOf(1, kInputValue), ElementType::kFloat32);
  EXPECT_EQ(graph->ElementOf(1, kFirstOpValue), ElementType::kFloat16);
  EXPECT_EQ(graph->ElementOf(1, kFirstOpValue + 9), ElementType::kFloat32);
}

struct BadLayout {
  std::string message;
  std::function<void(ModuleLayout&)> spoil;
};

void ExpectRefused(const std::vector<BadLayout>& cases) {
  for (const BadLayout& bad : cases) {
    ModuleLayout layout = PreNormLayout();
    bad.spoil(layout);
    auto graph = ModuleGraph::Make(layout);
    ASSERT_FALSE(graph.ok()) << bad.message;
    EXPECT_EQ(graph.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(graph.status().message(), bad.message);
  }
}

TEST(ModuleGraph, SlicesKnowTheirPlaceAndTheElementsAtTheirEnds) {
  ModuleLayout layout = PreNormLayout();
  layout.element = ElementType::kFloat16;
  layout.blocks.push_back(layout.blocks[0]);
  layout.blocks[1].ops.back().wide = true;
  layout.layers = {{.block = 0}, {.block = 1}, {.block = 0}, {.block = 1}};
  for (int n = 0; n < 4; ++n) layout.layers[n].prefix = absl::StrCat(n, ".");
  auto graph = ModuleGraph::Make(layout);
  ASSERT_TRUE(graph.ok()) << graph.status();
  const ModuleGraph middle = graph->Slice(1, 3), last = graph->Slice(2, 4);
  const ModuleGraph second = middle.Slice(1, 2), first = middle.Slice(0, 1);
  struct Case {
    const ModuleGraph& graph;
    int64_t first_layer;
    ElementType x, y;
  };
  constexpr ElementType kNarrow = ElementType::kFloat16, kWide = ElementType::kFloat32;
  for (const Case& each : {Case{*graph, 0, kNarrow, kNarrow}, Case{middle, 1, kNarrow, kNarrow},
                           Case{last, 2, kWide, kNarrow}, Case{second, 2, kWide, kNarrow},
                           Case{first, 1, kNarrow, kWide}}) {
    EXPECT_EQ(each.graph.first_layer(), each.first_layer);
    EXPECT_EQ(each.graph.layout().layers[0].prefix, absl::StrCat(each.first_layer, "."));
    EXPECT_EQ(each.graph.x_element(), each.x) << each.first_layer;
    EXPECT_EQ(each.graph.y_element(), each.y) << each.first_layer;
  }
}

TEST(ModuleGraph, RefusesFramesByTheirPath) {
  ExpectRefused({
      {"width: expected 8..65536, got 0", [](auto& l) { l.width = 0; }},
      {"width: expected 8..65536, got 65544", [](auto& l) { l.width = 65544; }},
      {"width: expected a multiple of 8, got 20", [](auto& l) { l.width = 20; }},
      {"memory_width: expected 0..65536, got 65537", [](auto& l) { l.memory_width = 65537; }},
      {"wide_element: expected float32 or float16, got bfloat16",
       [](auto& l) {
         l.element = ElementType::kFloat16;
         l.wide_element = ElementType::kBFloat16;
       }},
      {"block: expected 1..8, got 0", [](auto& l) { l.blocks.clear(); }},
      {"block: expected 1..8, got 9", [](auto& l) { l.blocks.resize(9, l.blocks[0]); }},
      {"layer: expected 1..512, got 513", [](auto& l) { l.layers.resize(513, l.layers[0]); }},
      {"block[0].op: expected 1..64, got 65",
       [](auto& l) { l.blocks[0].ops.resize(65, l.blocks[0].ops[7]); }},
      {"block[0].parameter: expected 0..64, got 65",
       [](auto& l) { l.blocks[0].parameters.resize(65, l.blocks[0].parameters[0]); }},
      {"block[0].parameter[1].name: expected 1..128 bytes, got 0",
       [](auto& l) { l.blocks[0].parameters[1].name = ""; }},
      {"block[0].parameter[1].name: expected bytes of [A-Za-z0-9_.-], got byte 47",
       [](auto& l) { l.blocks[0].parameters[1].name = "a/b"; }},
      {"block[0].parameter[1].shape: expected 1 or 2 dimensions, got 3",
       [](auto& l) {
         SetShape(l, 1, {1, 2, 3});
       }},
      {"block[0].parameter[1].shape[1]: expected 1..1048576, got 1048577",
       [](auto& l) {
         SetShape(l, 1, {48, 1048577});
       }},
      {"layer[1].block: expected 0..0, got 1", [](auto& l) { l.layers[1].block = 1; }},
      {"layer[1].prefix: expected 0..128 bytes, got 129",
       [](auto& l) { l.layers[1].prefix = std::string(129, 'a'); }},
      {"layer[1].prefix: expected names of parameters that differ from all others, got "
       "\"h.0.norm\" again",
       [](auto& l) { l.layers[1].prefix = "h.0."; }},
      {"layer[1].frozen[0]: expected 0..7, got 8", [](auto& l) { l.layers[1].frozen = {8}; }},
      {"layer[1].frozen[1]: expected above 2, got 2",
       [](auto& l) {
         l.layers[1].frozen = {2, 2};
       }},
      {"layer[1].attention_scale: expected none, or one for each of 1 attention ops, got 2",
       [](auto& l) {
         l.layers[1].attention_scale = {1, 2};
       }},
  });
}

TEST(ModuleGraph, RefusesOpsByTheirPath) {
  ExpectRefused({
      {"block[0].op[0].norm.input: expected 0..1, got 2",
       [](auto& l) { At<NormOp>(l, 0).input = 2; }},
      {"block[0].op[0].norm.input: expected another value than 1, since memory_width is 0, got 1",
       [](auto& l) {
         l.memory_width = 0;
         At<NormOp>(l, 0).input = 1;
       }},
      {"block[0].op[1]: expected one of linear, norm, attention, activation, binary, dropout, got "
       "none",
       [](auto& l) { l.blocks[0].ops[1].kind = std::monostate(); }},
      {"block[0].op[0].norm.epsilon: expected a finite number above 0, got 0",
       [](auto& l) { At<NormOp>(l, 0).epsilon = 0; }},
      {"block[0].op[0].norm.bias: expected none of an RMS norm, got one",
       [](auto& l) { At<NormOp>(l, 0).bias = 7; }},
      {"block[0].op[0].norm.weight: expected [16], got [8]", [](auto& l) { SetShape(l, 0, {8}); }},
      {"block[0].op[1].linear.weight: expected 0..7, got 8",
       [](auto& l) { At<LinearOp>(l, 1).weight = 8; }},
      {"block[0].op[1].linear.weight: expected [out, 16], got [48, 15]",
       [](auto& l) {
         SetShape(l, 1, {48, 15});
       }},
      {"block[0].op[6].linear.weight: expected [16, out], got [32, 16]",
       [](auto& l) {
         SetShape(l, 5, {32, 16});
       }},
      {"block[0].op[8].linear.bias: expected [16], got [17]",
       [](auto& l) { SetShape(l, 7, {17}); }},
      {"block[0].op[8].linear.weight: expected a parameter that no other op or field uses, got 5",
       [](auto& l) { At<LinearOp>(l, 8).weight = 5; }},
      {"block[0].op[4].dropout.p · 256: expected 0..255, got 256",
       [](auto& l) { At<DropoutOp>(l, 4).threshold = 256; }},
      {"block[0].op[5].binary.b: expected the rows of a, got others",
       [](auto& l) { At<BinaryOp>(l, 5).b = 1; }},
      {"block[0].op[5].binary.b: expected 16 columns as a, got 48",
       [](auto& l) { At<BinaryOp>(l, 5).b = 3; }},
      {"block[0].op[9]: expected width = 16 columns, got 32",
       [](auto& l) {
         At<BinaryOp>(l, 9) = {BinaryKind::kAdd, 8, 9};
       }},
      {"block[0].op[8]: expected a value that a later op uses, got value 10 unused",
       [](auto& l) { At<BinaryOp>(l, 9).b = 7; }},
      {"block[0].parameter[8]: expected a parameter that an op uses, got none",
       [](auto& l) {
         l.blocks[0].parameters.push_back({"more", {1}});
       }},
  });
}

TEST(ModuleGraph, RefusesAttentionByItsPath) {
  const std::string at = "block[0].op[2].attention";
  ExpectRefused({
      {at + ".q.heads: expected 1..1024, got 0", [](auto& l) { Attention(l).q.heads = 0; }},
      {at + ".q.dim: expected 1..256, got 257", [](auto& l) { Attention(l).q.dim = 257; }},
      {at + ".q: expected heads · dim of at most 48 columns, got 56",
       [](auto& l) { Attention(l).q.heads = 7; }},
      {at + ".v.first_column: expected 0..32, got 33",
       [](auto& l) { Attention(l).v.first_column = 33; }},
      {at + ".k.heads: expected a divisor of q.heads = 2, got 3",
       [](auto& l) {
         Attention(l).k = {3, 0, 3, 8};
       }},
      {at + ".v.heads: expected 2, got 1", [](auto& l) { Attention(l).v.heads = 1; }},
      {at + ".k.dim: expected 8, got 7", [](auto& l) { Attention(l).k.dim = 7; }},
      {at + ".q.value: expected a value with x's rows, got the memory's",
       [](auto& l) {
         Attention(l).q = Attention(l).k = Attention(l).v = {1, 0, 2, 2};
       }},
      {at + ".v.value: expected the rows of k, got others",
       [](auto& l) {
         Attention(l).v = {1, 0, 2, 2};
       }},
      {at + ".q_norm: expected [8], got [9]", [](auto& l) { SetShape(l, 2, {9}); }},
      {at + ".qk_norm_epsilon: expected a finite number above 0, got -1",
       [](auto& l) { Attention(l).qk_norm_epsilon = -1; }},
      {at + ".rotary.inverse_frequency: expected at most q.dim / 2 = 4 entries, got 5",
       [](auto& l) { Attention(l).rotary->inverse_frequency.resize(5); }},
      {at + ".rotary.inverse_frequency: expected 1..128, got 0",
       [](auto& l) { Attention(l).rotary->inverse_frequency.clear(); }},
      {at + ".options.softcap: expected 0 or above, got -1",
       [](auto& l) { Attention(l).options.softcap = -1; }},
      {at + ".options.alibi.slope: expected q_heads = 2 or batch·q_heads = 2 entries, got 3",
       [](auto& l) {
         Attention(l).options.alibi_slopes = {1, 2, 3};
       }},
      {at + ".options.mask.pattern[0].expr.window.left: expected -1 or above, got -7",
       [](auto& l) {
         Attention(l).mask =
             MaskSpec{.pattern = {MaskExpr{.op = RelativeWindow{-7, 0}}}, .pattern_of = {0}};
       }},
      {at + ".options.mask.extents: expected both rows and keys, or neither, got one",
       [](auto& l) {
         Attention(l).mask = MaskSpec{
             .pattern = {MaskExpr{.op = AllKeys()}}, .pattern_of = {0}, .extents = {.rows = 4}};
       }},
  });
}

TEST(ModuleGraph, TakesLimitsAndRefusesOneAbove) {
  ModuleLayout layout{.width = 8};
  ModuleBlock block;
  for (int n = 0; n < kMaxBlockOps; ++n) {
    const int64_t input = n == 0 ? kInputValue : n + 1;
    block.ops.push_back({ActivationOp{.input = input, .kind = ActivationKind::kTanh}});
  }
  layout.blocks.assign(kMaxModuleBlocks, block);
  for (int n = 0; n < kMaxModuleLayers; ++n) layout.layers.push_back({.block = n % 8});
  EXPECT_TRUE(ModuleGraph::Make(layout).ok());
}

TEST(ModuleGraph, ManyNumbersTakeNoMemoryAndAreCounted) {
  // 2^20 × 2^19 numbers each: two such matrices reach the limit of 2^40, one number more does not.
  ModuleLayout layout{.width = 8};
  layout.blocks = {
      {.parameters = {{"up", {1 << 20, 8}}, {"a", {1 << 19, 1 << 20}}, {"down", {8, 1 << 19}}},
       .ops = {{LinearOp{.input = 0, .weight = 0}},
               {LinearOp{.input = 2, .weight = 1}},
               {LinearOp{.input = 3, .weight = 2}}}}};
  layout.layers = {{.prefix = "0."}};
  EXPECT_TRUE(ModuleGraph::Make(layout).ok());
  layout.layers.push_back({.prefix = "1."});
  EXPECT_EQ(ModuleGraph::Make(layout).status().message(),
            "layer: expected at most 1099511627776 numbers in parameters, got 1099536793600");
}

TEST(ModuleGraph, TakesRandomLayoutsWithEveryOp) {
  std::vector<int> seen(7);
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    Random random(seed);
    const ModuleLayout layout = RandomLayout(random);
    auto graph = ModuleGraph::Make(layout);
    ASSERT_TRUE(graph.ok()) << "seed " << seed << ": " << graph.status();
    for (const ModuleBlock& block : layout.blocks) {
      for (const ModuleOp& op : block.ops) ++seen[op.kind.index()];
    }
    const absl::Status status = CheckRows(*graph, RandomRows(random, *graph));
    ASSERT_TRUE(status.ok()) << "seed " << seed << ": " << status;
  }
  for (int kind = 1; kind < 7; ++kind) EXPECT_GT(seen[kind], 300) << kind;
}

// One number of a valid layout becomes another: refused with a path, or taken.
TEST(ModuleGraph, ChangedLayoutsAreRefusedOrTaken) {
  int refused = 0;
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    Random random(seed);
    ModuleLayout layout = RandomLayout(random);
    ModuleBlock& block = layout.blocks[0];
    static constexpr int64_t kOdd[] = {-1, 0, 1, 7, 300, int64_t{1} << 32, INT64_MAX, INT64_MIN};
    const int64_t odd = kOdd[random.Between(0, 7)];
    ModuleOp& op = block.ops[random.Between(0, static_cast<int64_t>(block.ops.size()) - 1)];
    if (auto* linear = std::get_if<LinearOp>(&op.kind)) {
      (random.Chance(0.5) ? linear->input : linear->weight) = odd;
    } else if (auto* attention = std::get_if<AttentionOp>(&op.kind)) {
      HeadColumns* heads[] = {&attention->q, &attention->k, &attention->v};
      HeadColumns& of = *heads[random.Between(0, 2)];
      int64_t* fields[] = {&of.value, &of.first_column, &of.heads, &of.dim};
      *fields[random.Between(0, 3)] = odd;
    } else if (!block.parameters.empty()) {
      block.parameters[0].shape[0] = odd;
    }
    const absl::Status status = ModuleGraph::Make(layout).status();
    if (status.ok()) continue;
    ++refused;
    EXPECT_NE(status.message().find(": expected "), std::string::npos) << status;
  }
  EXPECT_GT(refused, 1500);
}

}  // namespace
}  // namespace attnd
