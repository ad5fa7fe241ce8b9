// CostModel: how long a call will keep the device, from its flops and bytes. The rate per direction
// and element type starts from the engine's own estimate and follows what launches really took.
// Admission refuses by it, the batcher shares by it. Any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "attention/problem.h"

namespace attnd {

class CostModel {
 public:
  explicit CostModel(double flops_per_second);

  double EstimateSeconds(Direction direction, ElementType element, double flops,
                         int64_t bytes) const;
  // A launch of `flops` over `bytes` took `seconds`. Launches too short, or bound by memory, teach
  // nothing about the rate and are not counted.
  void Learn(Direction direction, ElementType element, double flops, int64_t bytes, double seconds);
  double FlopsPerSecond(Direction direction, ElementType element) const;

 private:
  static int Index(Direction direction, ElementType element);
  std::array<std::atomic<double>, 6> flops_per_second_;
};

}  // namespace attnd
