#include "modules/tensor_bytes.h"

#include <cstring>

#include "base/check.h"

namespace attnd {
namespace {

// Counts the bytes of x or y, by its element.
int64_t RowBytes(const ModuleGraph& graph, const CallRows& rows, ElementType element) {
  return rows.rows() * graph.layout().width * ElementBytes(element);
}

int64_t MemoryBytes(const ModuleGraph& graph, const CallRows& rows) {
  const ModuleLayout& layout = graph.layout();
  if (layout.memory_width == 0) return 0;
  return rows.memory_rows() * layout.memory_width * ElementBytes(layout.element);
}

bool IsOf(absl::Span<const std::byte> bytes, int64_t size) {
  return static_cast<int64_t>(bytes.size()) == size;
}

}  // namespace

void ConvertNumbers(ElementType from, const void* in, ElementType to, void* out, int64_t count) {
  if (from == to) {
    std::memcpy(out, in, count * ElementBytes(from));
    return;
  }
  for (int64_t n = 0; n < count; ++n) StoreElement(to, out, n, LoadElement(from, in, n));
}

absl::StatusOr<ElementType> ElementOfRole(const ModuleDescription& module, int64_t entry,
                                          TensorRole role) {
  constexpr const char* kNames[] = {"weight", "gradient", "moment1", "moment2", "moment2_max"};
  if (role == TensorRole::kWeight) return module.graph.layout().parameter_element;
  const bool is_trained = module.table.entries()[entry].trained_offset.has_value();
  const int64_t number = static_cast<int64_t>(role) - static_cast<int64_t>(TensorRole::kGradient);
  if (is_trained && number <= module.optimizer.MomentCount()) return ElementType::kFloat32;
  return absl::NotFoundError(kNames[static_cast<int>(role)]);
}

void CheckSizes(const ModuleDescription& module, const ModuleForwardCall& call) {
  const ModuleGraph& graph = module.graph;
  const CallRows& rows = *call.rows;
  const LayerRange layers = graph.Resolved(call.layers);
  CHECK(0 <= layers.first && layers.first < layers.end && layers.end <= graph.layers());
  CHECK(IsOf(call.x, RowBytes(graph, rows, graph.BorderElement(layers.first))));
  CHECK(IsOf(call.y, RowBytes(graph, rows, graph.BorderElement(layers.end))));
  CHECK(IsOf(call.memory, MemoryBytes(graph, rows)));
  const int64_t bits = rows.bool_mask.has_value() ? rows.bool_mask->bytes() : 0;
  CHECK(static_cast<int64_t>(call.mask_bits.size()) == bits);
}

void CheckSizes(const ModuleDescription& module, const CallRows& rows, LayerRange layers,
                const ModuleBackwardCall& call) {
  const ModuleGraph& graph = module.graph;
  layers = graph.Resolved(layers);
  CHECK(IsOf(call.dy, RowBytes(graph, rows, graph.BorderElement(layers.end))));
  CHECK(call.dx.empty() || IsOf(call.dx, RowBytes(graph, rows, graph.BorderElement(layers.first))));
  CHECK(call.d_memory.empty() || IsOf(call.d_memory, MemoryBytes(graph, rows)));
  CHECK(!call.add_d_memory || !call.d_memory.empty());
}

}  // namespace attnd
