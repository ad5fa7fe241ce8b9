// Block patterns from a pooled attention map: SPION's three rules and the choice of the largest
// blocks (also of a client's own scores, as SAT's learned Pat·Patᵀ). Deterministic; any thread.
//
//   kFlood      walks from every block of the first row and column to the largest of the next
//               blocks (below, right, both) and keeps those above a quantile of the map
//   kTopK       the largest blocks: density · blocks of them
// On a map pooled over its diagonals (PoolDiagonals) kFlood is SPION-CF and kTopK with
// `force_diagonal` SPION-C; on PoolBlocks kFlood is SPION-F. (SPION, arXiv 2309.12578; SAT, doi
// 10.1109/ACCESS.2024.3425638)
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/masks/mask_spec.h"

namespace attnd {

enum class PatternRule : uint8_t { kFlood = 0, kTopK = 1 };

struct PatternOptions {
  PatternRule rule = PatternRule::kFlood;
  // kFlood: blocks above this quantile of the pooled map, 0..1 (linear interpolation).
  double quantile = 0;
  // kTopK: the part of all blocks that is kept, above 0, at most 1; what is left of ⌊density·n²⌋,
  // with force_diagonal ⌊density·n² − n⌋, beside the diagonal's n. Equal blocks: the first in
  // row-major order.
  double density = 0;
  bool force_diagonal = false;  // SPION's rules do
  // Rows of blocks that keep fewer get their largest ones too, as many as there are at most.
  int64_t min_blocks_per_row = 0;
};

// `pooled`: [blocks, blocks] of square blocks of `block` rows and keys. INVALID_ARGUMENT: options
// out of range, a top-k of nothing, a pooled map of another size or with NaN or infinity.
absl::StatusOr<BlockList> BuildBlockPattern(absl::Span<const float> pooled, int64_t blocks,
                                            int64_t block, const PatternOptions& options);

// The `quantile` of `values`, not empty, interpolated in float32 as torch.quantile does.
float Quantile(std::vector<float> values, double quantile);

}  // namespace attnd
