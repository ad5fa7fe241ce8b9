// optimizer.h: a step of an optimizer. SquaresKernel sums the squares of gradients in two launches
// (SquaresDesc), StepKernel makes the step itself (StepListDesc), each of many tensors at once.
// Every operation is rounded once and none contracted: the bits are those of modules/optimizer.cc,
// number by number.
#pragma once

#include "kernels/dense/elements.h"

namespace attnd {

// The last of `count` entries whose `first` is at most `number`; entry 0's is 0.
template <class Entry>
ATTN_HD const Entry& EntryAt(const Entry* entries, int32_t count, int32_t Entry::*first,
                             int32_t number) {
  int32_t low = 0, beyond = count;
  while (beyond - low > 1) {
    const int32_t middle = (low + beyond) / 2;
    if (entries[middle].*first <= number) {
      low = middle;
    } else {
      beyond = middle;
    }
  }
  return entries[low];
}

// A warp has 32 runs of kSquaresRun numbers, one a lane. Numbers pass through shared memory, so
// that lanes read neighbours.
struct SquaresKernel {
  static constexpr int kThreads = 32 * kSquaresWarps, kPitch = 33;
  struct Shared {
    float numbers[kSquaresWarps][32 * kPitch];
  };

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared& shared) {
    const SquaresDesc& d = *static_cast<const SquaresDesc*>(params.dense);
    const int warp = at.thread >> 5, lane = at.thread & 31;
    if (d.totals != nullptr) {
      const int number = at.block * kSquaresWarps + warp;
      if (number < d.range_count && lane == 0) AddRuns(d, number);
      return;
    }
    const int of_launch = at.block * kSquaresWarps + warp;
    if (of_launch >= d.warps) return;
    const SquaresRange range =
        EntryAt(d.ranges, d.range_count, &SquaresRange::first_warp, of_launch);
    const int64_t first = int64_t{of_launch - range.first_warp} * 32;
    float* numbers = shared.numbers[warp];
    double sum = 0;
    for (int step = 0; step < kSquaresRun; step += 32) {
      for (int run = 0; run < 32; ++run) {
        const int64_t index = (first + run) * kSquaresRun + step + lane;
        const float number = index < range.count ? ptx::LoadGlobalFloat(range.gradient + index) : 0;
        ptx::StoreSharedFloat(numbers + run * kPitch + lane, number);
      }
      ptx::SyncWarp();
      for (int n = 0; n < 32; ++n) {
        const double number = ptx::LoadSharedFloat(numbers + lane * kPitch + n);
        sum = ptx::FmaDouble(number, number, sum);  // the square is exact
      }
      ptx::SyncWarp();
    }
    ptx::StoreGlobalDouble(d.runs + int64_t{of_launch} * 32 + lane, sum);
  }

 private:
  ATTN_HD static void AddRuns(const SquaresDesc& d, int number) {
    constexpr int kTogether = 32;
    const SquaresRange range = d.ranges[number];
    const double* runs = d.runs + int64_t{range.first_warp} * 32;
    const int64_t count = (range.count + kSquaresRun - 1) / kSquaresRun;
    double sum = range.before;
    for (int64_t first = 0; first < count; first += kTogether) {
      double of_run[kTogether];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        of_run[n] = first + n < count ? ptx::LoadGlobalDouble(runs + first + n) : 0;
      }
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        if (first + n < count) sum = ptx::FmaDouble(1, of_run[n], sum);  // rounded once
      }
    }
    ptx::StoreGlobalDouble(d.totals + number, sum);
  }
};

struct StepKernel {
  static constexpr int kThreads = kStepThreads;
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const StepListDesc& list = *static_cast<const StepListDesc*>(params.dense);
    const StepDesc d = EntryAt(list.steps, list.count, &StepDesc::first_block, at.block);
    int64_t n = int64_t{at.block - d.first_block} * kStepNumbersOfBlock + at.thread;
    for (int of_thread = 0; of_thread < kStepNumbersOfBlock / kThreads;
         ++of_thread, n += kThreads) {
      if (n >= d.count) return;
      float p = ptx::LoadGlobalFloat(d.parameter + n);
      const float g = ptx::Multiply(d.multiplier, ptx::LoadGlobalFloat(d.gradient + n));
      p = d.is_adam != 0 ? Adam(d, n, g, p) : Sgd(d, n, g, p);
      ptx::StoreGlobalFloat(d.parameter + n, p);
      ptx::StoreGlobalFloat(d.gradient + n, 0);
      if (d.packed.data != nullptr) StoreNumber(d.packed.data, d.packed.element, n, p);
    }
  }

 private:
  ATTN_HD static float Decayed(const StepDesc& d, float g, float p) {
    return d.decay == 0 ? g : ptx::Add(g, ptx::Multiply(d.decay, p));
  }

  ATTN_HD static float Sgd(const StepDesc& d, int64_t n, float scaled, float p) {
    float g = Decayed(d, scaled, p);
    if (d.first != nullptr) {
      float b = g;
      if (d.is_first == 0) {
        const float kept = ptx::Multiply(d.momentum, ptx::LoadGlobalFloat(d.first + n));
        b = ptx::Add(kept, ptx::Multiply(d.gain, g));
      }
      ptx::StoreGlobalFloat(d.first + n, b);
      g = d.is_nesterov != 0 ? ptx::Add(g, ptx::Multiply(d.momentum, b)) : b;
    }
    return ptx::Subtract(p, ptx::Multiply(d.rate, g));
  }

  ATTN_HD static float Adam(const StepDesc& d, int64_t n, float g, float p) {
    if (d.is_coupled != 0) {
      g = Decayed(d, g, p);
    } else {
      p = ptx::Multiply(p, d.decay);
    }
    float m = ptx::LoadGlobalFloat(d.first + n), v = ptx::LoadGlobalFloat(d.second + n);
    m = ptx::Add(m, ptx::Multiply(ptx::Subtract(g, m), d.toward1));
    ptx::StoreGlobalFloat(d.first + n, m);
    const float square = ptx::Multiply(ptx::Multiply(d.toward2, g), g);
    v = ptx::Add(ptx::Multiply(d.keep2, v), square);
    ptx::StoreGlobalFloat(d.second + n, v);
    float w = v;
    if (d.is_amsgrad != 0) {
      const float most = ptx::LoadGlobalFloat(d.second_max + n);
      w = most >= v || most != most ? most : v;  // a NaN stays
      ptx::StoreGlobalFloat(d.second_max + n, w);
    }
    const float corrected = ptx::Divide(ptx::SquareRoot(w), d.root_correction);
    const float under = ptx::Add(corrected, d.epsilon);
    return ptx::Subtract(p, ptx::Divide(ptx::Multiply(d.rate, m), under));
  }
};

}  // namespace attnd
