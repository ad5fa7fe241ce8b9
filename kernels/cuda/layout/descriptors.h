// Descriptors: the parts that each call is cut into and what the kernels read of them
// (kernels/rules/params.h).
//
// A part is what one ProblemDesc describes: a whole call, or of what is converted one (batch
// entry, KV head), because each of those has powers of two of its own (staging.h). Pure functions;
// any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/problem.h"
#include "attention/residue_classes.h"
#include "kernels/cuda/layout/launch_layout.h"
#include "kernels/rules/params.h"

namespace attnd::cuda {

// The powers of two that a part's tensors were divided by; 0 in float16. kept_v: what a forward's
// V and O are divided by for backward.
struct Exponents {
  int q = 0, k = 0, v = 0, d_o = 0, kept_v = 0;
};

struct Part {
  int call = 0;  // index in the launch
  int64_t batch_begin = 0, batches = 0;
  int64_t kv_head_begin = 0, kv_heads = 0;
  Exponents exponents;
  // Limits the part to the rows and keys of one residue; absent: all of them. Parts of one entry
  // and head stand side by side, residue 0 first, and share their exponents.
  std::optional<ResidueClasses> classes;
  int64_t residue = 0;
};

// Cuts a call into parts. A call that is not converted is one part. A call that travels as halves,
// other than of float16, has a part for each (batch entry or sequence, KV head), with exponents 0;
// where a bias gradient sums over entries or heads it is one part, with common exponents. By
// classes: a part for each class of each batch entry.
std::vector<Part> PartsOf(const Problem& problem, int call, Travel travel = Travel::kAsHalves,
                          const std::optional<ResidueClasses>& classes = std::nullopt);

// Describes batch entry (sequence) `entry` of the part.
SequenceDesc DescribeSequence(const Problem& problem, const Part& part, int64_t entry);
// Fills the sequences' region: one for each batch entry or sequence of the call, as the kernels of
// PartsOf read them.
std::vector<SequenceDesc> SequencesOf(const Problem& problem, Travel travel = Travel::kAsHalves,
                                      const std::optional<ResidueClasses>& classes = std::nullopt);

// BiasElementCode of an element.
int32_t BiasCode(ElementType element);

// `arena` is the arena's device address.
ProblemDesc Describe(const CallLayout& layout, const Part& part, uint64_t arena);
// Describes tensor map `map` (MapOf) of this part, whose description is `desc`.
RowsBox BoxOf(const Problem& problem, const Part& part, const ProblemDesc& desc, int map,
              int box_rows);

}  // namespace attnd::cuda
