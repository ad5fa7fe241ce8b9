#include "modules/known_layers.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

// Adds ops one after the other; each returns the value that it makes.
class BlockOps {
 public:
  explicit BlockOps(const LayerSizes& sizes) : sizes_(sizes) {}

  int64_t Linear(int64_t input, int64_t in, int64_t out, bool transposed = false,
                 bool has_bias = true) {
    LinearOp op{.input = input, .transposed = transposed};
    op.weight = Parameter(transposed ? std::vector{in, out} : std::vector{out, in});
    if (has_bias) op.bias = Parameter({out});
    return Add({op});
  }
  int64_t LayerNorm(int64_t input) {
    NormOp op{.input = input, .kind = NormKind::kLayer, .epsilon = 1e-5f};
    op.weight = Parameter({sizes_.width});
    op.bias = Parameter({sizes_.width});
    return Add({op});
  }
  int64_t RmsNorm(int64_t input) {
    NormOp op{.input = input, .kind = NormKind::kRms, .epsilon = 1e-5f};
    op.weight = Parameter({sizes_.width});
    op.round_before_weight = true;
    return Add({op});
  }
  int64_t Dropout(int64_t input) {
    return sizes_.dropout == 0 ? input : Add({DropoutOp{input, sizes_.dropout}});
  }
  int64_t Activation(int64_t input, ActivationKind kind) {
    return Add({ActivationOp{input, kind}});
  }
  int64_t Sum(int64_t a, int64_t b) { return Add({BinaryOp{BinaryKind::kAdd, a, b}}); }
  int64_t Product(int64_t a, int64_t b) { return Add({BinaryOp{BinaryKind::kMultiply, a, b}}); }
  int64_t Attention(AttentionOp op) {
    op.options.dropout.threshold = sizes_.dropout;
    return Add({std::move(op)});
  }
  // Values q, k and v of their own.
  AttentionOp Heads(int64_t q, int64_t k, int64_t v) const {
    const int64_t dim = sizes_.width / sizes_.heads;
    AttentionOp op;
    op.q = {q, 0, sizes_.heads, dim};
    op.k = {k, 0, sizes_.kv_heads, dim};
    op.v = {v, 0, sizes_.kv_heads, dim};
    return op;
  }
  int64_t Parameter(std::vector<int64_t> shape) {
    const auto number = static_cast<int64_t>(block_.parameters.size());
    block_.parameters.push_back({absl::StrCat("p", number), std::move(shape)});
    return number;
  }

  ModuleLayout Layout() && {
    ModuleLayout layout{.width = sizes_.width, .element = sizes_.element};
    layout.blocks.push_back(std::move(block_));
    for (int64_t n = 0; n < sizes_.layers; ++n) {
      layout.layers.push_back({.prefix = absl::StrCat(n, ".")});
    }
    return layout;
  }

 private:
  int64_t Add(ModuleOp op) {
    block_.ops.push_back(std::move(op));
    return static_cast<int64_t>(block_.ops.size()) - 1 + kFirstOpValue;
  }

  const LayerSizes sizes_;
  ModuleBlock block_;
};

// attention(x) → linear → dropout, of values that project x and `keys`.
int64_t AttentionBranch(const LayerSizes& s, BlockOps& ops, int64_t x, int64_t keys) {
  const int64_t q = ops.Linear(x, s.width, s.width);
  const int64_t k = ops.Linear(keys, s.width, s.width), v = ops.Linear(keys, s.width, s.width);
  const int64_t o = ops.Attention(ops.Heads(q, k, v));
  return ops.Dropout(ops.Linear(o, s.width, s.width));
}

int64_t FeedForward(const LayerSizes& s, BlockOps& ops, int64_t x, ActivationKind kind,
                    bool transposed) {
  const int64_t inner = ops.Linear(x, s.width, s.inner, transposed);
  const int64_t active = ops.Activation(inner, kind);
  return ops.Dropout(ops.Linear(active, s.inner, s.width, transposed));
}

}  // namespace

ModuleLayout BertLayers(const LayerSizes& s) {
  BlockOps ops(s);
  const int64_t attended =
      ops.LayerNorm(ops.Sum(AttentionBranch(s, ops, kInputValue, kInputValue), kInputValue));
  ops.LayerNorm(ops.Sum(FeedForward(s, ops, attended, ActivationKind::kGelu, false), attended));
  return std::move(ops).Layout();
}

ModuleLayout GptLayers(const LayerSizes& s) {
  BlockOps ops(s);
  const int64_t packed = ops.Linear(ops.LayerNorm(kInputValue), s.width, 3 * s.width, true);
  AttentionOp op = ops.Heads(packed, packed, packed);
  op.k.first_column = s.width;
  op.v.first_column = 2 * s.width;
  op.options.causal = true;
  op.options.alignment = Alignment::kTopLeft;
  const int64_t projected = ops.Dropout(ops.Linear(ops.Attention(op), s.width, s.width, true));
  const int64_t residual = ops.Sum(projected, kInputValue);
  ops.Sum(FeedForward(s, ops, ops.LayerNorm(residual), ActivationKind::kGeluTanh, true), residual);
  return std::move(ops).Layout();
}

ModuleLayout LlamaLayers(const LayerSizes& s) {
  BlockOps ops(s);
  const int64_t dim = s.width / s.heads, kv = dim * s.kv_heads;
  const int64_t x = ops.RmsNorm(kInputValue);
  const int64_t q = ops.Linear(x, s.width, s.width, false, false);
  const int64_t k = ops.Linear(x, s.width, kv, false, false);
  const int64_t v = ops.Linear(x, s.width, kv, false, false);
  AttentionOp op = ops.Heads(q, k, v);
  op.options.causal = true;
  op.options.alignment = Alignment::kTopLeft;
  op.q_norm = ops.Parameter({dim});
  op.k_norm = ops.Parameter({dim});
  op.qk_norm_epsilon = 1e-6f;
  op.rotary = Rotary();
  for (int64_t n = 0; n < dim / 2; ++n) {
    op.rotary->inverse_frequency.push_back(
        static_cast<float>(std::pow(10000.0, -2.0 * static_cast<double>(n) / double(dim))));
  }
  const int64_t o = ops.Linear(ops.Attention(op), s.width, s.width, false, false);
  const int64_t residual = ops.Sum(o, kInputValue);
  const int64_t y = ops.RmsNorm(residual);
  const int64_t gate =
      ops.Activation(ops.Linear(y, s.width, s.inner, false, false), ActivationKind::kSilu);
  const int64_t up = ops.Linear(y, s.width, s.inner, false, false);
  const int64_t down = ops.Linear(ops.Product(gate, up), s.inner, s.width, false, false);
  ops.Sum(down, residual);
  return std::move(ops).Layout();
}

ModuleLayout DecoderLayers(const LayerSizes& s) {
  BlockOps ops(s);
  const int64_t own =
      ops.LayerNorm(ops.Sum(AttentionBranch(s, ops, kInputValue, kInputValue), kInputValue));
  const int64_t across = ops.LayerNorm(ops.Sum(AttentionBranch(s, ops, own, kMemoryValue), own));
  ops.LayerNorm(ops.Sum(FeedForward(s, ops, across, ActivationKind::kRelu, false), across));
  ModuleLayout layout = std::move(ops).Layout();
  layout.memory_width = s.width;
  return layout;
}

absl::Span<const KnownModel> KnownModels() {
  constexpr auto sizes = [](int64_t layers, int64_t width, int64_t heads, int64_t kv_heads,
                            int64_t inner) {
    return LayerSizes{
        .width = width, .heads = heads, .kv_heads = kv_heads, .inner = inner, .layers = layers};
  };
  static constexpr KnownModel kModels[] = {
      {"bert-base", &BertLayers, sizes(12, 768, 12, 12, 3072), 512},
      {"bert-large", &BertLayers, sizes(24, 1024, 16, 16, 4096), 512},
      {"gpt2", &GptLayers, sizes(12, 768, 12, 12, 3072), 1024},
      {"gpt2-medium", &GptLayers, sizes(24, 1024, 16, 16, 4096), 1024},
      {"llama-1b", &LlamaLayers, sizes(16, 2048, 32, 8, 8192), 4096}};
  return kModels;
}

const KnownModel* KnownModelNamed(absl::string_view name) {
  for (const KnownModel& model : KnownModels()) {
    if (name == model.name) return &model;
  }
  return nullptr;
}

ModuleLayout OneLinear() {
  ModuleLayout layout;
  layout.width = 8;
  ModuleBlock block;
  block.parameters.push_back({"weight", {8, 8}});
  block.ops.push_back({LinearOp{.input = kInputValue, .weight = 0}});
  layout.blocks.push_back(block);
  layout.layers.push_back({.block = 0, .prefix = "layer."});
  return layout;
}

}  // namespace attnd
