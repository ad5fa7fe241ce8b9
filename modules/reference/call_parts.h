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
  CallRows& rows = one.rows;
  rows.batch = 1;
  rows.first_sequence += b;
  rows.first_row += b * rows.length;
  if (!rows.kv_lengths.empty()) rows.kv_lengths = {all.rows.kv_lengths[b]};
  if (!rows.memory_kv_lengths.empty()) rows.memory_kv_lengths = {all.rows.memory_kv_lengths[b]};
  if (!rows.positions.empty()) {
    const auto begin = all.rows.positions.begin() + b * rows.length;
    rows.positions.assign(begin, begin + rows.length);
  }
  if (rows.bool_mask.has_value()) {
    const int64_t bytes = all.rows.bool_mask->bytes() / all.rows.batch;
    rows.bool_mask->shape.batch = 1;
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
