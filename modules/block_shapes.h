// BlockShapes: the shape of every value of a block, as CheckBlock finds it. Values; any thread.
#pragma once

#include <cstdint>
#include <vector>

namespace attnd {

enum class RowKind : uint8_t { kInput, kMemory };  // of x, or of the memory

struct ValueShape {
  RowKind rows = RowKind::kInput;
  int64_t columns = 0;  // 0: the memory of a layout without one
  bool wide = false;    // of wide_element; for the block's input see ModuleGraph::ElementOf
};

struct BlockShapes {
  std::vector<ValueShape> values;      // [ops + 2]
  std::vector<int64_t> attention_ops;  // ascending
};

}  // namespace attnd
