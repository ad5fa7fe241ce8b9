// One module in an engine and in the reference, with the same weights and calls: for tests.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "modules/module_engine.h"
#include "tests/layers/reference_fixture.h"

namespace attnd {

using Bytes = std::vector<std::byte>;

inline Bytes BytesOf(const Numbers& numbers, ElementType element) {
  Bytes bytes(numbers.size() * ElementBytes(element));
  for (size_t n = 0; n < numbers.size(); ++n) {
    StoreElement(element, bytes.data(), n, static_cast<float>(numbers[n]));
  }
  return bytes;
}
inline Numbers NumbersOf(const Bytes& bytes, ElementType element) {
  Numbers numbers(bytes.size() / ElementBytes(element));
  for (size_t n = 0; n < numbers.size(); ++n) numbers[n] = LoadElement(element, bytes.data(), n);
  return numbers;
}

template <class T>
T Value(absl::StatusOr<T> result) {
  CHECK(result.ok()) << result.status().ToString();
  return *std::move(result);
}
inline void CheckOk(const absl::Status& status) { CHECK(status.ok()) << status.ToString(); }

// An instance with the fixture's weights; what they are kept as goes back to the fixture.
class EngineUnderTest {
 public:
  using Results = ReferenceFixture::Results;

  EngineUnderTest(ModuleEngine& engine, ReferenceFixture& fixture, const ModuleLimits& limits,
                  OptimizerSpec optimizer = {}, const MemoryBudget& budget = int64_t{1} << 40)
      : module_(std::make_shared<ModuleDescription>(fixture.graph(), std::move(optimizer))) {
    const EnginePlan plan = Value(engine.Plan(*module_, limits, budget));
    instance_ = Value(engine.Make(module_, limits, plan));
    for (size_t n = 0; n < fixture.weights.size(); ++n) {
      Bytes bytes = BytesOf(fixture.weights[n], ElementType::kFloat32);
      CheckOk(instance_->Put(n, TensorRole::kWeight, ElementType::kFloat32, bytes));
      CheckOk(instance_->Get(n, TensorRole::kWeight, ElementType::kFloat32, absl::MakeSpan(bytes)));
      fixture.weights[n] = NumbersOf(bytes, ElementType::kFloat32);
    }
  }

  // Limits that fit the fixture's call.
  static ModuleLimits LimitsOf(const ReferenceFixture& fixture, Recompute recompute) {
    const int64_t rows = fixture.inputs.rows.rows();
    const int64_t memory_rows =
        fixture.graph().layout().memory_width > 0 ? fixture.inputs.rows.memory_rows() : 0;
    return {.max_rows = rows,
            .kept_rows = rows,
            .max_memory_rows = memory_rows,
            .kept_memory_rows = memory_rows,
            .recompute = recompute};
  }

  // Forward and backward; gradients go on from what the instance holds.
  Results Run(const ModuleInputs& inputs, const Numbers& dy) {
    const ElementType element = module_->graph.layout().element;
    const Bytes x = BytesOf(inputs.x, element), memory = BytesOf(inputs.memory, element);
    Bytes y(x.size(), std::byte{0xff}), dx = y, d_memory(memory.size(), std::byte{0xff});
    const ActivationId kept = Value(instance_->Forward({.rows = &inputs.rows,
                                                        .dropout = inputs.dropout,
                                                        .x = x,
                                                        .memory = memory,
                                                        .mask_bits = inputs.mask_bits,
                                                        .keep = true,
                                                        .y = absl::MakeSpan(y)}));
    CheckOk(instance_->Backward({.activation = kept,
                                 .dy = BytesOf(dy, element),
                                 .dx = absl::MakeSpan(dx),
                                 .d_memory = absl::MakeSpan(d_memory)}));
    instance_->DropActivation(kept);
    return {NumbersOf(y, element), NumbersOf(dx, element), NumbersOf(d_memory, element),
            Tensors(TensorRole::kGradient)};
  }

  // As Run, each layer by a call of its own: all forward, then all backward.
  Results RunLayers(const ModuleInputs& inputs, const Numbers& dy) {
    const ModuleGraph& graph = module_->graph;
    const auto bytes_before = [&](int64_t layer) {
      return inputs.rows.rows() * graph.layout().width * ElementBytes(graph.BorderElement(layer));
    };
    const Bytes memory = BytesOf(inputs.memory, graph.layout().element);
    Bytes x = BytesOf(inputs.x, graph.x_element()), d_memory(memory.size());
    std::vector<ActivationId> kept;
    for (int64_t layer = 0; layer < graph.layers(); ++layer) {
      Bytes y(bytes_before(layer + 1), std::byte{0xff});
      kept.push_back(Value(instance_->Forward({.rows = &inputs.rows,
                                               .dropout = inputs.dropout,
                                               .x = x,
                                               .memory = memory,
                                               .mask_bits = inputs.mask_bits,
                                               .keep = true,
                                               .layers = {layer, layer + 1},
                                               .y = absl::MakeSpan(y)})));
      x = std::move(y);
    }
    Bytes d_out = BytesOf(dy, graph.y_element());
    for (int64_t layer = graph.layers() - 1; layer >= 0; --layer) {
      Bytes dx(bytes_before(layer), std::byte{0xff});
      const bool adds = !memory.empty() && layer + 1 < graph.layers();
      CheckOk(instance_->Backward({.activation = kept[layer],
                                   .dy = d_out,
                                   .dx = absl::MakeSpan(dx),
                                   .d_memory = absl::MakeSpan(d_memory),
                                   .add_d_memory = adds}));
      instance_->DropActivation(kept[layer]);
      d_out = std::move(dx);
    }
    return {NumbersOf(x, graph.y_element()), NumbersOf(d_out, graph.x_element()),
            NumbersOf(d_memory, graph.layout().element), Tensors(TensorRole::kGradient)};
  }

  // The tensors of each entry; empty where it has none.
  std::vector<Numbers> Tensors(TensorRole role) const {
    std::vector<Numbers> tensors;
    for (size_t n = 0; n < module_->table.entries().size(); ++n) {
      Bytes bytes(module_->table.entries()[n].elements * 4);
      const absl::Status status =
          instance_->Get(n, role, ElementType::kFloat32, absl::MakeSpan(bytes));
      if (!status.ok()) bytes.clear();
      tensors.push_back(NumbersOf(bytes, ElementType::kFloat32));
    }
    return tensors;
  }

  ModuleInstance& instance() { return *instance_; }
  const ModuleDescription& module() const { return *module_; }

 private:
  const std::shared_ptr<const ModuleDescription> module_;
  std::unique_ptr<ModuleInstance> instance_;
};

}  // namespace attnd
