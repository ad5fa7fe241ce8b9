#include "attention/cost.h"

namespace attnd {
namespace {

int64_t PairsOfSequence(const Problem& p, const Sequence& s) {
  if (!p.IsBounded()) return s.q_len * s.kv_len;
  int64_t pairs = 0;
  for (int64_t row = 0; row < s.q_len; ++row) {
    KeyRange keys = p.VisibleRange(s, row);
    pairs += keys.end - keys.begin;
  }
  return pairs;
}

}  // namespace

int64_t VisiblePairs(const Problem& p) {
  int64_t pairs = 0;
  for (int64_t b = 0; b < p.batch; ++b) pairs += PairsOfSequence(p, p.SequenceAt(b));
  return pairs * p.q_heads;
}

double Flops(const Problem& p, Direction direction) {
  double forward = 2.0 * static_cast<double>(VisiblePairs(p)) *
                   static_cast<double>(p.qk_head_dim + p.v_head_dim);
  return direction == Direction::kForward ? forward : 2.5 * forward;
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
