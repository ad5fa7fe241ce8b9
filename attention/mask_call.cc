#include "attention/mask_call.h"

#include <algorithm>

namespace attnd {

static_assert(kMaxMaskLength == kMaxLength && kMaxMaskBatch == kMaxBatch &&
              kMaxMaskHeads == kMaxHeads);

MaskCall MaskCallOf(const Problem& problem) {
  MaskCall call = {
      problem.batch, problem.q_heads, problem.MaxQueryLength(), problem.MaxKeyLength(), {}};
  for (int64_t b = 0; b < problem.batch; ++b) call.offsets.push_back(problem.SequenceAt(b).offset);
  const auto differs = [&](int64_t offset) { return offset != call.offsets[0]; };
  if (std::none_of(call.offsets.begin(), call.offsets.end(), differs)) call.offsets.resize(1);
  return call;
}

}  // namespace attnd
