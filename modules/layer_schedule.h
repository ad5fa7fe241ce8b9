// LayerSchedule: the workspace of one layer of a block: which buffers each direction needs and for
// which steps. Forward runs an op at its step of OpOrder. Backward computes what was not kept
// first, at the same steps, then runs an op of step n of N at step 2·N − 1 − n. Pure functions; any
// thread.
#pragma once

#include <cstdint>
#include <vector>

#include "modules/arena.h"
#include "modules/graph.h"
#include "modules/kept_values.h"

namespace attnd {

struct RowCounts {
  int64_t input = 0, memory = 0;
  int64_t Of(RowKind kind) const { return kind == RowKind::kInput ? input : memory; }
};

// Says what a buffer of a schedule holds, for which value or op: ArenaBuffer::key.
enum class BufferUse : uint8_t {
  kValue,        // by value
  kTurnedQuery,  // by op, as the rest: q and k after norm and rotary, in forward's step
  kTurnedKey,
  kLogSumExp,
  kGradient,       // by value
  kBackwardQuery,  // q and k again, in backward's step
  kBackwardKey,
  kQueryGradient,
  kKeyGradient,
  kValueGradient,
  kDelta,
};
constexpr int64_t BufferKey(BufferUse use, int64_t number) {
  return number * 16 + static_cast<int64_t>(use);
}

// Values that forward makes and nothing keeps. The block's input and output are not among them: the
// boundary between layers holds those.
std::vector<ArenaBuffer> ForwardBuffers(const ModuleGraph& graph, int64_t block,
                                        const RowCounts& rows);

// Values that are computed again, their gradients, and attention's own.
std::vector<ArenaBuffer> BackwardBuffers(const ModuleGraph& graph, int64_t block,
                                         Recompute recompute, const RowCounts& rows);

// [ops + 2]: whose gradient's buffer holds the gradient of each value; its own number where no
// other does. The gradient of one operand of a sum is that of the sum, which nothing else reads, if
// the sum is the operand's first use in backward.
std::vector<int64_t> GradientHolders(const ModuleGraph& graph, int64_t block);

// [ops + 2]: what backward computes again, since it needs it, or needs what is made of it.
std::vector<bool> RecomputedValues(const ModuleGraph& graph, int64_t block, Recompute recompute);

// Bytes a row of what a layer keeps, by kind of row, logsumexp included.
RowCounts KeptBytesPerRow(const ModuleGraph& graph, int64_t layer, Recompute recompute);

}  // namespace attnd
