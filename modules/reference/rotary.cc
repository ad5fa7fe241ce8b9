#include "modules/reference/rotary.h"

#include <cmath>

namespace attnd {
namespace {

struct Pair {
  int64_t first, second;  // dims
};

Pair PairOf(const Rotary& rotary, int64_t n) {
  const int64_t count = static_cast<int64_t>(rotary.inverse_frequency.size());
  return rotary.interleaved ? Pair{2 * n, 2 * n + 1} : Pair{n, n + count};
}

}  // namespace

Numbers ApplyRotary(const Rotary& rotary, Turn turn, const std::vector<uint32_t>& positions,
                    int64_t head_count, int64_t dim, Numbers heads, const Rounder& round) {
  const int64_t count = static_cast<int64_t>(rotary.inverse_frequency.size());
  for (size_t row = 0; row < positions.size(); ++row) {
    for (int64_t n = 0; n < count; ++n) {
      const float angle = static_cast<float>(positions[row]) * rotary.inverse_frequency[n];
      const double factor = rotary.attention_factor;
      const double c = round.To(ElementType::kFloat32, factor * std::cos(double{angle}));
      double s = round.To(ElementType::kFloat32, factor * std::sin(double{angle}));
      if (turn == Turn::kBackward) s = -s;
      const Pair pair = PairOf(rotary, n);
      for (int64_t head = 0; head < head_count; ++head) {
        double* at = &heads[(static_cast<int64_t>(row) * head_count + head) * dim];
        const double a = at[pair.first], b = at[pair.second];
        at[pair.first] = a * c - b * s;
        at[pair.second] = b * c + a * s;
      }
    }
  }
  return heads;
}

}  // namespace attnd
