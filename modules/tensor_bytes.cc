#include "modules/tensor_bytes.h"

#include <cmath>
#include <cstring>

#include "base/check.h"

namespace attnd {
namespace {

int64_t BytesOf(const ModuleDescription& module, int64_t rows, int64_t columns) {
  return rows * columns * ElementBytes(module.graph.layout().element);
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
  const ModuleLayout& layout = module.graph.layout();
  const CallRows& rows = *call.rows;
  CHECK(IsOf(call.x, BytesOf(module, rows.rows(), layout.width)));
  CHECK(call.y.size() == call.x.size());
  const int64_t memory_rows = layout.memory_width > 0 ? rows.memory_rows() : 0;
  CHECK(IsOf(call.memory, BytesOf(module, memory_rows, layout.memory_width)));
  const int64_t bits = rows.bool_mask.has_value() ? rows.bool_mask->bytes() : 0;
  CHECK(static_cast<int64_t>(call.mask_bits.size()) == bits);
}

void CheckSizes(const ModuleDescription& module, const CallRows& rows,
                const ModuleBackwardCall& call) {
  const ModuleLayout& layout = module.graph.layout();
  const int64_t bytes = BytesOf(module, rows.rows(), layout.width);
  CHECK(IsOf(call.dy, bytes));
  CHECK(call.dx.empty() || IsOf(call.dx, bytes));
  const int64_t memory_rows = layout.memory_width > 0 ? rows.memory_rows() : 0;
  CHECK(call.d_memory.empty() ||
        IsOf(call.d_memory, BytesOf(module, memory_rows, layout.memory_width)));
}

GradientStats StatsOf(const WeightTable& table, const float* gradients) {
  GradientStats stats;
  for (const WeightEntry& entry : table.entries()) {
    if (!entry.trained_offset.has_value()) continue;
    stats.squared_norm +=
        SquaredNorm({gradients + *entry.trained_offset, static_cast<size_t>(entry.elements)});
  }
  // Squares of float32 numbers neither overflow nor cancel in float64.
  stats.is_finite = std::isfinite(stats.squared_norm);
  return stats;
}

}  // namespace attnd
