#include "attention/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "attention/dropout.h"
#include "attention/masks/mask_description.h"
#include "attention/problem.h"
#include "attention/tensor_view.h"

namespace attnd {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double Dot(const double* a, const double* b, int64_t count) {
  double sum = 0;
  for (int64_t d = 0; d < count; ++d) sum += a[d] * b[d];
  return sum;
}

void AddScaled(double factor, const double* from, int64_t count, double* to) {
  for (int64_t d = 0; d < count; ++d) to[d] += factor * from[d];
}

}  // namespace

std::vector<double> ToDoubles(ElementType element, const void* data, int64_t count) {
  std::vector<double> values(count);
  for (int64_t n = 0; n < count; ++n) values[n] = LoadElement(element, data, n);
  return values;
}

Reference::Reference(const Problem& problem, const ReferenceTensors& tensors)
    : Reference(problem, tensors, ToDoubles(problem.element, tensors.q, problem.QueryElements()),
                ToDoubles(problem.element, tensors.k, problem.KeyElements()),
                ToDoubles(problem.element, tensors.v, problem.ValueElements())) {}

Reference::Reference(const Problem& problem, const ReferenceTensors& tensors, std::vector<double> q,
                     std::vector<double> k, std::vector<double> v)
    : problem_(problem), tensors_(tensors), q_(std::move(q)), k_(std::move(k)), v_(std::move(v)) {
  if (problem.mask == nullptr) return;
  mask_spec_ = problem.mask->spec();
  mask_spec_.origin = problem.mask_origin;
  mask_call_ = MaskCallOf(problem);
  mask_.emplace(mask_spec_, mask_call_);
}

double Reference::BiasAt(int64_t b, int64_t h, int64_t i, int64_t j) const {
  if (!problem_.bias) return 0;
  int64_t index = BroadcastIndex(problem_.bias->shape, b, h, i, j);
  return LoadElement(problem_.bias->element, tensors_.bias, index);
}

bool Reference::IsVisible(int64_t b, int64_t h, const Sequence& s, int64_t i, int64_t j) const {
  const Problem& p = problem_;
  int64_t diagonal = i + s.offset;
  if (p.causal && j > diagonal) return false;
  if (p.window_left >= 0 && j < diagonal - p.window_left) return false;
  if (p.window_right >= 0 && j > diagonal + p.window_right) return false;
  if (mask_.has_value() && !mask_->IsVisible(b, h, i, j)) return false;
  if (p.bool_mask && !MaskBit(*p.bool_mask, tensors_.mask_bits, b, h, i, j)) return false;
  return BiasAt(b, h, i, j) != -kInfinity;
}

void Reference::FillScores(int64_t b, int64_t h, const Sequence& s, int64_t i,
                           ReferenceRow& row) const {
  const Problem& p = problem_;
  const double* q = &q_[QueryStrides(p).Row(b, h, s.q_begin + i)];
  for (int64_t j = 0; j < s.kv_len; ++j) {
    row.visible[j] = IsVisible(b, h, s, i, j);
    if (!row.visible[j]) continue;
    row.any_visible = true;
    const double* k = &k_[KeyStrides(p).Row(b, p.KvHead(h), s.kv_begin + j)];
    double product = double{p.ResolvedScale()} * Dot(q, k, p.qk_head_dim);
    double score = p.softcap > 0 ? p.softcap * std::tanh(product / p.softcap) : product;
    score += BiasAt(b, h, i, j);
    if (!p.alibi_slopes.empty()) {
      score -= double{p.AlibiSlope(b, h)} * static_cast<double>(std::abs(i + s.offset - j));
    }
    row.product[j] = product;
    row.score[j] = score;
  }
}

// Σ visible exp(score − most) + what the denominator adds. NaN when a score is NaN or +infinity, or
// when all of a plain softmax's scores are −infinity.
Reference::Denominator Reference::DenominatorOf(int64_t h, const ReferenceRow& row) const {
  double extra_logit = -kInfinity, extra_count = 0;
  int64_t visible = std::count(row.visible.begin(), row.visible.end(), true);
  if (problem_.denominator == DenominatorKind::kZeroRest) {
    extra_count = static_cast<double>(static_cast<int64_t>(row.visible.size()) - visible);
    if (extra_count > 0) extra_logit = 0;
  } else if (problem_.denominator == DenominatorKind::kSink) {
    extra_count = 1;
    extra_logit = problem_.sink_logits[h];
  }
  double most = extra_logit;
  for (size_t j = 0; j < row.visible.size(); ++j) {
    if (row.visible[j]) most = std::fmax(most, row.score[j]);
  }
  double sum = extra_count > 0 ? extra_count * std::exp(extra_logit - most) : 0;
  for (size_t j = 0; j < row.visible.size(); ++j) {
    if (row.visible[j]) sum += std::exp(row.score[j] - most);
  }
  return {most, sum};
}

ReferenceRow Reference::Row(int64_t b, int64_t h, const Sequence& s, int64_t i) const {
  ReferenceRow row;
  row.visible.resize(s.kv_len);
  row.product.resize(s.kv_len);
  row.score.resize(s.kv_len);
  row.probability.resize(s.kv_len);
  row.dropout_scale.resize(s.kv_len);
  FillScores(b, h, s, i, row);
  const Denominator under = row.any_visible ? DenominatorOf(h, row) : Denominator{-kInfinity, 1};
  row.lse = under.most + std::log(under.sum);
  const Dropout& dropout = problem_.dropout;
  DropoutStream stream =
      MakeDropoutStream(dropout.seed, dropout.offset, problem_.DropoutHeadIndex(b, h));
  double kept = 256.0 / (256.0 - dropout.threshold);
  for (int64_t j = 0; j < s.kv_len; ++j) {
    if (!row.visible[j]) continue;
    row.probability[j] = std::exp(row.score[j] - under.most) / under.sum;
    bool drop = dropout.threshold > 0 && DropoutByte(stream, static_cast<uint32_t>(i),
                                                     static_cast<uint32_t>(j)) < dropout.threshold;
    row.dropout_scale[j] = drop ? 0 : kept;
  }
  return row;
}

ReferenceOutputs Reference::EmptyOutputs() const {
  return {std::vector<double>(problem_.OutputElements()),
          std::vector<double>(problem_.LseElements(), -kInfinity)};
}

void Reference::ForwardHead(int64_t b, int64_t h, ReferenceOutputs& out) const {
  const Problem& p = problem_;
  Sequence s = p.SequenceAt(b);
  for (int64_t i = 0; i < s.q_len; ++i) {
    ReferenceRow row = Row(b, h, s, i);
    out.lse[p.LseIndex(b, h, s, i)] = row.lse;
    double* o = &out.o[OutputStrides(p).Row(b, h, s.q_begin + i)];
    for (int64_t j = 0; j < s.kv_len; ++j) {
      if (!row.visible[j]) continue;
      const double* v = &v_[ValueStrides(p).Row(b, p.KvHead(h), s.kv_begin + j)];
      AddScaled(row.probability[j] * row.dropout_scale[j], v, p.v_head_dim, o);
    }
  }
}

ReferenceOutputs Reference::Forward() const {
  ReferenceOutputs out = EmptyOutputs();
  for (int64_t b = 0; b < problem_.batch; ++b) {
    for (int64_t h = 0; h < problem_.q_heads; ++h) ForwardHead(b, h, out);
  }
  return out;
}

ReferenceGradients Reference::EmptyGradients() const {
  const Problem& p = problem_;
  ReferenceGradients g;
  g.d_q.resize(p.QueryElements());
  g.d_k.resize(p.KeyElements());
  g.d_v.resize(p.ValueElements());
  if (p.bias && p.bias->want_gradient) g.d_bias.resize(p.bias->shape.elements());
  if (p.denominator == DenominatorKind::kSink) g.d_sink.resize(p.batch * p.q_heads);
  return g;
}

// With X the value before softcap, S the score, Z the dropout scale and P = exp(S − lse):
//   dP = Z·(dO·V)   delta = dO·O − dlse   dS = P·(dP − delta)   dX = dS·(1 − tanh²(X/c))
//   dQ = scale·dX·K   dK = scale·dX·Q   dV = P·Z·dO   dbias = dS   dsink = −exp(logit − lse)·delta
void Reference::BackwardRow(int64_t b, int64_t h, const Sequence& s, int64_t i,
                            const std::vector<double>& d_o_all, const float* d_lse,
                            const ReferenceOutputs* given, ReferenceGradients& g) const {
  const Problem& p = problem_;
  ReferenceRow row = Row(b, h, s, i);
  if (!row.any_visible) return;
  int64_t lse_index = p.LseIndex(b, h, s, i);
  int64_t o_row = OutputStrides(p).Row(b, h, s.q_begin + i);
  int64_t q_row = QueryStrides(p).Row(b, h, s.q_begin + i);
  const double* d_o = &d_o_all[o_row];
  std::vector<double> d_p(s.kv_len);
  double delta = 0;
  if (given != nullptr) {
    row.lse = given->lse[lse_index];
    delta = Dot(d_o, &given->o[o_row], p.v_head_dim);
  }
  for (int64_t j = 0; j < s.kv_len; ++j) {
    if (!row.visible[j]) continue;
    int64_t v_row = ValueStrides(p).Row(b, p.KvHead(h), s.kv_begin + j);
    if (given != nullptr) row.probability[j] = std::exp(row.score[j] - row.lse);
    d_p[j] = row.dropout_scale[j] * Dot(d_o, &v_[v_row], p.v_head_dim);
    if (given == nullptr) delta += row.probability[j] * d_p[j];  // = dO·O
    AddScaled(row.probability[j] * row.dropout_scale[j], d_o, p.v_head_dim, &g.d_v[v_row]);
  }
  if (d_lse != nullptr) delta -= d_lse[lse_index];
  for (int64_t j = 0; j < s.kv_len; ++j) {
    if (!row.visible[j]) continue;
    double d_s = row.probability[j] * (d_p[j] - delta);
    if (!g.d_bias.empty()) g.d_bias[BroadcastIndex(p.bias->shape, b, h, i, j)] += d_s;
    double t = p.softcap > 0 ? std::tanh(row.product[j] / p.softcap) : 0;
    double d_x = double{p.ResolvedScale()} * d_s * (1 - t * t);
    int64_t k_row = KeyStrides(p).Row(b, p.KvHead(h), s.kv_begin + j);
    AddScaled(d_x, &k_[k_row], p.qk_head_dim, &g.d_q[q_row]);
    AddScaled(d_x, &q_[q_row], p.qk_head_dim, &g.d_k[k_row]);
  }
  if (!g.d_sink.empty()) {
    g.d_sink[b * p.q_heads + h] -= std::exp(p.sink_logits[h] - row.lse) * delta;
  }
}

void Reference::BackwardHead(int64_t b, int64_t h, const std::vector<double>& d_o,
                             const float* d_lse, const ReferenceOutputs* given,
                             ReferenceGradients& g) const {
  Sequence s = problem_.SequenceAt(b);
  for (int64_t i = 0; i < s.q_len; ++i) BackwardRow(b, h, s, i, d_o, d_lse, given, g);
}

ReferenceGradients Reference::Backward(const void* d_o, const float* d_lse,
                                       const ReferenceOutputs* given) const {
  std::vector<double> d_out = ToDoubles(problem_.element, d_o, problem_.OutputElements());
  ReferenceGradients g = EmptyGradients();
  for (int64_t b = 0; b < problem_.batch; ++b) {
    for (int64_t h = 0; h < problem_.q_heads; ++h) BackwardHead(b, h, d_out, d_lse, given, g);
  }
  return g;
}

}  // namespace attnd
