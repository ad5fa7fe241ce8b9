// MaskChoice: which tiles the kernel of a call with a mask by description visits, by predicted
// time.
//   listed  those of its usual blocks
//   small   32 rows × 32 keys: more of them, and less that is not visible
// The prediction counts tiles of both and multiplies them with what they cost (visit_cycles.h).
// Each adds up shares of its own tiles, so a call chooses by its whole mask: alike in any batch and
// shard, whatever part of it they hold.
#pragma once

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/mask_plans.h"
#include "kernels/cuda/masks/mask_cache.h"
#include "kernels/cuda/masks/mask_layout.h"
#include "kernels/cuda/residue_choice.h"
#include "kernels/cuda/selection.h"

namespace attnd::cuda {

// Chooses the kernels for a valid problem, with or without a mask. `forced`, if there, is taken for
// masks by description whatever the prediction says, or UNIMPLEMENTED naming it. Other errors are
// SelectForward's.
absl::StatusOr<ForwardKernels> ChooseForward(absl::Span<const KernelRow> rows,
                                             const Problem& problem,
                                             std::optional<MaskTiles> forced, MaskPlans& plans);

// The same of backward.
absl::StatusOr<BackwardKernels> ChooseBackward(absl::Span<const KernelRow> rows,
                                               const Problem& problem,
                                               std::optional<MaskTiles> forced, MaskPlans& plans);

// A call's lists for tiles of a kernel, not yet in the device's memory, and which of their lines
// are cut (`may_cut`). Errors: MaskPlans', CheckMask's. Without a mask by description: none.
absl::StatusOr<CallMask> ListMask(const Problem& problem, const MaskTiling& tiling, bool may_cut,
                                  MaskPlans& plans);

// Which of them a way forces, if it does (residue_choice.h).
std::optional<MaskTiles> TilesOf(std::optional<MaskWay> forced);

// Why a kernel visits the tiles that it lists: for reports.
absl::string_view ReasonOfLists(const KernelRow& row);

// Predicts what a launch of this row takes, in cycles of one SM: `compiled` for its tiles.
double PredictedCycles(const KernelRow& row, const CompiledMask& compiled, const Problem& problem);

}  // namespace attnd::cuda
