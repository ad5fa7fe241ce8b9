#include "client/demo/layers.h"

#include <algorithm>
#include <cmath>

namespace attnd::demo {
namespace {

// c [rows, outs] += a [rows, ins]·b [ins, outs]
void MultiplyAdd(const float* a, const float* b, int64_t rows, int64_t ins, int64_t outs,
                 float* __restrict c) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < ins; ++i) {
      float factor = a[r * ins + i];
      for (int64_t o = 0; o < outs; ++o) c[r * outs + o] += factor * b[i * outs + o];
    }
  }
}

Floats Transpose(const Floats& matrix, int64_t rows, int64_t columns) {
  Floats out(matrix.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) out[c * rows + r] = matrix[r * columns + c];
  }
  return out;
}

int64_t Size(const Floats& x) { return static_cast<int64_t>(x.size()); }

constexpr float kSqrtTwoOverPi = 0.7978845608f;
constexpr float kGeluCubic = 0.044715f;

}  // namespace

void Linear(const Floats& x, const Parameter& weight, const Parameter& bias, Floats& y) {
  int64_t outs = Size(bias.value), ins = Size(weight.value) / outs, rows = Size(x) / ins;
  y.resize(rows * outs);
  for (int64_t r = 0; r < rows; ++r) {
    std::copy(bias.value.begin(), bias.value.end(), y.begin() + r * outs);
  }
  MultiplyAdd(x.data(), weight.value.data(), rows, ins, outs, y.data());
}

void LinearBackward(const Floats& x, const Floats& dy, Parameter& weight, Parameter& bias,
                    Floats& dx) {
  int64_t outs = Size(bias.value), ins = Size(weight.value) / outs, rows = Size(x) / ins;
  Floats x_transposed = Transpose(x, rows, ins);
  MultiplyAdd(x_transposed.data(), dy.data(), ins, rows, outs, weight.gradient.data());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < outs; ++o) bias.gradient[o] += dy[r * outs + o];
  }
  dx.assign(rows * ins, 0);
  Floats weight_transposed = Transpose(weight.value, ins, outs);
  MultiplyAdd(dy.data(), weight_transposed.data(), rows, outs, ins, dx.data());
}

void LayerNorm(const Floats& x, const Parameter& gain, const Parameter& shift, NormState& state,
               Floats& y) {
  int64_t dim = Size(gain.value), rows = Size(x) / dim;
  y.resize(x.size());
  state.normalised.resize(x.size());
  state.inverse_deviation.resize(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = &x[r * dim];
    float mean = 0, variance = 0;
    for (int64_t d = 0; d < dim; ++d) mean += row[d] / static_cast<float>(dim);
    for (int64_t d = 0; d < dim; ++d) {
      variance += (row[d] - mean) * (row[d] - mean) / static_cast<float>(dim);
    }
    float inverse = 1 / std::sqrt(variance + 1e-5f);
    state.inverse_deviation[r] = inverse;
    for (int64_t d = 0; d < dim; ++d) {
      float normalised = (row[d] - mean) * inverse;
      state.normalised[r * dim + d] = normalised;
      y[r * dim + d] = normalised * gain.value[d] + shift.value[d];
    }
  }
}

// With n = normalised and g = dy·gain:  dx = (g − mean(g) − n·mean(g·n)) / deviation
void LayerNormBackward(const NormState& state, const Floats& dy, Parameter& gain, Parameter& shift,
                       Floats& dx) {
  int64_t dim = Size(gain.value), rows = Size(dy) / dim;
  dx.resize(dy.size());
  for (int64_t r = 0; r < rows; ++r) {
    const float* n = &state.normalised[r * dim];
    const float* d_row = &dy[r * dim];
    float mean_g = 0, mean_gn = 0;
    for (int64_t d = 0; d < dim; ++d) {
      float g = d_row[d] * gain.value[d];
      mean_g += g / static_cast<float>(dim);
      mean_gn += g * n[d] / static_cast<float>(dim);
      gain.gradient[d] += d_row[d] * n[d];
      shift.gradient[d] += d_row[d];
    }
    for (int64_t d = 0; d < dim; ++d) {
      float g = d_row[d] * gain.value[d];
      dx[r * dim + d] = (g - mean_g - n[d] * mean_gn) * state.inverse_deviation[r];
    }
  }
}

void Gelu(const Floats& x, Floats& y) {
  y.resize(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    float inner = kSqrtTwoOverPi * (x[i] + kGeluCubic * x[i] * x[i] * x[i]);
    y[i] = 0.5f * x[i] * (1 + std::tanh(inner));
  }
}

void GeluBackward(const Floats& x, const Floats& dy, Floats& dx) {
  dx.resize(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    float t = std::tanh(kSqrtTwoOverPi * (x[i] + kGeluCubic * x[i] * x[i] * x[i]));
    float d_inner = kSqrtTwoOverPi * (1 + 3 * kGeluCubic * x[i] * x[i]);
    dx[i] = dy[i] * (0.5f * (1 + t) + 0.5f * x[i] * (1 - t * t) * d_inner);
  }
}

double CrossEntropy(const Floats& logits, const std::vector<int32_t>& target, Floats& d_logits) {
  int64_t rows = static_cast<int64_t>(target.size()), classes = Size(logits) / rows;
  d_logits.resize(logits.size());
  double loss = 0;
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = &logits[r * classes];
    double largest = *std::max_element(row, row + classes), sum = 0;
    for (int64_t c = 0; c < classes; ++c) sum += std::exp(row[c] - largest);
    loss += largest + std::log(sum) - row[target[r]];
    for (int64_t c = 0; c < classes; ++c) {
      double p = std::exp(row[c] - largest) / sum - (c == target[r] ? 1 : 0);
      d_logits[r * classes + c] = static_cast<float>(p / static_cast<double>(rows));
    }
  }
  return loss / static_cast<double>(rows);
}

void Accumulate(const Floats& from, Floats& to) {
  for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
}

}  // namespace attnd::demo
