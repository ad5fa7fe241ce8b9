#include "modules/reference/pointwise.h"

#include <cmath>
#include <numbers>

#include "attention/elementwise_dropout.h"

namespace attnd {
namespace {

constexpr double kQuickSlope = 1.702;
constexpr double kCubic = 0.044715;

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double NormalCdf(double x) { return std::erfc(-x / std::numbers::sqrt2) / 2; }
double NormalDensity(double x) {
  return std::exp(-x * x / 2) * std::numbers::inv_sqrtpi / std::numbers::sqrt2;
}
double GeluTanhArgument(double x) {
  return std::numbers::sqrt2 * std::numbers::inv_sqrtpi * (x + kCubic * x * x * x);
}

// Differentiates x·σ(c·x).
double SigmoidGateSlope(double c, double x) {
  const double s = Sigmoid(c * x);
  return s + c * x * s * (1 - s);
}

}  // namespace

double Activate(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::kRelu:
      return x > 0 || std::isnan(x) ? x : 0;
    case ActivationKind::kGelu:
      return x * NormalCdf(x);
    case ActivationKind::kGeluTanh:
      return x / 2 * (1 + std::tanh(GeluTanhArgument(x)));
    case ActivationKind::kSilu:
      return x * Sigmoid(x);
    case ActivationKind::kQuickGelu:
      return x * Sigmoid(kQuickSlope * x);
    case ActivationKind::kTanh:
      return std::tanh(x);
  }
  return 0;
}

double ActivationSlope(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::kRelu:
      return x > 0 ? 1 : 0;
    case ActivationKind::kGelu:
      return NormalCdf(x) + x * NormalDensity(x);
    case ActivationKind::kGeluTanh: {
      const double t = std::tanh(GeluTanhArgument(x));
      const double inner =
          std::numbers::sqrt2 * std::numbers::inv_sqrtpi * (1 + 3 * kCubic * x * x);
      return (1 + t) / 2 + x / 2 * (1 - t * t) * inner;
    }
    case ActivationKind::kSilu:
      return SigmoidGateSlope(1, x);
    case ActivationKind::kQuickGelu:
      return SigmoidGateSlope(kQuickSlope, x);
    case ActivationKind::kTanh: {
      const double t = std::tanh(x);
      return 1 - t * t;
    }
  }
  return 0;
}

double ActivationGradient(ActivationKind kind, double x, double dy) {
  if (kind == ActivationKind::kRelu) return x <= 0 ? 0 : dy;
  return dy * ActivationSlope(kind, x);
}

Numbers ApplyDropout(const DropoutPlace& place, uint32_t threshold, int64_t columns,
                     const Numbers& values) {
  if (threshold == 0) return values;
  const DropoutStream stream = MakeDropoutStream(place.seed, place.offset, 0);
  const double scale = 256.0 / (256.0 - threshold);
  Numbers out(values.size());
  for (size_t n = 0; n < values.size(); ++n) {
    const auto row = static_cast<uint32_t>(place.first_row + static_cast<int64_t>(n) / columns);
    const auto column = static_cast<uint32_t>(static_cast<int64_t>(n) % columns);
    const bool is_dropped = ElementwiseDropoutByte(stream, row, column) < threshold;
    out[n] = values[n] * (is_dropped ? 0 : scale);
  }
  return out;
}

}  // namespace attnd
