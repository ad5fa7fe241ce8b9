// InstanceLayout: the memory of one instance of the executor, one allocation.
//
//   weights      as the table lays them out, in parameter_element
//   packed       of each matrix, what the device's products read of it
//   gradients, moments                float32, as the table's trained offsets
//   activations  what KeptPlaces lays out, from the first free range on
//   workspace    boundaries between layers, the memory input and its gradient, one layer's buffers
//   attention    gathered heads, logsumexp, norm statistics, the device's workspace
//
// Sizes are known from the plan alone. Pure functions; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/layers/executor/module_device.h"
#include "modules/layer_schedule.h"
#include "modules/module_engine.h"

namespace attnd {

// Bytes of each part of an attention op's scratch, the most of any op of the module.
struct AttentionScratch {
  int64_t q = 0, k = 0, v = 0;  // heads that do not lie as attention reads them
  int64_t o = 0, d_o = 0;       // of wide ops
  int64_t lse = 0;
  int64_t workspace = 0;  // the device's
};

struct InstanceLayout {
  InstanceLayout(const ModuleDescription& module, const ModuleLimits& limits,
                 const ModulePlan& plan, const ModuleDevice& device);

  std::vector<int64_t> packed;  // [entries]: offset of each matrix, in bytes
  AttentionScratch attention;
  int64_t activation_bytes = 0, boundary_bytes = 0;
  // Offsets of the parts.
  int64_t weights_at = 0, packed_at = 0, gradients_at = 0, activations_at = 0;
  std::array<int64_t, 3> moments_at = {};
  int64_t boundaries_at = 0, memory_at = 0, d_memory_at = 0, layer_at = 0;
  int64_t statistics_at = 0, attention_at = 0;
  int64_t bytes = 0;
};

// Without its packed copy's place.
WeightMatrix MatrixOf(const ModuleDescription& module, const WeightEntry& entry);

// Where the buffers of a schedule lie.
class BufferPlaces {
 public:
  explicit BufferPlaces(std::vector<ArenaBuffer> buffers);
  int64_t bytes() const { return bytes_; }
  // −1: not among them.
  int64_t At(BufferUse use, int64_t number) const;

 private:
  std::vector<std::pair<int64_t, int64_t>> places_;  // (key, offset), ascending
  int64_t bytes_ = 0;
};

// Where the kept values of a call's layers lie in its range of the activations.
struct KeptPlaces {
  KeptPlaces(const ModuleGraph& graph, const std::vector<Recompute>& recompute,
             const RowCounts& rows, LayerRange range);

  struct Layer {
    std::vector<int64_t> values;  // [ops + 2]; −1: not kept
    std::vector<int64_t> lse;     // [ops]; −1
  };
  std::vector<Layer> layers;  // of all; of those outside of the range, nothing
  int64_t memory_at = 0;
  int64_t bytes = 0;
};

}  // namespace attnd
