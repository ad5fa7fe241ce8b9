#include "tests/layers/random_module.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/masks/random_mask.h"
#include "base/check.h"
#include "modules/check_rows.h"

namespace attnd {
namespace {

template <class T, size_t kCount>
T OneOf(Random& random, const T (&choices)[kCount]) {
  return choices[random.Between(0, kCount - 1)];
}

float RandomNumber(Random& random) { return static_cast<float>(random.Between(-16, 16)) / 16; }

MaskSpec RandomLayoutMask(Random& random, int64_t heads) {
  const MaskCall call{.batch = 1, .q_heads = heads, .rows = kRandomRows, .keys = kRandomRows};
  MaskSpec mask =
      RandomMaskFor([&](int64_t low, int64_t high) { return random.Between(low, high); }, call);
  mask.origin = {};
  mask.empty_row = EmptyRow::kZero;
  if (mask.extents.rows == 0) mask.extents.rows = kRandomRows;
  if (mask.extents.keys == 0) mask.extents.keys = kRandomRows;
  return mask;
}

// Grows one block op by op, then joins what is left over.
class BlockMaker {
 public:
  BlockMaker(Random& random, const ModuleLayout& layout) : random_(random), layout_(layout) {
    values_ = {{RowKind::kInput, layout.width}, {RowKind::kMemory, layout.memory_width}};
    is_used_ = {false, true};
  }

  ModuleBlock Make() {
    const int64_t ops = random_.Between(1, 7);
    for (int64_t n = 0; n < ops; ++n) AddAny();
    if (layout_.memory_width > 0 && random_.Chance(0.8)) AddCrossAttention();
    JoinUnused();
    return std::move(block_);
  }

 private:
  int64_t Parameter(std::vector<int64_t> shape) {
    const int64_t number = static_cast<int64_t>(block_.parameters.size());
    block_.parameters.push_back({absl::StrCat("p", number), std::move(shape)});
    return number;
  }
  std::optional<int64_t> MaybeVector(int64_t elements) {
    if (random_.Chance(0.3)) return std::nullopt;
    return Parameter({elements});
  }
  int64_t Add(ModuleOp op, ValueShape shape) {
    op.wide = random_.Chance(0.2);
    shape.wide = op.wide;
    block_.ops.push_back(std::move(op));
    values_.push_back(shape);
    is_used_.push_back(false);
    return static_cast<int64_t>(values_.size()) - 1;
  }
  // Picks a value of x's rows; rather one that nothing has read yet.
  int64_t AnyValue() {
    const int64_t last = static_cast<int64_t>(values_.size()) - 1;
    for (int tries = 0; tries < 20; ++tries) {
      const int64_t value = random_.Between(0, last);
      if (value == kMemoryValue || values_[value].rows == RowKind::kMemory) continue;
      if (tries < 10 && is_used_[value]) continue;
      return value;
    }
    return kInputValue;
  }
  int64_t Use(int64_t value) {
    is_used_[value] = true;
    return value;
  }

  int64_t AddLinear(int64_t input, int64_t out) {
    LinearOp op{.input = Use(input), .transposed = random_.Chance(0.3)};
    const int64_t in = values_[input].columns;
    op.weight = Parameter(op.transposed ? std::vector{in, out} : std::vector{out, in});
    op.bias = MaybeVector(out);
    return Add({op}, {values_[input].rows, out});
  }
  int64_t AddNorm(int64_t input) {
    NormOp op{.input = Use(input), .epsilon = 1e-2f};
    const int64_t columns = values_[input].columns;
    op.kind = random_.Chance(0.5) ? NormKind::kLayer : NormKind::kRms;
    op.weight = MaybeVector(columns);
    if (op.kind == NormKind::kLayer) op.bias = MaybeVector(columns);
    if (op.weight.has_value()) op.weight_offset = random_.Chance(0.3) ? 1 : 0;
    op.round_before_weight =
        op.kind == NormKind::kRms && op.weight.has_value() && random_.Chance(0.5);
    return Add({op}, values_[input]);
  }
  int64_t AddActivation(int64_t input) {
    const ActivationOp op{Use(input), static_cast<ActivationKind>(random_.Between(1, 6))};
    return Add({op}, values_[input]);
  }
  int64_t AddDropout(int64_t input) {
    static constexpr uint32_t kThresholds[] = {0, 1, 26, 128};
    return Add({DropoutOp{Use(input), OneOf(random_, kThresholds)}}, values_[input]);
  }
  int64_t AddBinary(int64_t a, int64_t b) {
    BinaryOp op{random_.Chance(0.5) ? BinaryKind::kAdd : BinaryKind::kMultiply, Use(a), Use(b)};
    if (random_.Chance(0.3)) op.b_scale = 0.5f;
    return Add({op}, values_[a]);
  }
  void AddBinaryOf(int64_t a) {
    int64_t b = AnyValue();
    if (values_[b].columns != values_[a].columns) b = AddLinear(b, values_[a].columns);
    AddBinary(a, b);
  }

  // q, k and v as columns of one value or of several.
  int64_t AddAttention(int64_t query, int64_t key) {
    const int64_t kv_heads = random_.Between(1, 2), q_heads = kv_heads * random_.Between(1, 2);
    const int64_t dim = random_.Between(1, 4), v_dim = random_.Between(1, 4);
    AttentionOp op;
    op.q = {0, 0, q_heads, dim};
    op.k = {0, 0, kv_heads, dim};
    op.v = {0, 0, kv_heads, v_dim};
    if (query == key && random_.Chance(0.5)) {
      const int64_t gap = random_.Between(0, 1);  // a column that no head names
      op.k.first_column = op.q.columns() + gap;
      op.v.first_column = op.k.first_column + op.k.columns();
      const int64_t packed = AddLinear(query, op.v.first_column + op.v.columns());
      op.q.value = op.k.value = op.v.value = Use(packed);
    } else {
      op.q.value = Use(AddLinear(query, op.q.columns()));
      op.k.value = Use(AddLinear(key, op.k.columns()));
      op.v.value = Use(AddLinear(key, op.v.columns()));
    }
    DrawHeads(query == key, op);
    DrawOptions(op);
    return Add({op}, {RowKind::kInput, q_heads * v_dim});
  }
  void AddCrossAttention() { AddAttention(AnyValue(), kMemoryValue); }

  void DrawHeads(bool is_self, AttentionOp& op) {
    if (is_self && op.q.dim >= 2 && random_.Chance(0.4)) {
      Rotary rotary{.interleaved = random_.Chance(0.5)};
      const int64_t count = random_.Between(1, op.q.dim / 2);
      for (int64_t n = 0; n < count; ++n) {
        rotary.inverse_frequency.push_back(1.0f / static_cast<float>(n + 1));
      }
      if (random_.Chance(0.3)) rotary.attention_factor = 1.25f;
      op.rotary = rotary;
    }
    if (random_.Chance(0.3)) op.q_norm = Parameter({op.q.dim});
    if (random_.Chance(0.3)) op.k_norm = Parameter({op.k.dim});
    if (!op.q_norm.has_value() && !op.k_norm.has_value()) return;
    op.qk_norm_epsilon = 1e-2f;
    op.qk_norm_weight_offset = random_.Chance(0.3) ? 1 : 0;
    op.qk_norm_round_before_weight = random_.Chance(0.5);
  }
  void DrawOptions(AttentionOp& op) {
    Problem& p = op.options;
    if (random_.Chance(0.3)) p.scale = 0.5f;
    if (random_.Chance(0.2)) p.softcap = 5;
    p.causal = random_.Chance(0.4);
    if (random_.Chance(0.2)) p.window_left = random_.Between(0, 3);
    if (random_.Chance(0.2)) p.window_right = random_.Between(0, 3);
    p.alignment = random_.Chance(0.5) ? Alignment::kBottomRight : Alignment::kTopLeft;
    if (random_.Chance(0.2)) {
      for (int64_t n = 0; n < op.q.heads; ++n) p.alibi_slopes.push_back(RandomNumber(random_));
    }
    if (random_.Chance(0.2)) {
      p.denominator = DenominatorKind::kZeroRest;
    } else if (random_.Chance(0.2)) {
      p.denominator = DenominatorKind::kSink;
      for (int64_t n = 0; n < op.q.heads; ++n) p.sink_logits.push_back(RandomNumber(random_));
    }
    if (random_.Chance(0.3)) p.dropout.threshold = 26;
    if (random_.Chance(0.3)) op.mask = RandomLayoutMask(random_, op.q.heads);
  }

  void AddAny() {
    const int64_t input = AnyValue();
    switch (random_.Between(0, 5)) {
      case 0:
        AddLinear(input, random_.Between(1, 12));
        return;
      case 1:
        AddNorm(input);
        return;
      case 2:
        AddAttention(input, input);
        return;
      case 3:
        AddActivation(input);
        return;
      case 4:
        AddBinaryOf(input);
        return;
      default:
        AddDropout(input);
    }
  }

  // All values that nothing reads become the block's output.
  void JoinUnused() {
    int64_t sum = -1;
    const int64_t count = static_cast<int64_t>(values_.size());
    for (int64_t value = 0; value < count; ++value) {
      if (is_used_[value]) continue;
      int64_t part = value;
      if (values_[part].columns != layout_.width) part = AddLinear(part, layout_.width);
      sum = sum < 0 ? part : AddBinary(sum, part);
    }
    if (sum != static_cast<int64_t>(values_.size()) - 1 || sum < kFirstOpValue) {
      AddNorm(sum);
    }
  }

  Random& random_;
  const ModuleLayout& layout_;
  ModuleBlock block_;
  std::vector<ValueShape> values_;
  std::vector<bool> is_used_;
};

ModuleLayer RandomLayer(Random& random, const ModuleLayout& layout, int64_t number) {
  ModuleLayer layer{.block = random.Between(0, static_cast<int64_t>(layout.blocks.size()) - 1),
                    .prefix = absl::StrCat("layer.", number, ".")};
  const ModuleBlock& block = layout.blocks[layer.block];
  for (size_t n = 0; n < block.parameters.size(); ++n) {
    if (random.Chance(0.1)) layer.frozen.push_back(n);
  }
  if (random.Chance(0.2)) {
    for (const ModuleOp& op : block.ops) {
      if (std::holds_alternative<AttentionOp>(op.kind)) layer.attention_scale.push_back(0.75f);
    }
  }
  return layer;
}

std::vector<int32_t> RandomLengths(Random& random, int64_t batch, int64_t most) {
  std::vector<int32_t> lengths;
  for (int64_t b = 0; b < batch; ++b) lengths.push_back(random.Between(0, most));
  return lengths;
}

std::vector<int32_t> RandomCu(Random& random, int64_t batch) {
  std::vector<int32_t> cu = {0};
  for (int64_t b = 0; b < batch; ++b) cu.push_back(cu.back() + random.Between(1, kRandomRows / 2));
  return cu;
}

CallRows DrawRows(Random& random, bool has_memory) {
  CallRows rows{.batch = random.Between(1, 3)};
  if (random.Chance(0.4)) {
    rows.cu_seqlens = RandomCu(random, rows.batch);
    if (has_memory) rows.memory_cu_seqlens = RandomCu(random, rows.batch);
  } else {
    rows.length = random.Between(1, kRandomRows / 2);
    if (random.Chance(0.3)) rows.kv_lengths = RandomLengths(random, rows.batch, rows.length);
    if (random.Chance(0.3)) rows.bool_mask = BoolMask{{rows.batch, 1, rows.length, rows.length}};
    if (has_memory) {
      rows.memory_length = random.Between(1, kRandomRows / 2);
      if (random.Chance(0.3)) {
        rows.memory_kv_lengths = RandomLengths(random, rows.batch, rows.memory_length);
      }
    }
  }
  if (!rows.is_packed() && random.Chance(0.3)) {
    rows.first_sequence = random.Between(0, 5);
    rows.first_row = rows.first_sequence * rows.length;
  }
  if (random.Chance(0.3)) {
    for (int64_t n = 0; n < rows.rows(); ++n) {
      rows.positions.push_back(static_cast<uint32_t>(random.Between(0, 1000)));
    }
  }
  return rows;
}

}  // namespace

ModuleLayout RandomLayout(Random& random, const RandomModuleLimits& limits) {
  ModuleLayout layout{.width = 8 * random.Between(1, 2), .element = limits.element};
  if (random.Chance(0.3)) layout.memory_width = random.Between(1, 12);
  if (random.Chance(0.5)) layout.wide_element = limits.element;
  const int64_t blocks = random.Between(1, 2);
  for (int64_t n = 0; n < blocks; ++n) layout.blocks.push_back(BlockMaker(random, layout).Make());
  const int64_t layers = random.Between(1, limits.max_layers);
  for (int64_t n = 0; n < layers; ++n) layout.layers.push_back(RandomLayer(random, layout, n));
  return layout;
}

CallRows RandomRows(Random& random, const ModuleGraph& graph) {
  const bool has_memory = graph.layout().memory_width > 0;
  for (int tries = 0; tries < 50; ++tries) {
    CallRows rows = DrawRows(random, has_memory);
    if (CheckRows(graph, rows).ok()) return rows;
  }
  CallRows rows{.batch = 1, .length = 2, .memory_length = has_memory ? 2 : 0};
  const absl::Status status = CheckRows(graph, rows);
  CHECK(status.ok()) << status.ToString();
  return rows;
}

}  // namespace attnd
