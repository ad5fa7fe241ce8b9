// MaskChoice: how the CPU engine goes through the mask of a call, by predicted time.
//   dense    as if there were no mask: it hides nothing
//   listed   tiles that show something, by bits inside them
//   residue  every p-th row with the keys that it sees (attention/residue_classes.h)
// The prediction counts scores and depends on the mask, its extents and the call's options alone:
// so a call chooses alike in any batch, shard and process. Dense and listed give the same bits,
// residue adds up in another order.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "attention/mask_plans.h"
#include "attention/residue_classes.h"

namespace attnd {

enum class CpuMaskKernel : uint8_t { kDense, kListed, kResidue };
absl::string_view NameOf(CpuMaskKernel kernel);

struct MaskChoice {
  CpuMaskKernel kernel = CpuMaskKernel::kDense;
  std::shared_ptr<const CompiledMask> plan;  // listed
  std::optional<ResidueClasses> residues;    // residue
};

// Chooses the kernel for a valid problem with a mask. `forced`, if there, is chosen whatever the
// prediction says, or UNIMPLEMENTED naming it and why it cannot run. OUT_OF_RANGE when lists take
// too long to compile.
absl::StatusOr<MaskChoice> ChooseMaskKernel(const Problem& problem,
                                            std::optional<CpuMaskKernel> forced, MaskPlans& plans);

// Why, with what was predicted: for reports.
std::string ReasonOf(const Problem& problem, const MaskChoice& choice);

// Predicted time for a row, in scores of a dense call: what the choice compares.
double PredictedListed(const Problem& problem, const ResidueForm& form);
double PredictedResidue(const Problem& problem, const ResidueClasses& classes);

}  // namespace attnd
