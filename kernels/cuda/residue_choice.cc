#include "kernels/cuda/residue_choice.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "attention/masks/mask_description.h"
#include "base/round_up.h"
#include "base/status_macros.h"

namespace attnd::cuda {
namespace {

// A tile of the forward kernels, about; and what a block costs beside its scores, in keys.
constexpr int64_t kRows = 128, kKeys = 128, kBlockKeys = 192;
// Each class of each batch entry has a descriptor and tensor maps of its own.
constexpr int64_t kMaxPeriod = 512;

// ResidueClassesOf, less what the kernels cannot do.
absl::StatusOr<ResidueClasses> ClassesFor(const Problem& p) {
  ASSIGN_OR_RETURN(const ResidueClasses classes, ResidueClassesOf(p));
  if (p.denominator != DenominatorKind::kSoftmax) {
    return absl::UnimplementedError("problem.denominator: counts what other classes have");
  }
  if (classes.p > kMaxPeriod) {
    return absl::UnimplementedError(
        absl::StrCat("problem.mask: more than ", kMaxPeriod, " classes"));
  }
  return classes;
}

// Keys of `keys` that a tile of rows visits between two diagonals, on average.
int64_t KeysBetween(int64_t keys, int64_t left, int64_t right) {
  if (left < 0 && right < 0) return keys;
  const int64_t before = left < 0 ? keys / 2 : std::min(keys / 2, left);
  const int64_t behind = right < 0 ? keys / 2 : std::min(keys / 2, right);
  return std::min(keys, before + behind + kRows + kKeys);
}

// In scores of a row of a call without a mask.
double PredictedListed(const Problem& p) {
  const ResidueForm form = *ResidueFormOf(p.mask->spec());
  const int64_t span =
      KeysBetween(p.mask->spec().extents.keys, TighterBound(form.left, p.window_left),
                  TighterBound(form.right, p.causal ? 0 : p.window_right));
  // A tile holds kRows + kKeys − 1 diagonals, of which every p-th shows something.
  const double tiles =
      std::min(1.0, static_cast<double>(kRows + kKeys - 1) / static_cast<double>(form.p));
  return static_cast<double>(span) * tiles + kBlockKeys;
}

double PredictedResidue(const Problem& p, const ResidueClasses& classes) {
  const MaskExtents& extents = p.mask->spec().extents;
  const int64_t rows = std::max<int64_t>(1, extents.rows / classes.p);
  const int64_t keys = std::max<int64_t>(1, extents.keys / classes.p);
  const int64_t span =
      RoundUp(KeysBetween(keys, classes.window_left, classes.window_right), kKeys) + kBlockKeys;
  return static_cast<double>(RoundUp(rows, kRows) * span) / static_cast<double>(rows);
}

std::string Percent(const Problem& p, double scores) {
  const double all = static_cast<double>(p.mask->spec().extents.keys) + kBlockKeys;
  return absl::StrFormat("%.3g %%", 100 * scores / all);
}

}  // namespace

absl::StatusOr<std::optional<ResidueClasses>> ChooseClasses(const Problem& p,
                                                            std::optional<MaskWay> forced) {
  std::optional<ResidueClasses> chosen;
  if (p.mask == nullptr || forced.value_or(MaskWay::kResidue) != MaskWay::kResidue) return chosen;
  const absl::StatusOr<ResidueClasses> classes = ClassesFor(p);
  if (!classes.ok() && forced) {
    return absl::UnimplementedError(absl::StrCat("kernel residue: ", classes.status().message()));
  }
  if (classes.ok() && (forced || PredictedResidue(p, *classes) < PredictedListed(p))) {
    chosen = *classes;
  }
  return chosen;
}

Problem ProblemOfClasses(const Problem& p, const ResidueClasses& classes) {
  Problem own = p;
  own.mask = nullptr;
  own.mask_share = 1;
  own.causal = false;
  own.window_left = classes.window_left;
  own.window_right = classes.window_right;
  return own;
}

std::string ReasonOf(const Problem& p, const std::optional<ResidueClasses>& chosen,
                     absl::string_view of_lists) {
  if (chosen) {
    return absl::StrCat(
        "rows of one residue together: predicted ", Percent(p, PredictedResidue(p, *chosen)),
        " of the time without a mask, by lists of tiles ", Percent(p, PredictedListed(p)));
  }
  std::string reason(of_lists);
  if (p.mask == nullptr || !ResidueFormOf(p.mask->spec())) return reason;
  const absl::StatusOr<ResidueClasses> classes = ClassesFor(p);
  absl::StrAppend(&reason, "; not by residues, ",
                  classes.ok() ? "predicted to take longer" : classes.status().message());
  return reason;
}

}  // namespace attnd::cuda
