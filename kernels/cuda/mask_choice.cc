#include "kernels/cuda/mask_choice.h"

#include <algorithm>
#include <utility>

#include "attention/masks/mask_description.h"
#include "base/round_up.h"
#include "base/status_macros.h"
#include "kernels/cuda/launch_plan.h"
#include "kernels/cuda/visit_cycles.h"

namespace attnd::cuda {
namespace {

double CyclesFor(const KernelRow& row, const Problem& p, double full, double partial) {
  const int64_t blocks = row.kind == KernelKind::kForward
                             ? p.batch * p.q_heads * DivideUp(p.q_len, int64_t{row.tile.q_rows})
                             : p.batch * p.kv_heads * DivideUp(p.kv_len, int64_t{row.tile.kv_rows});
  const VisitCycles cycles = CyclesOf(row);
  return full * double{cycles.full} + partial * double{cycles.partial} +
         static_cast<double>(blocks) * double{cycles.block};
}

// A kernel and the tiles that it visits.
struct Way {
  KernelRow row;
  MaskTiling tiling;
};

// At least what small tiles take: a larger tile that is FULL is nothing but such, a PARTIAL one has
// one or more.
double LeastOfSmall(const Way& small, const Way& listed, const MaskTotals& totals,
                    const Problem& p) {
  const double parts = static_cast<double>(listed.tiling.rows * listed.tiling.keys) /
                       static_cast<double>(small.tiling.rows * small.tiling.keys);
  return CyclesFor(small.row, p, static_cast<double>(totals.tiles_full) * parts,
                   static_cast<double>(totals.tiles_partial));
}

bool MayList(const Way& way, const Problem& p, MaskPlans& plans) {
  const auto plan = plans.Get(p, OptionsOf(way.tiling));
  return plan.ok() && CheckMask(**plan).ok();
}

// The problem that a call's whole mask is made for, as far as its description tells: one entry and
// KV head where it does not tell them apart.
Problem WholeOf(const Problem& p) {
  const MaskExtents& extents = p.mask->spec().extents;
  Problem whole;
  whole.batch = std::max<int64_t>(1, extents.batch);
  whole.q_heads = extents.q_heads > 0 ? extents.q_heads : p.group_size();
  whole.kv_heads = whole.q_heads / p.group_size();
  whole.q_len = extents.rows;
  whole.kv_len = extents.keys;
  whole.qk_head_dim = p.qk_head_dim;
  whole.v_head_dim = p.v_head_dim;
  whole.alignment = Alignment::kBottomRight;
  whole.mask = p.mask;
  return whole;
}

// Whether small tiles are predicted to be faster for all of the mask, and can be listed for it and
// for this call.
bool TakesSmall(const Way& listed, const Way& small, const Problem& p, MaskPlans& plans) {
  const Problem whole = WholeOf(p);
  const auto of_listed = plans.Get(whole, OptionsOf(listed.tiling));
  if (!of_listed.ok()) return false;
  const double as_listed = PredictedCycles(listed.row, **of_listed, whole);
  if (LeastOfSmall(small, listed, TotalsOf(**of_listed, whole), whole) >= as_listed) return false;
  const auto of_small = plans.Get(whole, OptionsOf(small.tiling));
  return of_small.ok() && CheckMask(**of_small).ok() &&
         PredictedCycles(small.row, **of_small, whole) < as_listed && MayList(small, p, plans);
}

}  // namespace

double PredictedCycles(const KernelRow& row, const CompiledMask& compiled, const Problem& p) {
  const MaskTotals totals = TotalsOf(compiled, p);
  return CyclesFor(row, p, static_cast<double>(totals.tiles_full),
                   static_cast<double>(totals.tiles_partial));
}

absl::StatusOr<ForwardKernels> ChooseForward(absl::Span<const KernelRow> rows, const Problem& p,
                                             std::optional<MaskTiles> forced, MaskPlans& plans) {
  ASSIGN_OR_RETURN(ForwardKernels listed, SelectForward(rows, p));
  if (p.mask == nullptr || forced == MaskTiles::kListed) return listed;
  absl::StatusOr<ForwardKernels> small = SelectForward(rows, p, MaskTiles::kSmall);
  if (forced == MaskTiles::kSmall) return small;
  if (!small.ok()) return listed;
  return TakesSmall({listed.forward, TilingOf(listed)}, {small->forward, TilingOf(*small)}, p,
                    plans)
             ? *std::move(small)
             : listed;
}

absl::StatusOr<BackwardKernels> ChooseBackward(absl::Span<const KernelRow> rows, const Problem& p,
                                               std::optional<MaskTiles> forced, MaskPlans& plans) {
  ASSIGN_OR_RETURN(BackwardKernels listed, SelectBackward(rows, p));
  if (p.mask == nullptr || forced == MaskTiles::kListed) return listed;
  absl::StatusOr<BackwardKernels> small = SelectBackward(rows, p, MaskTiles::kSmall);
  if (forced == MaskTiles::kSmall) return small;
  if (!small.ok()) return listed;
  return TakesSmall({listed.backward, TilingOf(listed)}, {small->backward, TilingOf(*small)}, p,
                    plans)
             ? *std::move(small)
             : listed;
}

absl::StatusOr<CallMask> ListMask(const Problem& p, const MaskTiling& tiling, bool may_cut,
                                  MaskPlans& plans) {
  CallMask mask;
  if (p.mask == nullptr) return mask;
  ASSIGN_OR_RETURN(mask.compiled, plans.Get(p, OptionsOf(tiling)));
  RETURN_IF_ERROR(CheckMask(*mask.compiled));
  mask.layout = LayOutMask(*mask.compiled, p, tiling);
  if (!may_cut || !MayCut(*mask.compiled, tiling)) return mask;
  const auto whole = plans.Get(WholeOf(p), OptionsOf(tiling));
  if (whole.ok()) mask.cuts = CutsOf(**whole, *mask.compiled, tiling);
  return mask;
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
