// A module with random weights and inputs, for the tests of the reference. One thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "attention/random_problem.h"
#include "base/check.h"
#include "tests/layers/random_module.h"
#include "modules/reference/module_reference.h"

namespace attnd {

inline Numbers RandomNumbers(Random& random, int64_t count, const Rounder& round,
                             ElementType element, double scale = 1) {
  Numbers values(count);
  for (double& value : values) value = round.To(element, scale * random.Normal());
  return values;
}

inline bool SameBits(const Numbers& a, const Numbers& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}
inline bool SameBits(const std::vector<Numbers>& a, const std::vector<Numbers>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Numbers& x, const Numbers& y) { return SameBits(x, y); });
}

class ReferenceFixture {
 public:
  ReferenceFixture(ModuleLayout layout, uint64_t seed, Rounding rounding)
      : random_(seed), rounding_(rounding), graph_(Made(std::move(layout))), table_(graph_) {
    const Rounder round(rounding);
    for (const WeightEntry& entry : table_.entries()) {
      const double scale = entry.is_matrix() ? 0.5 : 1;
      weights.push_back(
          RandomNumbers(random_, entry.elements, round, ElementType::kFloat32, scale));
    }
    SetRows(RandomRows(random_, graph_));
    inputs.dropout = {.is_training = true, .seed = random_.Bits(), .offset = 7};
  }

  // New x, memory, bits and dy for these rows.
  void SetRows(CallRows rows) {
    const Rounder round(rounding_);
    const ModuleLayout& layout = graph_.layout();
    inputs.rows = std::move(rows);
    inputs.x = RandomNumbers(random_, inputs.rows.rows() * layout.width, round, layout.element);
    dy = RandomNumbers(random_, inputs.x.size(), round, layout.element);
    inputs.memory = RandomNumbers(random_, inputs.rows.memory_rows() * layout.memory_width, round,
                                  layout.element);
    inputs.mask_bits.clear();
    if (!inputs.rows.bool_mask.has_value()) return;
    inputs.mask_bits.resize(inputs.rows.bool_mask->bytes());
    for (uint8_t& bits : inputs.mask_bits) {
      bits = static_cast<uint8_t>(random_.Bits() | random_.Bits());
    }
  }

  struct Results {
    Numbers y, dx, d_memory;
    std::vector<Numbers> gradients;
    // NaN included.
    bool HasBitsOf(const Results& other) const {
      return SameBits(y, other.y) && SameBits(dx, other.dx) && SameBits(d_memory, other.d_memory) &&
             SameBits(gradients, other.gradients);
    }
  };
  // Forward and backward of `call` with `d_out`; gradients go on from `gradients`.
  Results Run(const ModuleInputs& call, const Numbers& d_out, Recompute recompute,
              std::vector<Numbers> gradients) const {
    const ModuleReference reference(graph_, table_, weights, rounding_);
    const std::vector<Recompute> modes(graph_.layout().layers.size(), recompute);
    ForwardResult forward = reference.Forward(call, modes);
    BackwardResult backward = reference.Backward(call, forward.kept, {d_out, {}}, gradients);
    return {std::move(forward.y), std::move(backward.dx), std::move(backward.d_memory),
            std::move(gradients)};
  }
  Results Run(Recompute recompute = Recompute::kNone) const {
    return Run(inputs, dy, recompute, EmptyGradients());
  }
  Numbers Forward() const {
    const ModuleReference reference(graph_, table_, weights, rounding_);
    return reference.Forward(inputs, std::vector(graph_.layout().layers.size(), Recompute::kLayers))
        .y;
  }
  std::vector<Numbers> EmptyGradients() const {
    return ModuleReference(graph_, table_, weights, rounding_).EmptyGradients();
  }

  const ModuleGraph& graph() const { return graph_; }
  const WeightTable& table() const { return table_; }
  Random& random() { return random_; }

  std::vector<Numbers> weights;  // one for each entry of the table
  ModuleInputs inputs;
  Numbers dy;

 private:
  static ModuleGraph Made(ModuleLayout layout) {
    auto graph = ModuleGraph::Make(std::move(layout));
    CHECK(graph.ok()) << graph.status().ToString();
    return *std::move(graph);
  }

  Random random_;
  Rounding rounding_;
  ModuleGraph graph_;
  WeightTable table_;
};

}  // namespace attnd
