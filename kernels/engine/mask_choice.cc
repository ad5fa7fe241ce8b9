#include "kernels/engine/mask_choice.h"

#include <utility>

#include "base/round_up.h"
#include "base/status_macros.h"
#include "kernels/engine/launch_plan.h"

namespace attnd::cuda {
namespace {

double CyclesOf(const KernelRow& row, const Problem& p, double full, double partial) {
  const int64_t rows = row.tile.q_rows;
  const int64_t blocks = p.batch * p.q_heads * DivideUp(p.q_len, rows);
  return full * double{row.cycles.full} + partial * double{row.cycles.partial} +
         static_cast<double>(blocks) * double{row.cycles.block};
}

// At least what small tiles take: a larger tile that is FULL is nothing but such, a PARTIAL one has
// one or more.
double LeastOfSmall(const KernelRow& small, const KernelRow& listed, const MaskTotals& totals,
                    const Problem& p) {
  const double parts = static_cast<double>(listed.tile.q_rows) / small.tile.q_rows;
  return CyclesOf(small, p, static_cast<double>(totals.tiles_full) * parts,
                  static_cast<double>(totals.tiles_partial));
}

// Whether small tiles are predicted to be faster; not where they cannot be listed.
absl::StatusOr<bool> IsSmallFaster(const ForwardKernels& listed, const ForwardKernels& small,
                                   const Problem& p, MaskPlans& plans) {
  ASSIGN_OR_RETURN(const auto plan, plans.Get(p, OptionsOf(TilingOf(listed))));
  const double as_listed = PredictedCycles(listed.forward, *plan, p);
  if (LeastOfSmall(small.forward, listed.forward, TotalsOf(*plan, p), p) >= as_listed) return false;
  const auto of_small = plans.Get(p, OptionsOf(TilingOf(small)));
  if (!of_small.ok() || !CheckMask(**of_small).ok()) return false;
  return PredictedCycles(small.forward, **of_small, p) < as_listed;
}

}  // namespace

double PredictedCycles(const KernelRow& row, const CompiledMask& compiled, const Problem& p) {
  const MaskTotals totals = TotalsOf(compiled, p);
  return CyclesOf(row, p, static_cast<double>(totals.tiles_full),
                  static_cast<double>(totals.tiles_partial));
}

absl::StatusOr<ForwardKernels> ChooseForward(absl::Span<const KernelRow> rows, const Problem& p,
                                             std::optional<MaskTiles> forced, MaskPlans& plans) {
  ASSIGN_OR_RETURN(ForwardKernels listed, SelectForward(rows, p));
  if (p.mask == nullptr || forced == MaskTiles::kListed) return listed;
  absl::StatusOr<ForwardKernels> small = SelectForward(rows, p, MaskTiles::kSmall);
  if (forced == MaskTiles::kSmall) return small;
  if (!small.ok()) return listed;
  ASSIGN_OR_RETURN(const bool faster, IsSmallFaster(listed, *small, p, plans));
  return faster ? *std::move(small) : listed;
}

absl::string_view ReasonOfLists(const KernelRow& row) {
  if (row.small) {
    return "tiles of 32 rows and 32 keys: predicted to be faster than larger ones, most of which "
           "the mask empties";
  }
  return "the kernel for this shape and these options; it visits listed tiles alone, and "
         "reads bits of partial ones";
}

std::optional<MaskTiles> TilesOf(std::optional<MaskWay> forced) {
  if (forced == MaskWay::kListed) return MaskTiles::kListed;
  if (forced == MaskWay::kSmall) return MaskTiles::kSmall;
  return std::nullopt;
}

}  // namespace attnd::cuda
