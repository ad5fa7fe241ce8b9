// CpuModule: one instance's tensors by name, over its memory; what runs a layer reads from. And the
// inputs of one call. One call at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stop_token>
#include <vector>

#include "kernels/backend.h"
#include "modules/cpu/cpu_memory.h"
#include "modules/cpu/workers.h"
#include "modules/module_engine.h"

namespace attnd {

class CpuModule {
 public:
  // All outlive the object.
  CpuModule(const ModuleDescription& module, const CpuLayout& layout, const CpuMemory& memory,
            Workers& workers, Backend& attention)
      : module_(module),
        layout_(layout),
        memory_(memory),
        workers_(workers),
        attention_(attention) {}

  const ModuleGraph& graph() const { return module_.graph; }
  ElementType element() const { return module_.graph.layout().element; }
  Workers& workers() const { return workers_; }
  Backend& attention() const { return attention_; }
  const AttentionBytes& attention_bytes() const { return layout_.attention_bytes; }

  Tensor Weight(const WeightEntry& entry) const {
    const ElementType kept = module_.graph.layout().parameter_element;
    return {memory_.at(layout_.weights_at + entry.offset * ElementBytes(kept)), kept};
  }
  Tensor Weight(int64_t layer, int64_t parameter) const {
    return Weight(module_.table.Of(layer, parameter));
  }
  ConstTensor WeightOrNull(int64_t layer, const std::optional<int64_t>& parameter) const {
    return parameter.has_value() ? ConstTensor(Weight(layer, *parameter)) : ConstTensor();
  }
  std::byte* Panels(const WeightEntry& entry) const {
    return memory_.at(layout_.panels_at + layout_.panels[&entry - module_.table.entries().data()]);
  }
  std::byte* Panels(int64_t layer, int64_t parameter) const {
    return Panels(module_.table.Of(layer, parameter));
  }
  // Null where the parameter is absent or frozen.
  float* Gradient(int64_t layer, const std::optional<int64_t>& parameter) const {
    if (!parameter.has_value()) return nullptr;
    const WeightEntry& entry = module_.table.Of(layer, *parameter);
    return entry.trained_offset.has_value() ? gradients() + *entry.trained_offset : nullptr;
  }
  float* gradients() const { return reinterpret_cast<float*>(memory_.at(layout_.gradients_at)); }
  float* moments(int64_t n) const {
    return reinterpret_cast<float*>(memory_.at(layout_.moments_at[n]));
  }

  std::byte* activations() const { return memory_.at(layout_.activations_at); }
  std::byte* boundary(int64_t n) const {
    return memory_.at(layout_.boundaries_at + n * layout_.boundary_bytes);
  }
  std::byte* d_memory() const { return memory_.at(layout_.d_memory_at); }
  std::byte* layer_buffers() const { return memory_.at(layout_.layer_at); }
  std::byte* statistics() const { return memory_.at(layout_.statistics_at); }
  std::byte* attention_scratch() const { return memory_.at(layout_.attention_at); }

 private:
  const ModuleDescription& module_;
  const CpuLayout& layout_;
  const CpuMemory& memory_;
  Workers& workers_;
  Backend& attention_;
};

// What both directions of a call read.
struct CpuCall {
  CallRows rows;
  CallDropout dropout;
  std::vector<uint8_t> mask_bits;
  std::vector<uint32_t> positions;  // [rows]
  ConstTensor memory;
  std::stop_token stop;
};

// Where the values of a layer lie in one call. Null: not there.
struct LayerValues {
  std::vector<Tensor> values;  // [ops + 2]
  std::vector<float*> lse;     // [ops], of attention ops; null: nobody keeps it
};

}  // namespace attnd
