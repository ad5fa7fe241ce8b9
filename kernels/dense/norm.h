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
  // Columns of a lane whose loads wait together.
  static constexpr int kTogether = 4, kStep = 32 * kTogether;

  struct Vector {
    const NormDesc& desc;
    int64_t begin;
    int lane;
    // Of a lane's columns from `column` on.
    ATTN_HD int Left(int column) const { return (desc.count - column + 31) / 32; }
    ATTN_HD void Load(const DenseTensor& t, int column, float (&numbers)[kTogether]) const {
      LoadNumbers(t, Left(column), Strided{begin + column, 32}, numbers);
    }
    ATTN_HD void LoadFactors(int column, float (&factors)[kTogether]) const {
      if (desc.weight.data != nullptr) {
        LoadNumbers(desc.weight, Left(column), Strided{column, 32}, factors);
      }
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        factors[n] = desc.weight.data == nullptr ? 1 : ptx::Add(factors[n], desc.weight_offset);
      }
    }
  };

  ATTN_HD static float OverLanes(float sum) {
    for (int mask = 16; mask > 0; mask >>= 1) sum = ptx::Add(sum, ptx::ShuffleXor(sum, mask));
    return sum;
  }

  ATTN_HD static DenseStatistics Statistics(const Vector& v) {
    const auto count = static_cast<float>(v.desc.count);
    float mean = 0, x[kTogether];
    if (v.desc.is_centred != 0) {
      float sum = 0;
      for (int c = v.lane; c < v.desc.count; c += kStep) {
        v.Load(v.desc.x, c, x);
#pragma unroll
        for (int n = 0; n < kTogether; ++n) {
          if (n < v.Left(c)) sum = ptx::Add(sum, x[n]);
        }
      }
      mean = ptx::Divide(OverLanes(sum), count);
    }
    float squares = 0;
    for (int c = v.lane; c < v.desc.count; c += kStep) {
      v.Load(v.desc.x, c, x);
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const float away = ptx::Subtract(x[n], mean);
        if (n < v.Left(c)) squares = ptx::Fma(away, away, squares);
      }
    }
    const float variance = ptx::Divide(OverLanes(squares), count);
    return {mean, ptx::Divide(1, ptx::SquareRoot(ptx::Add(variance, v.desc.epsilon)))};
  }

  ATTN_HD static void Forward(const Vector& v, const DenseStatistics& s) {
    const NormDesc& d = v.desc;
    for (int c = v.lane; c < d.count; c += kStep) {
      float x[kTogether], factors[kTogether], biases[kTogether] = {};
      v.Load(d.x, c, x);
      v.LoadFactors(c, factors);
      if (d.bias.data != nullptr) LoadNumbers(d.bias, v.Left(c), Strided{c, 32}, biases);
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        if (n >= v.Left(c)) break;
        float y = RoundTo(d.round_element, Normalised(s, x[n]));
        if (d.bias.data != nullptr) {
          y = ptx::Fma(y, factors[n], biases[n]);
        } else if (d.weight.data != nullptr) {
          y = ptx::Multiply(y, factors[n]);
        }
        StoreNumber(d.out.data, d.out.element, v.begin + c + n * 32, y);
      }
    }
  }

  ATTN_HD static void Backward(const Vector& v, const DenseStatistics& s) {
    const NormDesc& d = v.desc;
    float sum = 0, along = 0, x[kTogether], dy[kTogether], factors[kTogether];
    for (int c = v.lane; c < d.count; c += kStep) {
      v.Load(d.x, c, x);
      v.Load(d.dy, c, dy);
      v.LoadFactors(c, factors);
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        if (n >= v.Left(c)) break;
        const float dn = ptx::Multiply(dy[n], factors[n]);
        sum = ptx::Add(sum, dn);
        along = ptx::Fma(dn, Normalised(s, x[n]), along);
      }
    }
    const auto count = static_cast<float>(d.count);
    const float of_mean = d.is_centred != 0 ? ptx::Divide(OverLanes(sum), count) : 0;
    const float of_along = ptx::Divide(OverLanes(along), count);
    for (int c = v.lane; c < d.count; c += kStep) {
      float there[kTogether] = {};
      v.Load(d.x, c, x);
      v.Load(d.dy, c, dy);
      v.LoadFactors(c, factors);
      if (d.add != 0) v.Load(d.out, c, there);
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        if (n >= v.Left(c)) break;
        const float dn = ptx::Multiply(dy[n], factors[n]);
        const float less = ptx::Fma(-Normalised(s, x[n]), of_along, ptx::Subtract(dn, of_mean));
        const float dx = ptx::Multiply(less, s.rstd);
        StoreNumber(d.out.data, d.out.element, v.begin + c + n * 32,
                    d.add != 0 ? Added(d.out.element, there[n], dx) : dx);
      }
    }
  }
};

}  // namespace attnd
