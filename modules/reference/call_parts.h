// Parts of a call as calls of their own, for tests of invariance.
#pragma once

#include <cstdint>

#include "modules/reference/module_reference.h"

namespace attnd {

inline Numbers Part(const Numbers& all, int64_t columns, int64_t first, int64_t rows) {
  return {all.begin() + first * columns, all.begin() + (first + rows) * columns};
}

inline void Append(const Numbers& part, Numbers& all) {
  all.insert(all.end(), part.begin(), part.end());
}

// Sequence b of a dense call, as a call of its own.
inline ModuleInputs OneSequence(const ModuleInputs& all, const ModuleLayout& layout, int64_t b) {
  ModuleInputs one = all;
  one.rows = all.rows.Sequences(b, 1);
  const CallRows& rows = one.rows;
  if (rows.bool_mask.has_value()) {
    const int64_t bytes = all.rows.bool_mask->bytes() / all.rows.batch;
    one.mask_bits.assign(all.mask_bits.begin() + b * bytes,
                         all.mask_bits.begin() + (b + 1) * bytes);
  }
  one.x = Part(all.x, layout.width, b * rows.length, rows.length);
  one.memory = Part(all.memory, layout.memory_width, b * rows.memory_length, rows.memory_length);
  return one;
}

// Masks and slopes that differ by batch entry belong to the whole batch.
inline bool DependsOnBatch(const ModuleLayout& layout) {
  for (const ModuleBlock& block : layout.blocks) {
    for (const ModuleOp& op : block.ops) {
      const auto* attention = std::get_if<AttentionOp>(&op.kind);
      if (attention != nullptr && attention->mask.has_value()) return true;
    }
  }
  return false;
}

}  // namespace attnd
