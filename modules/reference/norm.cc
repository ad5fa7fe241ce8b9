#include "modules/reference/norm.h"

#include <cmath>

#include "modules/reference/gradient_sums.h"

namespace attnd {
namespace {

struct Statistics {
  double mean, rstd;
};

Statistics StatisticsOf(const NormRule& rule, int64_t count, const double* x) {
  double mean = 0, square = 0;
  if (rule.kind == NormKind::kLayer) {
    for (int64_t n = 0; n < count; ++n) mean += x[n];
    mean /= static_cast<double>(count);
  }
  for (int64_t n = 0; n < count; ++n) square += (x[n] - mean) * (x[n] - mean);
  return {mean, 1 / std::sqrt(square / static_cast<double>(count) + rule.epsilon)};
}

double Factor(const NormRule& rule, int64_t n) {
  return rule.weight == nullptr ? 1 : (*rule.weight)[n] + rule.weight_offset;
}

double Normalised(const NormRule& rule, const Statistics& s, double x, const Rounder& round) {
  const double n = (x - s.mean) * s.rstd;
  return rule.round_before_weight.has_value() ? round.To(*rule.round_before_weight, n) : n;
}

}  // namespace

Numbers NormForward(const NormRule& rule, int64_t count, const Numbers& vectors,
                    const Rounder& round) {
  Numbers out(vectors.size());
  for (size_t begin = 0; begin < vectors.size(); begin += count) {
    const Statistics s = StatisticsOf(rule, count, &vectors[begin]);
    for (int64_t n = 0; n < count; ++n) {
      const double scaled = Normalised(rule, s, vectors[begin + n], round) * Factor(rule, n);
      out[begin + n] = rule.bias == nullptr ? scaled : scaled + (*rule.bias)[n];
    }
  }
  return out;
}

Numbers NormInputGradient(const NormRule& rule, int64_t count, const Numbers& vectors,
                          const Numbers& d_out) {
  Numbers d_in(vectors.size());
  for (size_t begin = 0; begin < vectors.size(); begin += count) {
    const Statistics s = StatisticsOf(rule, count, &vectors[begin]);
    double mean = 0, along = 0;  // of dn, and of dn·n
    for (int64_t n = 0; n < count; ++n) {
      const double dn = d_out[begin + n] * Factor(rule, n);
      if (rule.kind == NormKind::kLayer) mean += dn;
      along += dn * (vectors[begin + n] - s.mean) * s.rstd;
    }
    mean /= static_cast<double>(count);
    along /= static_cast<double>(count);
    for (int64_t n = 0; n < count; ++n) {
      const double normalised = (vectors[begin + n] - s.mean) * s.rstd;
      const double dn = d_out[begin + n] * Factor(rule, n);
      d_in[begin + n] = s.rstd * (dn - mean - normalised * along);
    }
  }
  return d_in;
}

void AddNormGradients(const NormRule& rule, int64_t count, int64_t per_row, const Numbers& vectors,
                      const Numbers& d_out, const Rounder& round, Numbers* d_weight,
                      Numbers* d_bias) {
  const int64_t row_size = count * per_row;
  const int64_t rows = static_cast<int64_t>(vectors.size()) / row_size;
  if (d_weight != nullptr) {
    AddRows(rows, round, *d_weight, [&](int64_t row, Numbers& sum) {
      for (int64_t begin = row * row_size; begin < (row + 1) * row_size; begin += count) {
        const Statistics s = StatisticsOf(rule, count, &vectors[begin]);
        for (int64_t n = 0; n < count; ++n) {
          sum[n] += d_out[begin + n] * Normalised(rule, s, vectors[begin + n], round);
        }
      }
    });
  }
  if (d_bias != nullptr) {
    AddRows(rows, round, *d_bias, [&](int64_t row, Numbers& sum) {
      for (int64_t n = 0; n < row_size; ++n) sum[n % count] += d_out[row * row_size + n];
    });
  }
}

}  // namespace attnd
