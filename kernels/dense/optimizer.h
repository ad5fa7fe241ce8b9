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
    float* numbers = shared.numbers[warp];
    if (d.totals != nullptr) {
      const int number = at.block * kSquaresWarps + warp;
      if (number < d.range_count) AddRuns(d, number, lane, reinterpret_cast<double*>(numbers));
      return;
    }
    const int of_launch = at.block * kSquaresWarps + warp;
    if (of_launch >= d.warps) return;
    const SquaresRange range =
        EntryAt(d.ranges, d.range_count, &SquaresRange::first_warp, of_launch);
    const int64_t first = int64_t{of_launch - range.first_warp} * 32;
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
  // All lanes bring runs to `batch`, one adds them.
  ATTN_HD static void AddRuns(const SquaresDesc& d, int number, int lane, double* batch) {
    constexpr int kOfLane = 16, kTogether = 16, kBatch = 32 * kOfLane;
    static_assert(kBatch * sizeof(double) <= sizeof(Shared) / kSquaresWarps);
    const SquaresRange range = d.ranges[number];
    const double* runs = d.runs + int64_t{range.first_warp} * 32;
    const int64_t count = (range.count + kSquaresRun - 1) / kSquaresRun;
    double sum = range.before;
    for (int64_t first = 0; first < count; first += kBatch) {
      double brought[kOfLane];
#pragma unroll
      for (int n = 0; n < kOfLane; ++n) {
        const int64_t run = first + n * 32 + lane;
        brought[n] = run < count ? ptx::LoadGlobalDouble(runs + run) : 0;
      }
#pragma unroll
      for (int n = 0; n < kOfLane; ++n) ptx::StoreSharedDouble(batch + n * 32 + lane, brought[n]);
      ptx::SyncWarp();
      for (int run = 0; lane == 0 && run < kBatch && first + run < count; run += kTogether) {
        double of_run[kTogether];
#pragma unroll
        for (int n = 0; n < kTogether; ++n) of_run[n] = ptx::LoadSharedDouble(batch + run + n);
#pragma unroll
        for (int n = 0; n < kTogether; ++n)
          sum = ptx::FmaDouble(1, of_run[n], sum);  // rounded once
      }
      ptx::SyncWarp();
    }
    if (lane == 0) ptx::StoreGlobalDouble(d.totals + number, sum);
  }
};

// A thread has kNeighbours numbers: neighbours where all tensors are aligned, else one of each row
// of kThreads numbers, so that the lanes of a warp read neighbours.
struct StepKernel {
  static constexpr int kThreads = kStepThreads;
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const StepListDesc& list = *static_cast<const StepListDesc*>(params.dense);
    const StepDesc d = EntryAt(list.steps, list.count, &StepDesc::first_block, at.block);
    const Place n = PlaceOf(d, at);
    if (n.count <= 0) return;
    Numbers p, g;
    Load(d.parameter, n, p);
    Load(d.gradient, n, g);
#pragma unroll
    for (float& number : g) number = ptx::Multiply(d.multiplier, number);
    if (d.is_adam != 0) {
      Adam(d, n, g, p);
    } else {
      Sgd(d, n, g, p);
    }
    Store(Floats(d.parameter), n, p);
    const Numbers zeros = {};
    Store(Floats(d.gradient), n, zeros);
    if (d.packed.data != nullptr) Store(d.packed, n, p);
  }

 private:
  using Numbers = float[kNeighbours];
  struct Place {
    int64_t first;
    int step, count;
  };
  ATTN_HD static Place PlaceOf(const StepDesc& d, ThreadIndex at) {
    const uint64_t bits = Bits(d.parameter) | Bits(d.gradient) | Bits(d.packed.data) |
                          Bits(d.first) | Bits(d.second) | Bits(d.second_max);
    const bool is_aligned = (bits & 15) == 0;
    const int64_t block = int64_t{at.block - d.first_block} * kStepNumbersOfBlock;
    const int64_t first = block + at.thread * (is_aligned ? kNeighbours : 1);
    const int step = is_aligned ? 1 : kThreads;
    const int64_t count = (d.count - first + step - 1) / step;
    return {first, step, count < kNeighbours ? static_cast<int>(count) : kNeighbours};
  }
  ATTN_HD static uint64_t Bits(const void* tensor) { return reinterpret_cast<uint64_t>(tensor); }
  ATTN_HD static DenseTensor Floats(float* of) { return {of, kBiasFloat32}; }
  ATTN_HD static void Load(float* from, const Place& n, Numbers& numbers) {
    if (n.step == 1) return LoadNeighbours(Floats(from), n.first, n.count, numbers);
    LoadNumbers(Floats(from), n.count, Strided{n.first, n.step}, numbers);
  }
  ATTN_HD static void Store(const DenseTensor& to, const Place& n, const Numbers& numbers) {
    if (n.step == 1) return StoreNeighbours(to, n.first, n.count, numbers);
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) {
      if (i < n.count) StoreNumber(to.data, to.element, n.first + i * n.step, numbers[i]);
    }
  }

  ATTN_HD static float Decayed(const StepDesc& d, float g, float p) {
    return d.decay == 0 ? g : ptx::Add(g, ptx::Multiply(d.decay, p));
  }

  ATTN_HD static void Sgd(const StepDesc& d, const Place& n, Numbers& g, Numbers& p) {
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) g[i] = Decayed(d, g[i], p[i]);
    if (d.first != nullptr) {
      Numbers b;
      if (d.is_first == 0) {
        Load(d.first, n, b);
#pragma unroll
        for (int i = 0; i < kNeighbours; ++i) {
          b[i] = ptx::Add(ptx::Multiply(d.momentum, b[i]), ptx::Multiply(d.gain, g[i]));
        }
      } else {
#pragma unroll
        for (int i = 0; i < kNeighbours; ++i) b[i] = g[i];
      }
      Store(Floats(d.first), n, b);
#pragma unroll
      for (int i = 0; i < kNeighbours; ++i) {
        g[i] = d.is_nesterov != 0 ? ptx::Add(g[i], ptx::Multiply(d.momentum, b[i])) : b[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) p[i] = ptx::Subtract(p[i], ptx::Multiply(d.rate, g[i]));
  }

  ATTN_HD static void Adam(const StepDesc& d, const Place& n, Numbers& g, Numbers& p) {
    Numbers m, v;
    Load(d.first, n, m);
    Load(d.second, n, v);
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) {
      if (d.is_coupled != 0) {
        g[i] = Decayed(d, g[i], p[i]);
      } else {
        p[i] = ptx::Multiply(p[i], d.decay);
      }
      m[i] = ptx::Add(m[i], ptx::Multiply(ptx::Subtract(g[i], m[i]), d.toward1));
      const float square = ptx::Multiply(ptx::Multiply(d.toward2, g[i]), g[i]);
      v[i] = ptx::Add(ptx::Multiply(d.keep2, v[i]), square);
    }
    Store(Floats(d.first), n, m);
    Store(Floats(d.second), n, v);
    if (d.is_amsgrad != 0) {
      Numbers most;
      Load(d.second_max, n, most);
#pragma unroll
      for (int i = 0; i < kNeighbours; ++i) {
        v[i] = most[i] >= v[i] || most[i] != most[i] ? most[i] : v[i];  // a NaN stays
      }
      Store(Floats(d.second_max), n, v);
    }
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) {
      const float corrected = ptx::Divide(ptx::SquareRoot(v[i]), d.root_correction);
      const float under = ptx::Add(corrected, d.epsilon);
      p[i] = ptx::Subtract(p[i], ptx::Divide(ptx::Multiply(d.rate, m[i]), under));
    }
  }
};

}  // namespace attnd
