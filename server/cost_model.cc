#include "server/cost_model.h"

#include <algorithm>

namespace attnd {
namespace {

constexpr double kLaunchSeconds = 50e-6;    // what every call costs, however small
constexpr double kBytesPerSecond = 2e9;     // landing and reading tensors, on a slow host
constexpr double kShortestLesson = 200e-6;  // below, overhead hides the rate
constexpr double kLeastIntensity = 32;      // flops per byte; below, memory sets the pace
constexpr double kNewWeight = 0.2;          // of the last launch in the moving average

}  // namespace

CostModel::CostModel(double flops_per_second) {
  for (auto& rate : flops_per_second_) rate = std::max(flops_per_second, 1e6);
}

int CostModel::Index(Direction direction, ElementType element) {
  return static_cast<int>(direction) * 3 + static_cast<int>(element) - 1;
}

double CostModel::FlopsPerSecond(Direction direction, ElementType element) const {
  return flops_per_second_[Index(direction, element)].load(std::memory_order_relaxed);
}

double CostModel::EstimateSeconds(Direction direction, ElementType element, double flops,
                                  int64_t bytes) const {
  double compute = flops / FlopsPerSecond(direction, element);
  double transfer = static_cast<double>(bytes) / kBytesPerSecond;
  return kLaunchSeconds + compute + transfer;
}

void CostModel::Learn(Direction direction, ElementType element, double flops, int64_t bytes,
                      double seconds) {
  if (seconds < kShortestLesson || flops < kLeastIntensity * static_cast<double>(bytes)) return;
  auto& rate = flops_per_second_[Index(direction, element)];
  double old_rate = rate.load(std::memory_order_relaxed);
  // Two launches at once may lose one lesson, which does no harm.
  rate.store(old_rate + kNewWeight * (flops / seconds - old_rate), std::memory_order_relaxed);
}

}  // namespace attnd
