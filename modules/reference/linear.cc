#include "modules/reference/linear.h"

#include "modules/reference/gradient_sums.h"

namespace attnd {

Numbers LinearForward(const LinearSizes& sizes, const Numbers& in, const Numbers& weight,
                      const Numbers* bias) {
  Numbers out(sizes.rows * sizes.out);
  for (int64_t row = 0; row < sizes.rows; ++row) {
    for (int64_t o = 0; o < sizes.out; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < sizes.in; ++i) {
        sum += in[row * sizes.in + i] * weight[sizes.WeightIndex(o, i)];
      }
      out[row * sizes.out + o] = bias == nullptr ? sum : sum + (*bias)[o];
    }
  }
  return out;
}

Numbers LinearInputGradient(const LinearSizes& sizes, const Numbers& d_out, const Numbers& weight) {
  Numbers d_in(sizes.rows * sizes.in);
  for (int64_t row = 0; row < sizes.rows; ++row) {
    for (int64_t o = 0; o < sizes.out; ++o) {
      const double d = d_out[row * sizes.out + o];
      for (int64_t i = 0; i < sizes.in; ++i) {
        d_in[row * sizes.in + i] += d * weight[sizes.WeightIndex(o, i)];
      }
    }
  }
  return d_in;
}

void AddLinearGradients(const LinearSizes& sizes, const Numbers& in, const Numbers& d_out,
                        const Rounder& round, Numbers* d_weight, Numbers* d_bias) {
  if (d_weight != nullptr) {
    AddRows(sizes.rows, round, *d_weight, [&](int64_t row, Numbers& sum) {
      for (int64_t o = 0; o < sizes.out; ++o) {
        const double d = d_out[row * sizes.out + o];
        for (int64_t i = 0; i < sizes.in; ++i) {
          sum[sizes.WeightIndex(o, i)] += d * in[row * sizes.in + i];
        }
      }
    });
  }
  if (d_bias != nullptr) {
    AddRows(sizes.rows, round, *d_bias, [&](int64_t row, Numbers& sum) {
      for (int64_t o = 0; o < sizes.out; ++o) sum[o] += d_out[row * sizes.out + o];
    });
  }
}

}  // namespace attnd
