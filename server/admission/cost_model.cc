#include "server/admission/cost_model.h"

#include <algorithm>
#include <cmath>

namespace attnd {
namespace {

constexpr double kLaunchSeconds = 50e-6;    // what every call costs, however small
constexpr double kBytesPerSecond = 2e9;     // landing and reading tensors, on a slow host
constexpr double kShortestLesson = 200e-6;  // below, overhead hides the rate
constexpr double kLeastIntensity = 32;      // flops per byte; below, memory sets the pace
constexpr double kNewWeight = 0.2;          // of the last launch in the moving average

constexpr double kPaceMemory = 0.5;  // seconds of work after which a measured pace has faded to 1/e
constexpr double kPaceDoubt = 0.05;  // seconds of work that the pace of 1 at the start counts for
constexpr double kLeastPace = 0.05, kMostPace = 20;  // beyond: a measurement gone wrong

}  // namespace

CostModel::CostModel(double flops_per_second)
    : served_estimated_(kPaceDoubt), served_passed_(kPaceDoubt) {
  for (Rate& rate : element_rates_) rate = std::max(flops_per_second, 1e6);
  for (Rate& rate : rates_) rate = 0;
}

int CostModel::ElementIndex(const Problem& p, Direction direction) {
  return static_cast<int>(direction) * 3 + static_cast<int>(p.element) - 1;
}

int CostModel::VariantIndex(const Problem& p, Direction direction) {
  const int64_t widest = std::max(p.qk_head_dim, p.v_head_dim);
  const int head_dim = widest <= 32 ? 0 : widest <= 64 ? 1 : widest <= 128 ? 2 : 3;
  const bool scores = p.bias || p.bool_mask || !p.alibi_slopes.empty() || p.softcap != 0;
  const bool dropout = p.dropout.threshold != 0;
  int index = ElementIndex(p, direction) * kHeadDims + head_dim;
  for (bool feature : {scores, dropout, p.IsBounded(), p.mask != nullptr}) {
    index = 2 * index + (feature ? 1 : 0);
  }
  return index;
}

double CostModel::FlopsPerSecond(const Problem& p, Direction direction) const {
  const double rate = rates_[VariantIndex(p, direction)].load(std::memory_order_relaxed);
  if (rate > 0) return rate;
  return element_rates_[ElementIndex(p, direction)].load(std::memory_order_relaxed);
}

double CostModel::EstimateSeconds(const Problem& p, Direction direction, double flops,
                                  int64_t bytes) const {
  double compute = flops / FlopsPerSecond(p, direction);
  double transfer = static_cast<double>(bytes) / kBytesPerSecond;
  return kLaunchSeconds + compute + transfer;
}

// Two launches at once may lose one lesson, which does no harm.
void CostModel::Follow(Rate& rate, double seen) {
  const double old_rate = rate.load(std::memory_order_relaxed);
  const double weight = old_rate > 0 ? kNewWeight : 1;
  rate.store(old_rate + weight * (seen - old_rate), std::memory_order_relaxed);
}

void CostModel::Learn(const Problem& p, Direction direction, double flops, int64_t bytes,
                      double seconds) {
  if (seconds < kShortestLesson || flops < kLeastIntensity * static_cast<double>(bytes)) return;
  Follow(element_rates_[ElementIndex(p, direction)], flops / seconds);
  Follow(rates_[VariantIndex(p, direction)], flops / seconds);
}

void CostModel::Served(double estimated, double passed) {
  const double fading = std::exp(-passed / kPaceMemory);
  served_estimated_ = fading * served_estimated_ + estimated;
  served_passed_ = fading * served_passed_ + passed;
  const double pace = served_passed_ / std::max(served_estimated_, 1e-9);
  pace_.store(std::clamp(pace, kLeastPace, kMostPace), std::memory_order_relaxed);
}

}  // namespace attnd
