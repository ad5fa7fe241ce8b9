// InstanceTensors: one instance's tensors by name, over its memory; what runs a layer reads from.
// And the inputs of one call. One call at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stop_token>
#include <vector>

#include "kernels/layers/executor/instance_memory.h"
#include "kernels/layers/executor/module_device.h"
#include "modules/module_engine.h"

namespace attnd {

class InstanceTensors {
 public:
  // All outlive the object. `memory` holds what the layout says.
  InstanceTensors(const ModuleDescription& module, const InstanceLayout& layout, std::byte* memory,
                  ModuleDevice& device)
      : module_(module), layout_(layout), memory_(memory), device_(device) {}

  const ModuleGraph& graph() const { return module_.graph; }
  ElementType element() const { return module_.graph.layout().element; }
  ModuleDevice& device() const { return device_; }
  const AttentionScratch& attention() const { return layout_.attention; }

  Tensor Weight(const WeightEntry& entry) const {
    const ElementType kept = module_.graph.layout().parameter_element;
    return {At(layout_.weights_at + entry.offset * ElementBytes(kept)), kept};
  }
  Tensor Weight(int64_t layer, int64_t parameter) const {
    return Weight(module_.table.Of(layer, parameter));
  }
  ConstTensor WeightOrNull(int64_t layer, const std::optional<int64_t>& parameter) const {
    return parameter.has_value() ? ConstTensor(Weight(layer, *parameter)) : ConstTensor();
  }
  WeightMatrix Matrix(const WeightEntry& entry) const {
    WeightMatrix matrix = MatrixOf(module_, entry);
    matrix.weight = Weight(entry);
    const auto number = &entry - module_.table.entries().data();
    matrix.packed = At(layout_.packed_at + layout_.packed[number]);
    return matrix;
  }
  WeightMatrix Matrix(int64_t layer, int64_t parameter) const {
    return Matrix(module_.table.Of(layer, parameter));
  }
  // Null where the parameter is absent or frozen.
  float* Gradient(int64_t layer, const std::optional<int64_t>& parameter) const {
    if (!parameter.has_value()) return nullptr;
    const WeightEntry& entry = module_.table.Of(layer, *parameter);
    return entry.trained_offset.has_value() ? gradients() + *entry.trained_offset : nullptr;
  }
  float* gradients() const { return reinterpret_cast<float*>(At(layout_.gradients_at)); }
  float* moments(int64_t n) const { return reinterpret_cast<float*>(At(layout_.moments_at[n])); }

  std::byte* activations() const { return At(layout_.activations_at); }
  std::byte* boundary(int64_t n) const {
    return At(layout_.boundaries_at + n * layout_.boundary_bytes);
  }
  std::byte* memory() const { return At(layout_.memory_at); }
  std::byte* d_memory() const { return At(layout_.d_memory_at); }
  std::byte* layer_buffers() const { return At(layout_.layer_at); }
  std::byte* statistics() const { return At(layout_.statistics_at); }
  std::byte* attention_scratch() const { return At(layout_.attention_at); }

 private:
  std::byte* At(int64_t offset) const { return memory_ + offset; }

  const ModuleDescription& module_;
  const InstanceLayout& layout_;
  std::byte* const memory_;
  ModuleDevice& device_;
};

// Both directions of a call read these.
struct InstanceCall {
  CallRows rows;
  CallDropout dropout;
  std::vector<uint8_t> mask_bits;   // host
  std::vector<uint32_t> positions;  // host [rows]
  ConstTensor memory;
  std::stop_token stop;
  DeviceYield* yield = nullptr;
};

// Where the values of a layer lie in one call. Null: not there.
struct LayerValues {
  std::vector<Tensor> values;  // [ops + 2]
  std::vector<float*> lse;     // [ops], of attention ops; null: nobody keeps it
};

}  // namespace attnd
