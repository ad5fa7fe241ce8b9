// Descriptors: the parts that each call is cut into and what the kernels read of them
// (kernels/rules/params.h).
//
// A part is what one ProblemDesc describes: a whole call, or of what is converted one (batch
// entry, KV head), because each of those has powers of two of its own (staging.h). Pure functions;
// any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/problem.h"
#include "kernels/engine/layout/launch_layout.h"
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
};

// What is not converted: the call itself. What travels as halves, beside float16: its (batch entry
// or sequence, KV head) pairs, exponents 0; where a bias gradient sums over entries or heads, the
// call itself again, with common exponents.
std::vector<Part> PartsOf(const Problem& problem, int call, Travel travel = Travel::kAsHalves);

SequenceDesc DescribeSequence(const Problem& problem, int64_t batch_index);
// What the sequences' region holds: one for each batch entry or sequence of the call, as the
// kernels of PartsOf read them.
std::vector<SequenceDesc> SequencesOf(const Problem& problem, Travel travel = Travel::kAsHalves);

// `arena` is the arena's device address.
ProblemDesc Describe(const CallLayout& layout, const Part& part, uint64_t arena);
// What tensor map `map` (MapOf) of this part says, whose description is `desc`.
RowsBox BoxOf(const Problem& problem, const ProblemDesc& desc, int map, int box_rows);

}  // namespace attnd::cuda
