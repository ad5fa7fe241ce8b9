// The problems that runs of long lists are (kernels/rules/list_runs.h): those of their part but for
// where results go, which is a room of the arena for each line and run. Pure functions; any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/problem.h"
#include "kernels/cuda/layout/descriptors.h"
#include "kernels/rules/params.h"

namespace attnd::cuda {

// A line of a part's lists that is cut.
struct CutLine {
  size_t part = 0;
  int32_t line = 0;
  int64_t offset = 0;  // in the arena, of what its runs leave
};

// Shapes what a run leaves of one line, all entries and heads: forward O and lse, backward dK and
// dV, as float32.
struct RunShape {
  int64_t entries = 0, heads = 0, rows = 0;  // rows (keys) of the line's tile
  int64_t first_columns = 0, second_columns = 0;
  int64_t first_bytes() const { return entries * heads * rows * first_columns * 4; }
  int64_t bytes() const { return entries * heads * rows * (first_columns + second_columns) * 4; }
};
RunShape RunShapeOf(const Problem& problem, Direction direction, int64_t entries, int64_t kv_heads,
                    int64_t rows);

// Makes, from the description of a part, that of run n, n < kListRuns, of one of its lines.
ProblemDesc DescribeRun(const ProblemDesc& part, const CutLine& line, const RunShape& shape,
                        Direction direction, int32_t n, uint64_t arena);

}  // namespace attnd::cuda
