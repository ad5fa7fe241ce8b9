// The work items of the CPU engine. Each is done by one thread with a scratch of its own, reads and
// writes nothing that another item of the same phase writes, and looks at its call's stop token.
// Arithmetic is float32; compiled once per Highway target and chosen at run time. Products of
// 16-bit tensors run on the processor's matrix tiles if it has them (matrix_tiles.h).
//
// Forward    ForwardItem for each ForwardRange
// Backward   phase 1: RowSums for each (batch entry, query head): delta and d_sink
//            phase 2: GradientItem for each (batch entry, KV head, residue, slot): dQ, and dK, dV
//                     of its rows; it waits for the slot before it, so that must have been started
//            phase 3: BiasGradientItem for each tile of the bias, if its gradient is wanted
// Capture    CaptureItem for each tile of the map
// Backward's workspace is laid out by BackwardWorkspace (workspace.h).
#pragma once

#include <cstdint>
#include <string>

#include "kernels/cpu/cpu_call.h"
#include "kernels/cpu/tiles.h"

namespace attnd {

// Query tiles [first, first + count) of those of a row class that share a KV head: head by head,
// QueryTiles(q_len) of each. How they are cut into ranges changes no result.
struct ForwardRange {
  int64_t batch_index, kv_head, residue, first;
  int count;
};
void ForwardItem(const CpuForwardCall& call, const ForwardRange& range, float* scratch);

void RowSums(const CpuBackwardCall& call, int64_t batch_index, int64_t q_head);

struct GradientRange {
  int64_t batch_index, kv_head, residue, slot;
};
void GradientItem(const CpuBackwardCall& call, const GradientRange& range, float* scratch);

// One tile of d_bias: [rows, columns] of (batch, head) of the bias's own shape.
struct BiasTile {
  int64_t batch, head, row_tile, column_tile;
};
void BiasGradientItem(const CpuBackwardCall& call, const BiasTile& tile, float* scratch);

// The averaged attention map's tile at (row, key), both multiples of the tile's sides:
// [kMaxQueryRows][kMaxKeyRows] of `scratch`, zero beyond the map. It reads what the call's forward
// read, and lse.
struct MapTile {
  int64_t row, key;
};
const float* CaptureItem(const CpuForwardCall& call, const MapTile& tile, float* scratch);

// The vector target in use, and the matrix tiles if there are any ("AVX3_AMX"); and what the
// float32 product reaches in one thread.
std::string CpuTargetName();
int64_t CompiledCpuTargets();  // Highway's bits of all targets in this binary
double MeasureFlopsPerSecond(float* scratch);

}  // namespace attnd
