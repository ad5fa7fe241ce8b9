#include "attention/mask_call.h"

#include <algorithm>

namespace attnd {

MaskCall MaskCallOf(const Problem& p) {
  MaskCall call{.batch = p.batch,
                .q_heads = p.q_heads,
                .rows = p.MaxQueryLength(),
                .keys = p.MaxKeyLength(),
                .offsets = {}};
  for (int64_t b = 0; b < p.batch; ++b) call.offsets.push_back(p.SequenceAt(b).offset);
  const bool one = std::all_of(call.offsets.begin(), call.offsets.end(),
                               [&](int64_t offset) { return offset == call.offsets[0]; });
  if (one) call.offsets.resize(1);
  return call;
}

}  // namespace attnd
