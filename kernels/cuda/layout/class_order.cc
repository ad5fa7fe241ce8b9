#include "kernels/cuda/layout/class_order.h"

#include <algorithm>

namespace attnd::cuda {
namespace {

// Calls visit(index as the caller has it, index by classes) for each row.
template <class Visit>
void ForEachClassRow(const Problem& p, int64_t period, const Visit& visit) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = p.SequenceAt(b);
    for (int64_t h = 0; h < p.q_heads; ++h) {
      const int64_t first = p.LseIndex(b, h, s, 0);
      int64_t at = 0;
      for (int64_t residue = 0; residue < std::min(period, s.q_len); ++residue) {
        for (int64_t row = residue; row < s.q_len; row += period) visit(first + row, first + at++);
      }
    }
  }
}

}  // namespace

int64_t RowsBefore(int64_t length, int64_t p, int64_t residue) {
  return residue * (length / p) + std::min(residue, length % p);
}

void ToClassOrder(const Problem& p, const ResidueClasses& classes, const float* in, float* out) {
  ForEachClassRow(p, classes.p, [&](int64_t row, int64_t at) { out[at] = in[row]; });
}

void FromClassOrder(const Problem& p, const ResidueClasses& classes, const float* in, float* out) {
  ForEachClassRow(p, classes.p, [&](int64_t row, int64_t at) { out[row] = in[at]; });
}

}  // namespace attnd::cuda
