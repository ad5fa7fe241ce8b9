#include "kernels/layers/cpu/rotary_rows.h"

#include <cmath>

namespace attnd {
namespace {

struct Angle {
  float cosine, sine;
};

void FindAngles(const Rotary& rotary, TurnDirection direction, uint32_t position, Angle* angles) {
  for (size_t n = 0; n < rotary.inverse_frequency.size(); ++n) {
    const float angle = static_cast<float>(position) * rotary.inverse_frequency[n];
    const double factor = rotary.attention_factor;
    const auto sine = static_cast<float>(factor * std::sin(double{angle}));
    angles[n] = {static_cast<float>(factor * std::cos(double{angle})),
                 direction == TurnDirection::kForward ? sine : -sine};
  }
}

void TurnHead(const Rotary& rotary, const Angle* angles, const Tensor& heads, int64_t begin) {
  const auto count = static_cast<int64_t>(rotary.inverse_frequency.size());
  for (int64_t n = 0; n < count; ++n) {
    const int64_t first = begin + (rotary.interleaved ? 2 * n : n);
    const int64_t second = rotary.interleaved ? first + 1 : first + count;
    const float a = LoadElement(heads.element, heads.data, first);
    const float b = LoadElement(heads.element, heads.data, second);
    const auto [c, s] = angles[n];
    StoreElement(heads.element, heads.data, first, a * c - b * s);
    StoreElement(heads.element, heads.data, second, b * c + a * s);
  }
}

}  // namespace

void TurnRows(const Rotary& rotary, TurnDirection direction, const RotaryHeads& heads,
              IndexRange rows) {
  Angle angles[kMaxRotaryFrequencies];
  for (int64_t row = rows.first; row < rows.first + rows.count; ++row) {
    FindAngles(rotary, direction, (*heads.positions)[row], angles);
    for (int64_t head = 0; head < heads.head_count; ++head) {
      TurnHead(rotary, angles, heads.heads, (row * heads.head_count + head) * heads.dim);
    }
  }
}

}  // namespace attnd
