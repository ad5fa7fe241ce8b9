#include "kernels/cuda/layout/list_runs.h"

#include "kernels/cuda/layout/launch_layout.h"
#include "kernels/cuda/layout/staging.h"

namespace attnd::cuda {
namespace {

// Rows of float32 from `address` on, for the tile that begins at row `first`.
RowTensor FloatRows(const RunShape& shape, int64_t columns, int64_t first, uint64_t address) {
  RowTensor rows = {};
  rows.row_stride = columns * 2;  // in 16-bit numbers
  rows.head = shape.rows * rows.row_stride;
  rows.batch = shape.heads * rows.head;
  rows.data = reinterpret_cast<void*>(address - static_cast<uint64_t>(first * columns * 4));
  return rows;
}

}  // namespace

RunShape RunShapeOf(const Problem& p, Direction direction, int64_t entries, int64_t kv_heads,
                    int64_t rows) {
  const int64_t values = PaddedDim(ValueRows(p).dim);
  if (direction == Direction::kForward) {
    return {entries, kv_heads * p.group_size(), rows, values, 1};
  }
  return {entries, kv_heads, rows, PaddedDim(KeyRows(p).dim), values};
}

ProblemDesc DescribeRun(const ProblemDesc& part, const CutLine& line, const RunShape& shape,
                        Direction direction, int32_t n, uint64_t arena) {
  ProblemDesc desc = part;
  desc.tile_lists.run = n + 1;
  desc.tile_lists.whole = static_cast<int32_t>(line.part);
  const uint64_t room = arena + static_cast<uint64_t>(line.offset + n * shape.bytes());
  const uint64_t second = room + static_cast<uint64_t>(shape.first_bytes());
  const int64_t first_row = line.line * shape.rows;
  if (direction == Direction::kForward) {
    desc.o = FloatRows(shape, shape.first_columns, first_row, room);
    desc.lse = reinterpret_cast<float*>(second - static_cast<uint64_t>(first_row * 4));
    desc.lse_head = shape.rows;
    desc.lse_batch = shape.heads * shape.rows;
    desc.denominator = kDenominatorSoftmax;
  } else {
    desc.d_k = FloatRows(shape, shape.first_columns, first_row, room);
    desc.d_v = FloatRows(shape, shape.second_columns, first_row, second);
  }
  return desc;
}

}  // namespace attnd::cuda
