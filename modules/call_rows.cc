#include "modules/call_rows.h"

namespace attnd {

std::vector<uint32_t> CallRows::ResolvedPositions() const {
  if (!positions.empty()) return positions;
  std::vector<uint32_t> resolved;
  resolved.reserve(rows());
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t count = is_packed() ? cu_seqlens[b + 1] - cu_seqlens[b] : length;
    for (int64_t n = 0; n < count; ++n) resolved.push_back(static_cast<uint32_t>(n));
  }
  return resolved;
}

}  // namespace attnd
