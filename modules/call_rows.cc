#include "modules/call_rows.h"

#include "base/check.h"

namespace attnd {
namespace {

// Those of `count` sequences of `each`, from the `first` on; empty where there are none.
template <class T>
std::vector<T> PartOf(const std::vector<T>& all, int64_t first, int64_t count, int64_t each) {
  if (all.empty()) return {};
  return {all.begin() + first * each, all.begin() + (first + count) * each};
}

}  // namespace

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

CallRows CallRows::Sequences(int64_t first, int64_t count) const {
  CHECK(!is_packed() && first >= 0 && first + count <= batch) << first << " " << count;
  CallRows part = *this;
  part.batch = count;
  part.first_sequence += first;
  part.first_row += first * length;
  part.kv_lengths = PartOf(kv_lengths, first, count, 1);
  part.memory_kv_lengths = PartOf(memory_kv_lengths, first, count, 1);
  part.positions = PartOf(positions, first, count, length);
  if (bool_mask.has_value() && bool_mask->shape.batch > 1) part.bool_mask->shape.batch = count;
  return part;
}

}  // namespace attnd
