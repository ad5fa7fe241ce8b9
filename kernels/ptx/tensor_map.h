// tensor_map.h: the descriptors of the instructions that load boxes of a tensor.
#pragma once

#include "base/hd.h"

namespace attnd {

// A tensor of four dimensions (columns, rows, heads, entries) and a box of it, as the driver
// encodes them for the kernels that load by boxes.
struct alignas(64) TensorMap {
  uint64_t words[16];
};
// RowsBox is the content of a map. Boxes have 64 columns; columns and rows outside the tensor come
// as zeros. The emulator's maps hold just this.
struct RowsBox {
  uint64_t address;
  int64_t columns, rows, heads, entries;
  int64_t row_bytes, head_bytes, entry_bytes;  // multiples of 16
  int32_t box_rows;
};

}  // namespace attnd
