// ChainKernel: a chain of functions of single numbers (ChainDesc), each number loaded once and kept
// between the steps: the bits of NumbersKernel step by step, since a step's result is rounded as if
// it had been stored and read again.
#pragma once

#include "kernels/dense/numbers.h"

namespace attnd {

// a ← the chain's last number. `index`: of the first neighbour in tensors.
ATTN_HD void RunChain(const NumbersStep* steps, int count, const NeighboursPlace& p, int64_t index,
                      float (&a)[kNeighbours]) {
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const NumbersStep& step = steps[n];
    float x[kNeighbours], other[kNeighbours] = {};
    if (step.other.data != nullptr) LoadNeighbours(step.other, index, p.count, other);
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) {
      x[i] = step.chain_is_b != 0 ? other[i] : a[i];
      other[i] = step.chain_is_b != 0 ? a[i] : other[i];
    }
    NumbersFunction::Apply(step.rule, p, x, other);
    if (step.add != 0) {
      LoadNeighbours(step.out, index, p.count, other);
#pragma unroll
      for (int i = 0; i < kNeighbours; ++i) x[i] = Added(step.out.element, other[i], x[i]);
    }
    if (step.stores != 0) StoreNeighbours(step.out, index, p.count, x);
    if (step.is_aside != 0) continue;
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) a[i] = RoundTo(step.out.element, x[i]);
  }
}

struct ChainKernel {
  static constexpr int kThreads = kNumbersThreads;
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const ChainDesc d = *static_cast<const ChainDesc*>(params.dense);  // read at once
    NeighboursPlace p;
    if (!FindNeighbours(d.rows, d.columns, at, p)) return;
    const int64_t index = p.At(d.columns);
    float a[kNeighbours];
    LoadNeighbours(d.in, index, p.count, a);
    RunChain(d.steps, d.count, p, index, a);
  }
};

}  // namespace attnd
