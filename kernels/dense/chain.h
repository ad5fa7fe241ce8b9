// ChainKernel: a chain of functions of single numbers (ChainDesc), each number loaded once and kept
// between the steps: the bits of NumbersKernel step by step, since a step's result is rounded as if
// it had been stored and read again.
#pragma once

#include "kernels/dense/numbers.h"

namespace attnd {

// a ← the chain's last number. `index`: of the first neighbour in tensors.
template <class How>
ATTN_HD void RunChain(const NumbersStep* steps, int count, const NeighboursPlace& p, int64_t index,
                      float (&a)[kNeighbours]) {
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const NumbersStep& step = steps[n];
    const bool chain_is_b = step.chain_is_b != 0, adds = step.add != 0;
    typename How::Raw beside = {}, there = {};
    if (step.other.data != nullptr) How::Fetch(step.other, index, beside);
    if (adds) How::Fetch(step.out, index, there);
    float x[kNeighbours], other[kNeighbours] = {};
    if (step.other.data != nullptr) How::Load(beside, step.other, index, p.count, other);
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) {
      x[i] = chain_is_b ? other[i] : a[i];
      other[i] = chain_is_b ? a[i] : other[i];
    }
    NumbersFunction::Apply(step.rule, p, x, other);
    if (adds) AddNeighbours<How>(there, step.out, index, p.count, x);
    if (step.stores != 0) How::Store(step.out, index, p.count, x);
    if (step.is_aside != 0) continue;
    How::Round(step.out.element, x);
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i) a[i] = x[i];
  }
}

struct ChainKernel {
  static constexpr int kThreads = kNumbersThreads;
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const ChainDesc d = *static_cast<const ChainDesc*>(params.dense);  // read at once
    WithNeighbours(d.whole, [&](auto how) {
      using How = decltype(how);
      ForNeighbours(d.rows, d.columns, d.passes, at, [&](const NeighboursPlace& p) {
        const int64_t index = p.At(d.columns);
        typename How::Raw in;
        How::Fetch(d.in, index, in);
        float a[kNeighbours];
        How::Load(in, d.in, index, p.count, a);
        RunChain<How>(d.steps, d.count, p, index, a);
      });
    });
  }
};

}  // namespace attnd
