// NormKernel: layer and RMS normalisation of vectors that lie end to end, and its gradient, a warp
// a vector (NormDesc).
//   mean = Σx/n (RMS: 0)   rstd = 1/√(Σ(x − mean)²/n + ε)   ν = (x − mean)·rstd
//   y = round(ν)·(w + offset) + b
//   dn = dy·(w + offset)   dx = (dn − Σdn/n − ν·Σ(dn·ν)/n)·rstd   (RMS: without Σdn/n)
// Sums: a lane's columns are a chain, 32 apart; then a tree over lanes. A vector's bits depend on
// the vector alone. It is read two or three times, from the cache but for the first.
#pragma once

#include "kernels/dense/elements.h"

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
    const Vector v = {d, vector * d.count, at.thread & 31};
    const DenseStatistics s = Statistics(v);
    if (d.is_backward == 0) return Forward(v, s);
    if (v.lane == 0) {
      ptx::StoreGlobalFloat(&d.statistics[vector].mean, s.mean);
      ptx::StoreGlobalFloat(&d.statistics[vector].rstd, s.rstd);
    }
    Backward(v, s);
  }

 private:
  struct Vector {
    const NormDesc& desc;
    int64_t begin;
    int lane;
    ATTN_HD float X(int column) const { return LoadNumber(desc.x, begin + column); }
    ATTN_HD float Factor(int column) const {
      if (desc.weight.data == nullptr) return 1;
      return ptx::Add(LoadNumber(desc.weight, column), desc.weight_offset);
    }
  };

  ATTN_HD static float OverLanes(float sum) {
    for (int mask = 16; mask > 0; mask >>= 1) sum = ptx::Add(sum, ptx::ShuffleXor(sum, mask));
    return sum;
  }

  ATTN_HD static DenseStatistics Statistics(const Vector& v) {
    const auto count = static_cast<float>(v.desc.count);
    float mean = 0;
    if (v.desc.is_centred != 0) {
      float sum = 0;
      for (int c = v.lane; c < v.desc.count; c += 32) sum = ptx::Add(sum, v.X(c));
      mean = ptx::Divide(OverLanes(sum), count);
    }
    float squares = 0;
    for (int c = v.lane; c < v.desc.count; c += 32) {
      const float away = ptx::Subtract(v.X(c), mean);
      squares = ptx::Fma(away, away, squares);
    }
    const float variance = ptx::Divide(OverLanes(squares), count);
    return {mean, ptx::Divide(1, ptx::SquareRoot(ptx::Add(variance, v.desc.epsilon)))};
  }

  ATTN_HD static void Forward(const Vector& v, const DenseStatistics& s) {
    const NormDesc& d = v.desc;
    for (int c = v.lane; c < d.count; c += 32) {
      const float n = RoundTo(d.round_element, Normalised(s, v.X(c)));
      float y = n;
      if (d.bias.data != nullptr) {
        y = ptx::Fma(n, v.Factor(c), LoadNumber(d.bias, c));
      } else if (d.weight.data != nullptr) {
        y = ptx::Multiply(n, v.Factor(c));
      }
      StoreNumber(d.out.data, d.out.element, v.begin + c, y);
    }
  }

  ATTN_HD static void Backward(const Vector& v, const DenseStatistics& s) {
    const NormDesc& d = v.desc;
    float sum = 0, along = 0;
    for (int c = v.lane; c < d.count; c += 32) {
      const float dn = ptx::Multiply(LoadNumber(d.dy, v.begin + c), v.Factor(c));
      sum = ptx::Add(sum, dn);
      along = ptx::Fma(dn, Normalised(s, v.X(c)), along);
    }
    const auto count = static_cast<float>(d.count);
    const float of_mean = d.is_centred != 0 ? ptx::Divide(OverLanes(sum), count) : 0;
    const float of_along = ptx::Divide(OverLanes(along), count);
    for (int c = v.lane; c < d.count; c += 32) {
      const float dn = ptx::Multiply(LoadNumber(d.dy, v.begin + c), v.Factor(c));
      const float less = ptx::Fma(-Normalised(s, v.X(c)), of_along, ptx::Subtract(dn, of_mean));
      StoreOrAdd(d.out.data, d.out.element, v.begin + c, ptx::Multiply(less, s.rstd), d.add != 0);
    }
  }
};

}  // namespace attnd
