#include "kernels/cpu/mask_choice.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "attention/masks/mask_description.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

// A class costs this beside its scores, and each of its keys this, in scores: bringing rows and
// keys together, packing K, the item itself. A product has at least kLeastRows rows.
constexpr double kClassScores = 1000, kKeyScores = 12, kLeastRows = 6;
constexpr double kTile = kHostMaskTile.keys;

// Keys that a row sees between two diagonals, on average.
double KeysBetween(double keys, int64_t left, int64_t right) {
  const double before = left < 0 ? keys / 2 : std::min(keys / 2, static_cast<double>(left));
  const double behind = right < 0 ? keys / 2 : std::min(keys / 2, static_cast<double>(right));
  return std::min(keys, before + behind + 1);
}

absl::Status Unable(CpuMaskKernel kernel, absl::string_view why) {
  return absl::UnimplementedError(absl::StrCat("kernel ", NameOf(kernel), ": ", why));
}

bool HidesNothing(const CompiledMask& compiled) {
  return std::all_of(compiled.plans().begin(), compiled.plans().end(),
                     [](const MaskPlan& plan) { return plan.visible == plan.rows * plan.keys; });
}

std::string Percent(double share) { return absl::StrFormat("%.3g %%", 100 * share); }

}  // namespace

absl::string_view NameOf(CpuMaskKernel kernel) {
  switch (kernel) {
    case CpuMaskKernel::kDense:
      return "dense";
    case CpuMaskKernel::kListed:
      return "listed";
    case CpuMaskKernel::kResidue:
      return "residue";
  }
  return "";
}

double PredictedListed(const Problem& p, const ResidueForm& form) {
  const auto keys = static_cast<double>(p.mask->spec().extents.keys);
  const double span = KeysBetween(keys, TighterBound(form.left, p.window_left),
                                  TighterBound(form.right, p.causal ? 0 : p.window_right));
  // A tile of 64 × 64 holds 127 diagonals, of which every p-th shows something.
  const double tiles = std::min(1.0, (2 * kTile - 1) / static_cast<double>(form.p));
  return std::min(keys, span + kTile) * tiles;
}

double PredictedResidue(const Problem& p, const ResidueClasses& classes) {
  const MaskExtents& extents = p.mask->spec().extents;
  const auto step = static_cast<double>(classes.p);
  const double rows = std::max(1.0, static_cast<double>(extents.rows) / step);
  const double keys = std::max(1.0, static_cast<double>(extents.keys) / step);
  const double span = KeysBetween(keys, classes.window_left, classes.window_right);
  const bool bounded = classes.window_left >= 0 || classes.window_right >= 0;
  const double seen = std::min(keys, bounded ? span + kTile : span);
  return (std::max(rows, kLeastRows) * seen + kKeyScores * keys + kClassScores) / rows;
}

absl::StatusOr<MaskChoice> ChooseMaskKernel(const Problem& p, std::optional<CpuMaskKernel> forced,
                                            MaskPlans& plans) {
  const absl::StatusOr<ResidueClasses> classes = ResidueClassesOf(p);
  const bool faster = classes.ok() && PredictedResidue(p, *classes) <
                                          PredictedListed(p, *ResidueFormOf(p.mask->spec()));
  if (forced ? *forced == CpuMaskKernel::kResidue : faster) {
    if (!classes.ok()) return Unable(CpuMaskKernel::kResidue, classes.status().message());
    return MaskChoice{CpuMaskKernel::kResidue, nullptr, *classes};
  }
  ASSIGN_OR_RETURN(std::shared_ptr<const CompiledMask> plan, plans.Get(p, HostMaskOptions()));
  const bool hides = !HidesNothing(*plan);
  if (forced == CpuMaskKernel::kDense && hides) return Unable(*forced, "the mask hides scores");
  if (!hides && forced != CpuMaskKernel::kListed) return MaskChoice{};
  return MaskChoice{CpuMaskKernel::kListed, std::move(plan), std::nullopt};
}

std::string ReasonOf(const Problem& p, const MaskChoice& choice) {
  if (choice.kernel == CpuMaskKernel::kDense) return "the mask hides nothing";
  const std::optional<ResidueForm> form = ResidueFormOf(p.mask->spec());
  const double all = static_cast<double>(p.mask->spec().extents.keys);
  if (choice.residues) {
    return absl::StrCat("rows of one residue together: predicted ",
                        Percent(PredictedResidue(p, *choice.residues) / all),
                        " of the time without a mask, by lists of tiles ",
                        Percent(PredictedListed(p, *form) / all));
  }
  std::string reason = absl::StrCat("lists of tiles: ", Percent(VisitedShare(*choice.plan, p)),
                                    " of the scores are visited");
  if (form) {
    const absl::StatusOr<ResidueClasses> classes = ResidueClassesOf(p);
    absl::StrAppend(&reason, "; not by residues, ",
                    classes.ok() ? "predicted to take longer" : classes.status().message());
  }
  return reason;
}

}  // namespace attnd
