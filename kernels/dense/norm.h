// NormKernel: layer and RMS normalisation of vectors that lie end to end, and its gradient, a warp
// a vector (NormDesc).
//   mean = Σx/n (RMS: 0)   rstd = 1/√(Σ(x − mean)²/n + ε)   ν = (x − mean)·rstd
//   y = round(ν)·(w + offset) + b
//   dn = dy·(w + offset)   dx = (dn − Σdn/n − ν·Σ(dn·ν)/n)·rstd   (RMS: without Σdn/n)
// Sums: a lane's columns are a chain, eight neighbours in every 256; then a tree over lanes. A
// vector's bits depend on the vector alone. It is read two or three times, from the cache but for
// the first. A chain of functions (chain.h) may come before, which stores what the norm reads, and
// another behind, which reads what the norm has stored: each lane what it stored itself.
#pragma once

#include "kernels/dense/chain.h"

namespace attnd {

// ν of a column.
ATTN_HD float Normalised(const DenseStatistics& s, float x) {
  return ptx::Multiply(ptx::Subtract(x, s.mean), s.rstd);
}

struct NormKernel {
  static constexpr int kThreads = kNormThreads;
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const NormDesc& d = *static_cast<const NormDesc*>(params.dense);
    const int64_t vector = int64_t{at.block} * kNormVectorsOfBlock + (at.thread >> 5);
    if (vector >= d.vectors) return;
    const Vector v = {d, vector * d.count, static_cast<uint32_t>(vector), at.thread & 31};
    // One place for both chains: two would be twice the code, and its registers.
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      if (side == 1) Normalise(v, vector);
      RunChain(v, side == 0 ? d.in : d.out, side == 0 ? d.before : d.after);
    }
  }

 private:
  static constexpr int kStep = 32 * kNeighbours;
  using Numbers = float[kNeighbours];

  // A lane's columns are those from kNeighbours * lane on, in steps of kStep.
  struct Vector {
    const NormDesc& desc;
    int64_t begin;
    uint32_t row;
    int lane;
    template <class Body>
    ATTN_HD void ForColumns(const Body& body) const {
#pragma unroll 1
      for (int c = lane * kNeighbours; c < desc.count; c += kStep) body(c, desc.count - c);
    }
    ATTN_HD void Load(const DenseTensor& t, int column, Numbers& numbers) const {
      LoadNeighbours(t, begin + column, desc.count - column, numbers);
    }
    ATTN_HD void LoadFactors(int column, Numbers& factors) const {
      if (desc.weight.data != nullptr) {
        LoadNeighbours(desc.weight, column, desc.count - column, factors);
      }
#pragma unroll
      for (int n = 0; n < kNeighbours; ++n) {
        factors[n] = desc.weight.data == nullptr ? 1 : ptx::Add(factors[n], desc.weight_offset);
      }
    }
  };

  ATTN_HD static void RunChain(const Vector& v, const DenseTensor& from, const NormChain& chain) {
    if (chain.count == 0) return;
    v.ForColumns([&](int column, int left) {
      Numbers numbers;
      v.Load(from, column, numbers);
      const NeighboursPlace place = {v.row, static_cast<uint32_t>(column),
                                     left < kNeighbours ? left : kNeighbours};
      attnd::RunChain(chain.steps, chain.count, place, v.begin + column, numbers);
    });
  }

  ATTN_HD static void Normalise(const Vector& v, int64_t vector) {
    const NormDesc& d = v.desc;
    const DenseStatistics s = Statistics(v);
    if (d.is_backward == 0) return Forward(v, s);
    if (v.lane == 0) {
      ptx::StoreGlobalFloat(&d.statistics[vector].mean, s.mean);
      ptx::StoreGlobalFloat(&d.statistics[vector].rstd, s.rstd);
    }
    Backward(v, s);
  }

  ATTN_HD static float OverLanes(float sum) {
    for (int mask = 16; mask > 0; mask >>= 1) sum = ptx::Add(sum, ptx::ShuffleXor(sum, mask));
    return sum;
  }

  ATTN_HD static DenseStatistics Statistics(const Vector& v) {
    const auto count = static_cast<float>(v.desc.count);
    float mean = 0;
    if (v.desc.is_centred != 0) {
      float sum = 0;
      v.ForColumns([&](int column, int left) {
        Numbers x;
        v.Load(v.desc.x, column, x);
#pragma unroll
        for (int n = 0; n < kNeighbours; ++n) {
          if (n < left) sum = ptx::Add(sum, x[n]);
        }
      });
      mean = ptx::Divide(OverLanes(sum), count);
    }
    float squares = 0;
    v.ForColumns([&](int column, int left) {
      Numbers x;
      v.Load(v.desc.x, column, x);
#pragma unroll
      for (int n = 0; n < kNeighbours; ++n) {
        const float away = ptx::Subtract(x[n], mean);
        if (n < left) squares = ptx::Fma(away, away, squares);
      }
    });
    const float variance = ptx::Divide(OverLanes(squares), count);
    return {mean, ptx::Divide(1, ptx::SquareRoot(ptx::Add(variance, v.desc.epsilon)))};
  }

  ATTN_HD static void Forward(const Vector& v, const DenseStatistics& s) {
    const NormDesc& d = v.desc;
    v.ForColumns([&](int column, int left) {
      Numbers y, factors, biases = {};
      v.Load(d.x, column, y);
      v.LoadFactors(column, factors);
      if (d.bias.data != nullptr) LoadNeighbours(d.bias, column, left, biases);
#pragma unroll
      for (int n = 0; n < kNeighbours; ++n) {
        y[n] = RoundTo(d.round_element, Normalised(s, y[n]));
        if (d.bias.data != nullptr) {
          y[n] = ptx::Fma(y[n], factors[n], biases[n]);
        } else if (d.weight.data != nullptr) {
          y[n] = ptx::Multiply(y[n], factors[n]);
        }
      }
      StoreNeighbours(d.out, v.begin + column, left, y);
    });
  }

  ATTN_HD static void Backward(const Vector& v, const DenseStatistics& s) {
    const NormDesc& d = v.desc;
    float sum = 0, along = 0;
    v.ForColumns([&](int column, int left) {
      Numbers x, dy, factors;
      v.Load(d.x, column, x);
      v.Load(d.dy, column, dy);
      v.LoadFactors(column, factors);
#pragma unroll
      for (int n = 0; n < kNeighbours; ++n) {
        if (n >= left) break;
        const float dn = ptx::Multiply(dy[n], factors[n]);
        sum = ptx::Add(sum, dn);
        along = ptx::Fma(dn, Normalised(s, x[n]), along);
      }
    });
    const auto count = static_cast<float>(d.count);
    const float of_mean = d.is_centred != 0 ? ptx::Divide(OverLanes(sum), count) : 0;
    const float of_along = ptx::Divide(OverLanes(along), count);
    v.ForColumns([&](int column, int left) {
      Numbers x, dy, factors, there = {};
      v.Load(d.x, column, x);
      v.Load(d.dy, column, dy);
      v.LoadFactors(column, factors);
      if (d.add != 0) v.Load(d.out, column, there);
#pragma unroll
      for (int n = 0; n < kNeighbours; ++n) {
        const float dn = ptx::Multiply(dy[n], factors[n]);
        const float less = ptx::Fma(-Normalised(s, x[n]), of_along, ptx::Subtract(dn, of_mean));
        const float dx = ptx::Multiply(less, s.rstd);
        x[n] = d.add != 0 ? Added(d.out.element, there[n], dx) : dx;
      }
      StoreNeighbours(d.out, v.begin + column, left, x);
    });
  }
};

}  // namespace attnd
