// Layouts of well-known layers, as clients write them: for tests and benchmarks.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "modules/layout.h"

namespace attnd {

struct LayerSizes {
  int64_t width = 64, heads = 4, kv_heads = 4, inner = 256;
  int64_t layers = 1;
  uint32_t dropout = 0;  // p · 256
  ElementType element = ElementType::kFloat32;
};

ModuleLayout BertLayers(const LayerSizes& sizes);   // post-norm, gelu, biases
ModuleLayout GptLayers(const LayerSizes& sizes);    // pre-norm, packed QKV, transposed weights
ModuleLayout LlamaLayers(const LayerSizes& sizes);  // RMS, rotary, grouped heads, gated; QK-norm
// A decoder layer: attention over itself, then over a memory of the same width.
ModuleLayout DecoderLayers(const LayerSizes& sizes);
// Models whose layers are such, and a usual length of their sequences.
struct KnownModel {
  const char* name;
  ModuleLayout (*layers)(const LayerSizes& sizes);
  LayerSizes sizes;
  int64_t length;
};
absl::Span<const KnownModel> KnownModels();
const KnownModel* KnownModelNamed(absl::string_view name);  // null: not known

// One product of 8 columns without a bias: "layer.weight".
ModuleLayout OneLinear();

}  // namespace attnd
