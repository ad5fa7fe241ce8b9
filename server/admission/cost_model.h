// CostModel: how long a call will keep its device, from its flops and bytes, and how long a queue
// of such estimates will take. Admission refuses by it, the batcher shares by it.
//
// The rate is each kernel variant's own (direction, element type, head dimension, what scores
// need), starts from the engine's estimate, and follows what launches took. A sum of estimates is
// still wrong by a factor: transfers overlap with kernels, slots share the device, the host may be
// slower than both. The pace is that factor, measured while the device always has work; a queue
// takes pace times its estimated seconds. Any thread; Served: one at a time.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "attention/problem.h"

namespace attnd {

class CostModel {
 public:
  explicit CostModel(double flops_per_second);

  double EstimateSeconds(const Problem& problem, Direction direction, double flops,
                         int64_t bytes) const;
  // A launch of `flops` over `bytes`, of problems like this one, took `seconds`. Launches too
  // short, or bound by memory, teach nothing about the rate and are not counted.
  void Learn(const Problem& problem, Direction direction, double flops, int64_t bytes,
             double seconds);
  double FlopsPerSecond(const Problem& problem, Direction direction) const;

  // While more work waited, the device took `passed` seconds for what was estimated so.
  void Served(double estimated, double passed);
  double pace() const { return pace_.load(std::memory_order_relaxed); }

 private:
  using Rate = std::atomic<double>;
  static constexpr int kHeadDims = 4;
  static constexpr int kVariants = 2 * 3 * kHeadDims * 2 * 2 * 2 * 2;
  static int ElementIndex(const Problem& problem, Direction direction);
  static int VariantIndex(const Problem& problem, Direction direction);
  static void Follow(Rate& rate, double seen);

  std::array<Rate, 6> element_rates_;        // flops a second, of all variants of an element
  std::array<Rate, kVariants> rates_;        // 0: not seen yet
  double served_estimated_, served_passed_;  // sums that fade; Served's own
  std::atomic<double> pace_{1};
};

}  // namespace attnd
