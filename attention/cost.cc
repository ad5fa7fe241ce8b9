#include "attention/cost.h"

#include <algorithm>

namespace attnd {
namespace {

// Σ of clamp(first + n, 0, most) over n in [0, count): a stretch of zeros, a ramp and a plateau.
int64_t SumOfClamped(int64_t first, int64_t count, int64_t most) {
  int64_t zeros = std::clamp<int64_t>(-first, 0, count);
  int64_t ramp_end = std::clamp<int64_t>(most - first, zeros, count);
  int64_t ramp = ramp_end - zeros;
  int64_t ramp_first = first + zeros;
  return ramp * ramp_first + ramp * (ramp - 1) / 2 + (count - ramp_end) * most;
}

// Row i sees [clamp(i + offset − left), clamp(i + offset + right + 1)), both clamped to 0..kv_len,
// where an absent bound is 0 or kv_len; the sums over rows of both ends have closed forms.
int64_t PairsOfSequence(const Problem& p, const Sequence& s) {
  int64_t ends = s.q_len * s.kv_len, begins = 0;
  if (p.causal || p.window_right >= 0) {
    int64_t right = p.causal ? 0 : p.window_right;
    ends = SumOfClamped(s.offset + right + 1, s.q_len, s.kv_len);
  }
  if (p.window_left >= 0) begins = SumOfClamped(s.offset - p.window_left, s.q_len, s.kv_len);
  return ends - begins;
}

}  // namespace

int64_t VisiblePairs(const Problem& p) {
  int64_t pairs = 0;
  for (int64_t b = 0; b < p.batch; ++b) pairs += PairsOfSequence(p, p.SequenceAt(b));
  const int64_t all = pairs * p.q_heads;
  return p.mask == nullptr ? all : static_cast<int64_t>(p.mask_share * static_cast<double>(all));
}

double ScoreFlops(const Problem& p, Direction direction) {
  const double forward = 2.0 * static_cast<double>(p.qk_head_dim + p.v_head_dim);
  return direction == Direction::kForward ? forward : 2.5 * forward;
}

double Flops(const Problem& p, Direction direction) {
  return static_cast<double>(VisiblePairs(p)) * ScoreFlops(p, direction);
}

PayloadBytes BytesOf(const Problem& p, Direction direction) {
  int64_t element = ElementBytes(p.element);
  int64_t q = p.QueryElements() * element, k = p.KeyElements() * element,
          v = p.ValueElements() * element;
  int64_t o = p.OutputElements() * element, lse = p.LseElements() * int64_t{sizeof(float)};
  int64_t extra = p.bool_mask ? p.bool_mask->bytes() : 0;
  if (p.bias) extra += p.bias->shape.elements() * ElementBytes(p.bias->element);
  if (direction == Direction::kForward) return {q + k + v + extra, o + lse};
  int64_t d_bias =
      p.bias && p.bias->want_gradient ? p.bias->shape.elements() * int64_t{sizeof(float)} : 0;
  int64_t d_sink =
      p.denominator == DenominatorKind::kSink ? p.batch * p.q_heads * int64_t{sizeof(float)} : 0;
  return {q + k + v + extra + 2 * o + 2 * lse, q + k + v + d_bias + d_sink};
}

}  // namespace attnd
