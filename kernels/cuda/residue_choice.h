// ResidueChoice: whether the cuda engine goes through the mask of a call by lists of tiles or, a
// strided or dilated one, by residue classes (attention/residue_classes.h), by predicted time.
//
// A class is a part of a launch of its own (layout/descriptors.h): a problem without a mask whose
// rows are every p-th row of the same tensors, so the kernels are those of calls without a mask.
// Sums have the order of its tiles. The prediction counts scores that tiles visit and depends on
// the mask, its extents and the call's options alone: a call chooses alike in any batch and shard,
// and for both directions. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/problem.h"
#include "attention/residue_classes.h"

namespace attnd::cuda {

// By tiles of the usual blocks, by small ones (mask_choice.h), by classes.
enum class MaskWay : uint8_t { kListed, kSmall, kResidue };

// Chooses a valid problem's classes, or none where it goes by lists or has no mask. `forced`, if
// there, is chosen whatever the prediction says; UNIMPLEMENTED naming it and why it cannot run.
absl::StatusOr<std::optional<ResidueClasses>> ChooseClasses(const Problem& problem,
                                                            std::optional<MaskWay> forced);

// The problem that all of its classes share: without the mask, with a window of the classes.
Problem ProblemOfClasses(const Problem& problem, const ResidueClasses& classes);

// Why this way, with what was predicted: for reports. `of_lists`: why these tiles, where it is by
// lists.
std::string ReasonOf(const Problem& problem, const std::optional<ResidueClasses>& chosen,
                     absl::string_view of_lists);

}  // namespace attnd::cuda
