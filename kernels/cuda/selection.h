// Selection: from a Problem to the kernels that compute it, among a device's rows.
// Errors: UNIMPLEMENTED naming the field and what would work. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/problem.h"
#include "kernels/tiles.h"

namespace attnd::cuda {

// Whether scores need more than a positive, normal scale; a mask is no part of them.
bool NeedsGeneralScores(const Problem& problem);

// Which tiles a kernel of a masked call visits: those of its usual blocks, or of 32 rows and 32
// keys (KernelRow::small).
enum class MaskTiles : uint8_t { kListed, kSmall };

// Whether a row of dQ may be a tiny part of its bound without errors of dP and delta that are
// larger still, so that one integer is too coarse (kernels/rules/backward_passes.h). Always in
// float32.
bool NeedsDqRest(const Problem& problem);

// Mask tiles: launched where a problem has a bool mask.
struct ForwardKernels {
  KernelRow forward, mask_tiles;
  std::optional<KernelRow> keep_rows;     // where bfloat16 travels as float16
  std::optional<KernelRow> dropout_bits;  // where forward wants them
  std::optional<KernelRow> merge;         // where long lists may be cut (masks/list_cuts.h)
  bool by_residue = false;                // on classes of rows (residue_choice.h)
};
struct BackwardKernels {
  KernelRow mask_tiles, key_bounds, delta, backward, query_gradient;
  std::optional<KernelRow> sink_gradient, bias_gradient;  // where the problem wants them
  std::optional<KernelRow> dropout_bits;                  // where backward wants them
  std::optional<KernelRow> merge;                         // as above
  bool by_residue = false;
};
struct CaptureKernels {
  KernelRow mask_tiles, scores, sums;
};
absl::StatusOr<ForwardKernels> SelectForward(absl::Span<const KernelRow> rows,
                                             const Problem& problem,
                                             MaskTiles tiles = MaskTiles::kListed);
absl::StatusOr<BackwardKernels> SelectBackward(absl::Span<const KernelRow> rows,
                                               const Problem& problem,
                                               MaskTiles tiles = MaskTiles::kListed);
// Chooses the capture kernels for a problem that SelectForward has kernels for.
absl::StatusOr<CaptureKernels> SelectCapture(absl::Span<const KernelRow> rows,
                                             const Problem& problem);

}  // namespace attnd::cuda
