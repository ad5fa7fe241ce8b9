#include "attention/error_bounds.h"

#include <algorithm>
#include <cmath>

#include "attention/tensor_view.h"

namespace attnd {
namespace {

constexpr double kFloatUnit = 0x1p-24;  // of float32, in which every engine keeps softmax
constexpr double kSlack = 2;

double OutputUnit(ElementType element) {
  switch (element) {
    case ElementType::kFloat16:
      return 0x1p-11;
    case ElementType::kBFloat16:
      return 0x1p-8;
    case ElementType::kFloat32:
      return kFloatUnit;
  }
  return 0;
}

double OutputUnderflow(ElementType element) {
  return element == ElementType::kFloat16 ? 0x1p-25 : 0x1p-125;
}

// Relative error of a sum of n products, to the sum of their magnitudes.
double SumUnit(double count, double unit) { return (2 * std::sqrt(count) + 8) * unit; }

// The same for sums along a row of keys, which the online softmax rescales as its maximum grows.
// Each rescaling rounds once: where a row's maximum grows in every tile, its first terms are
// rounded once a tile.
double RowSumUnit(double keys, double unit) { return SumUnit(keys, unit) + 8 * unit; }

double AbsoluteDot(const double* a, const double* b, int64_t count) {
  double sum = 0;
  for (int64_t d = 0; d < count; ++d) sum += std::fabs(a[d] * b[d]);
  return sum;
}

double SignedDot(const double* a, const double* b, int64_t count) {
  double sum = 0;
  for (int64_t d = 0; d < count; ++d) sum += a[d] * b[d];
  return sum;
}

// RowErrors: the errors of one row's scores, probabilities and lse.
struct RowErrors {
  ReferenceRow row;
  std::vector<double> product;      // of scale·q·k
  std::vector<double> score;        // of the score, rounding of the exponent included
  double lse = 0;                   // of ln Σ exp, before it is stored
  std::vector<double> probability;  // of softmax as forward makes it
};

// RowPlace: one row and the places of its numbers.
struct RowPlace {
  int64_t b, h, i;
  Sequence s;
  int64_t q_row, o_row, lse_index;
};

class Bounder {
 public:
  Bounder(const Reference& reference, const EnginePrecision& precision)
      : reference_(reference), p_(reference.problem()), precision_(precision) {}

  template <class Body>
  void ForEachRow(const Body& body) const {
    for (int64_t b = 0; b < p_.batch; ++b) {
      Sequence s = p_.SequenceAt(b);
      for (int64_t h = 0; h < p_.q_heads; ++h) {
        for (int64_t i = 0; i < s.q_len; ++i) {
          body(PlaceOf(b, h, s, i));
        }
      }
    }
  }

  RowPlace PlaceOf(int64_t b, int64_t h, const Sequence& s, int64_t i) const {
    return {b,
            h,
            i,
            s,
            QueryStrides(p_).Row(b, h, s.q_begin + i),
            OutputStrides(p_).Row(b, h, s.q_begin + i),
            p_.LseIndex(b, h, s, i)};
  }
  int64_t KeyRow(const RowPlace& at, int64_t j) const {
    return KeyStrides(p_).Row(at.b, p_.KvHead(at.h), at.s.kv_begin + j);
  }
  int64_t ValueRow(const RowPlace& at, int64_t j) const {
    return ValueStrides(p_).Row(at.b, p_.KvHead(at.h), at.s.kv_begin + j);
  }

  RowErrors Errors(const RowPlace& at) const {
    RowErrors e{reference_.Row(at.b, at.h, at.s, at.i)};
    int64_t keys = at.s.kv_len;
    e.product.resize(keys);
    e.score.resize(keys);
    e.probability.resize(keys);
    FillScoreErrors(at, e);
    double mean = 0, most = 0;
    for (int64_t j = 0; j < keys; ++j) {
      if (!Counts(e.row, j)) continue;
      mean += e.row.probability[j] * e.score[j];
      most = std::max(most, e.score[j]);
    }
    double higher_order = std::exp(2 * most);
    double sum = RowSumUnit(static_cast<double>(keys), kFloatUnit);
    e.lse = mean * higher_order + sum + 4 * kFloatUnit * std::fabs(e.row.lse);
    for (int64_t j = 0; j < keys; ++j) {
      if (!Counts(e.row, j)) continue;
      double probability = e.row.probability[j];
      double relative = e.score[j] + mean - 2 * probability * e.score[j];
      e.probability[j] = std::min(1.0, probability * (relative * higher_order + sum));
    }
    return e;
  }

  // A score of −infinity has probability 0 whatever is rounded.
  static bool Counts(const ReferenceRow& row, int64_t j) {
    return row.visible[j] && row.score[j] != -INFINITY;
  }

  double FinishOutput(double error, double value) const {
    return kSlack * (error + OutputUnit(p_.element) * std::fabs(value)) +
           OutputUnderflow(p_.element);
  }

 private:
  void FillScoreErrors(const RowPlace& at, RowErrors& e) const {
    const ReferenceRow& row = e.row;
    double dot_unit = SumUnit(static_cast<double>(p_.qk_head_dim), precision_.product_unit);
    double scale = std::fabs(double{p_.ResolvedScale()});
    for (int64_t j = 0; j < at.s.kv_len; ++j) {
      if (!Counts(row, j)) continue;
      double magnitude =
          AbsoluteDot(&reference_.q()[at.q_row], &reference_.k()[KeyRow(at, j)], p_.qk_head_dim);
      e.product[j] = dot_unit * scale * magnitude + 2 * kFloatUnit * std::fabs(row.product[j]);
      double capped = p_.softcap > 0 ? std::min(double{p_.softcap}, std::fabs(row.product[j])) : 0;
      double alibi =
          p_.alibi_slopes.empty()
              ? 0
              : std::fabs(p_.AlibiSlope(at.b, at.h) * static_cast<double>(at.i + at.s.offset - j));
      double terms = std::fabs(row.score[j]) + std::fabs(row.product[j]) + alibi;
      e.score[j] = e.product[j] + 4 * kFloatUnit * (terms + std::fabs(row.lse) + capped + 1);
      if (p_.softcap > 0) e.score[j] += 4 * kFloatUnit * p_.softcap;
    }
  }

  const Reference& reference_;
  const Problem& p_;
  EnginePrecision precision_;
};

}  // namespace

double EnginePrecision::OperandUnit(ElementType element) const {
  switch (element) {
    case ElementType::kFloat16:
      return operand_unit_f16;
    case ElementType::kBFloat16:
      return operand_unit_bf16;
    case ElementType::kFloat32:
      return operand_unit_f32;
  }
  return 0;
}

EnginePrecision EnginePrecision::WithHalfAccumulation() const {
  EnginePrecision precision = *this;
  precision.product_unit = 0x1p-11;
  precision.query_gradient_unit *= 4;
  return precision;
}

ForwardBounds BoundForward(const Reference& reference, const ReferenceOutputs& exact,
                           const EnginePrecision& precision) {
  const Problem& p = reference.problem();
  Bounder bounder(reference, precision);
  ForwardBounds bounds{std::vector<double>(exact.o.size()), std::vector<double>(exact.lse.size())};
  bounder.ForEachRow([&](const RowPlace& at) {
    RowErrors e = bounder.Errors(at);
    bounds.lse[at.lse_index] = kSlack * e.lse;
    double sum_unit = RowSumUnit(static_cast<double>(at.s.kv_len), precision.product_unit) +
                      precision.OperandUnit(p.element);
    for (int64_t j = 0; j < at.s.kv_len; ++j) {
      if (!bounder.Counts(e.row, j)) continue;
      double error = e.row.dropout_scale[j] * (e.probability[j] + sum_unit * e.row.probability[j] +
                                               precision.operand_underflow);
      const double* v = &reference.v()[bounder.ValueRow(at, j)];
      for (int64_t d = 0; d < p.v_head_dim; ++d) bounds.o[at.o_row + d] += error * std::fabs(v[d]);
    }
    for (int64_t d = 0; d < p.v_head_dim; ++d) {
      double& bound = bounds.o[at.o_row + d];
      bound = bounder.FinishOutput(bound, exact.o[at.o_row + d]);
    }
  });
  return bounds;
}

namespace {

// BackwardBounder: adds up each row's share of the errors of all gradients.
class BackwardBounder {
 public:
  BackwardBounder(const Reference& reference, const ReferenceOutputs& exact,
                  const std::vector<double>& d_o, const float* d_lse,
                  const EnginePrecision& precision)
      : reference_(reference),
        p_(reference.problem()),
        exact_(exact),
        forward_(BoundForward(reference, exact, precision)),
        d_o_(d_o),
        d_lse_(d_lse),
        precision_(precision),
        bounder_(reference, precision),
        key_sum_unit_(
            SumUnit(static_cast<double>(p_.q_len * p_.group_size()), precision.product_unit) +
            precision.OperandUnit(p_.element)) {
    ReferenceGradients zeros = reference.EmptyGradients();
    bounds_ = {zeros.d_q, zeros.d_k, zeros.d_v, zeros.d_bias, zeros.d_sink};
  }

  BackwardBounds Run(const ReferenceGradients& gradients) {
    bounder_.ForEachRow([&](const RowPlace& at) { AddRow(at); });
    Finish(gradients.d_q, bounds_.d_q);
    Finish(gradients.d_k, bounds_.d_k);
    Finish(gradients.d_v, bounds_.d_v);
    for (double& bound : bounds_.d_bias) bound = kSlack * bound + 0x1p-125;
    for (double& bound : bounds_.d_sink) bound = kSlack * bound + 0x1p-125;
    return std::move(bounds_);
  }

 private:
  // The value of a number and a bound of its error.
  struct Uncertain {
    double value, error;
  };

  Uncertain Delta(const RowPlace& at) const {
    const double* d_o = &d_o_[at.o_row];
    const double* o = &exact_.o[at.o_row];
    double d_lse = d_lse_ != nullptr ? d_lse_[at.lse_index] : 0;
    double delta = SignedDot(d_o, o, p_.v_head_dim) - d_lse;
    double error = SumUnit(static_cast<double>(p_.v_head_dim), kFloatUnit) *
                       AbsoluteDot(d_o, o, p_.v_head_dim) +
                   AbsoluteDot(d_o, &forward_.o[at.o_row], p_.v_head_dim) / kSlack +
                   2 * kFloatUnit * (std::fabs(delta) + std::fabs(d_lse));
    return {delta, error};
  }

  void AddRow(const RowPlace& at) {
    const bool has_range = p_.element == ElementType::kFloat16 && precision_.gradient_range_f16 > 0;
    if (has_range) OpenTile(at);
    RowErrors e = bounder_.Errors(at);
    if (!e.row.any_visible) return;
    Uncertain delta = Delta(at);
    double to_given = std::exp(e.row.lse - exact_.lse[at.lse_index]);
    for (double& probability : e.row.probability) probability *= to_given;
    double lse_error = e.lse + 4 * kFloatUnit * std::fabs(e.row.lse);
    for (int64_t j = 0; j < at.s.kv_len; ++j) {
      if (bounder_.Counts(e.row, j)) AddScore(at, e, j, delta, lse_error);
    }
    if (precision_.query_gradient_unit > 0) AddRowUnit(at, e);
    if (bounds_.d_sink.empty()) return;
    double logit = p_.sink_logits[at.h];
    double relative = lse_error + 4 * kFloatUnit * (std::fabs(e.row.lse) + std::fabs(logit) + 2) +
                      SumUnit(static_cast<double>(p_.q_len), kFloatUnit);
    bounds_.d_sink[at.b * p_.q_heads + at.h] += std::exp(logit - exact_.lse[at.lse_index]) *
                                                (delta.error + std::fabs(delta.value) * relative);
  }

  // The sizes that the row sees: max‖V‖·Z and max|K|.
  struct SeenSizes {
    double value = 0, key = 0;
  };
  SeenSizes SizesOf(const RowPlace& at, const ReferenceRow& row) const {
    SeenSizes sizes;
    double kept = 0;
    for (int64_t j = 0; j < at.s.kv_len; ++j) {
      if (!bounder_.Counts(row, j)) continue;
      const double* v = &reference_.v()[bounder_.ValueRow(at, j)];
      sizes.value = std::max(sizes.value, SignedDot(v, v, p_.v_head_dim));
      const double* k = &reference_.k()[bounder_.KeyRow(at, j)];
      for (int64_t d = 0; d < p_.qk_head_dim; ++d) sizes.key = std::max(sizes.key, std::fabs(k[d]));
      kept = std::max(kept, row.dropout_scale[j]);
    }
    sizes.value = kept * std::sqrt(sizes.value);
    return sizes;
  }
  // Bounds a row's |dS|.
  double GradientBound(const RowPlace& at, const SeenSizes& seen) const {
    const double* d_o = &d_o_[at.o_row];
    return std::sqrt(SignedDot(d_o, d_o, p_.v_head_dim)) * seen.value + std::fabs(Delta(at).value);
  }
  // Rows are visited in order: that of the tile is known at its first row.
  void OpenTile(const RowPlace& at) {
    constexpr int64_t kTileRows = 64;
    if (at.i % kTileRows != 0) return;
    tile_bound_ = 0;
    for (int64_t i = at.i; i < std::min(at.i + kTileRows, at.s.q_len); ++i) {
      const RowPlace row = bounder_.PlaceOf(at.b, at.h, at.s, i);
      const ReferenceRow scores = reference_.Row(at.b, at.h, at.s, i);
      if (!scores.any_visible) continue;
      tile_bound_ = std::max(tile_bound_, GradientBound(row, SizesOf(row, scores)));
    }
  }
  // dQ as integers.
  void AddRowUnit(const RowPlace& at, const RowErrors& e) {
    constexpr double kTileKeys = 32;  // the smallest tile of any engine
    const SeenSizes seen = SizesOf(at, e.row);
    const double tiles = std::ceil(static_cast<double>(at.s.kv_len) / kTileKeys);
    const double error = SumUnit(tiles, precision_.query_gradient_unit) * GradientBound(at, seen) *
                         seen.key * std::fabs(double{p_.ResolvedScale()});
    for (int64_t d = 0; d < p_.qk_head_dim; ++d) bounds_.d_q[at.q_row + d] += error;
  }

  void AddScore(const RowPlace& at, const RowErrors& e, int64_t j, Uncertain delta,
                double lse_error) {
    double z = e.row.dropout_scale[j];
    const double* d_o = &d_o_[at.o_row];
    int64_t v_row = bounder_.ValueRow(at, j);
    const double* v = &reference_.v()[v_row];
    double p = e.row.probability[j];
    double p_error = p * std::expm1(e.score[j] + lse_error);
    double dv_weight = z * (p_error + p * key_sum_unit_ + precision_.operand_underflow);
    double dp = z * SignedDot(d_o, v, p_.v_head_dim);
    double dp_error = z * AbsoluteDot(d_o, v, p_.v_head_dim) *
                          SumUnit(static_cast<double>(p_.v_head_dim), precision_.product_unit) +
                      kFloatUnit * std::fabs(dp);
    double d_s = p * (dp - delta.value);
    double d_s_error = (p + p_error) * (dp_error + delta.error) +
                       p_error * std::fabs(dp - delta.value) + 4 * kFloatUnit * std::fabs(d_s);
    for (int64_t d = 0; d < p_.v_head_dim; ++d) {
      bounds_.d_v[v_row + d] += dv_weight * std::fabs(d_o[d]);
    }
    if (!bounds_.d_bias.empty()) {
      double count = static_cast<double>(p_.batch * p_.q_heads * p_.q_len * p_.kv_len);
      bounds_.d_bias[BroadcastIndex(p_.bias->shape, at.b, at.h, at.i, j)] +=
          d_s_error + SumUnit(count, kFloatUnit) * std::fabs(d_s);
    }
    AddProducts(at, j, SoftcapStep(e, j, {d_s, d_s_error}));
  }

  Uncertain SoftcapStep(const RowErrors& e, int64_t j, Uncertain d_s) const {
    if (p_.softcap <= 0) return d_s;
    double t = std::tanh(e.row.product[j] / p_.softcap);
    double slope = 1 - t * t;
    double slope_error = 2 * std::fabs(t) * slope * e.product[j] / p_.softcap + 8 * kFloatUnit;
    return {d_s.value * slope, d_s.error * slope + std::fabs(d_s.value) * slope_error};
  }

  void AddProducts(const RowPlace& at, int64_t j, Uncertain d_x) {
    double scale = std::fabs(double{p_.ResolvedScale()});
    int64_t k_row = bounder_.KeyRow(at, j);
    double rounded =
        d_x.error + std::max(precision_.operand_underflow, precision_.gradient_underflow) +
        precision_.gradient_range_f16 * tile_bound_ + 2 * kFloatUnit * std::fabs(d_x.value);
    double row_unit = RowSumUnit(static_cast<double>(at.s.kv_len), precision_.product_unit) +
                      precision_.OperandUnit(p_.element);
    double q_weight = scale * (rounded + row_unit * std::fabs(d_x.value));
    double k_weight = scale * (rounded + key_sum_unit_ * std::fabs(d_x.value));
    for (int64_t d = 0; d < p_.qk_head_dim; ++d) {
      bounds_.d_q[at.q_row + d] += q_weight * std::fabs(reference_.k()[k_row + d]);
      bounds_.d_k[k_row + d] += k_weight * std::fabs(reference_.q()[at.q_row + d]);
    }
  }

  void Finish(const std::vector<double>& values, std::vector<double>& bounds) const {
    for (size_t n = 0; n < bounds.size(); ++n) {
      bounds[n] = bounder_.FinishOutput(bounds[n], values[n]);
    }
  }

  const Reference& reference_;
  const Problem& p_;
  const ReferenceOutputs& exact_;
  ForwardBounds forward_;
  const std::vector<double>& d_o_;
  const float* d_lse_;
  EnginePrecision precision_;
  Bounder bounder_;
  double key_sum_unit_;    // of sums over the rows of a group
  double tile_bound_ = 0;  // of |dS| of the tile of rows, where it matters
  BackwardBounds bounds_;
};

}  // namespace

BackwardBounds BoundBackward(const Reference& reference, const ReferenceOutputs& exact,
                             const ReferenceGradients& gradients, const std::vector<double>& d_o,
                             const float* d_lse, const EnginePrecision& precision) {
  return BackwardBounder(reference, exact, d_o, d_lse, precision).Run(gradients);
}

}  // namespace attnd
