// NormKernel: layer and RMS normalisation of vectors that lie end to end, and its gradient, a warp
// a vector, or a part of one where vectors are short (NormDesc).
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

// For descriptors whose `whole` is an element, or kBiasNone.
template <bool kAreWhole>
struct NormKernelOf {
  static constexpr int kThreads = kNormThreads;
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const NormDesc& d = *static_cast<const NormDesc*>(params.dense);
    const int lanes = d.lanes;
    const int64_t vector = (int64_t{at.block} * kNormThreads + at.thread) / lanes;
    if (vector >= d.vectors) return;
    const auto run = [&](auto how) {
      const Columns<decltype(how)> columns(d, vector, at.thread & (lanes - 1));
      // One place for both chains: two would be twice the code, and its registers.
#pragma unroll 1
      for (int side = 0; side < 2; ++side) {
        if (side == 1) Normalise(d, vector, columns);
        columns.RunChain(side == 0 ? d.in : d.out, side == 0 ? d.before : d.after);
      }
    };
    if constexpr (kAreWhole) {
      WithWholeNeighbours(d.whole, run);
    } else {
      run(AnyNeighbours());
    }
  }

 private:
  static constexpr int kStep = 32 * kNeighbours;
  using Numbers = float[kNeighbours];

  // A lane's columns of a vector are those from kNeighbours * lane on, in steps of kStep.
  template <class How>
  class Columns {
   public:
    ATTN_HD Columns(const NormDesc& d, int64_t vector, int lane)
        : count_(d.count),
          first_(lane * kNeighbours),
          begin_(vector * count_),
          row_(static_cast<uint32_t>(vector)) {}
    ATTN_HD bool IsFirst() const { return first_ == 0; }
    // Calls body(column, left) for each group of neighbours in order.
    template <class Body>
    ATTN_HD void ForEach(const Body& body) const {
#pragma unroll 1
      for (int column = first_; column < count_; column += kStep) {
        body(column, How::kAreWhole ? kNeighbours : count_ - column);
      }
    }
    ATTN_HD void Load(const DenseTensor& t, int column, int left, Numbers& numbers) const {
      typename How::Raw raw;
      How::Fetch(t, begin_ + column, raw);
      How::Load(raw, t, begin_ + column, left, numbers);
    }
    ATTN_HD void Store(const DenseTensor& t, int column, int left, const Numbers& numbers) const {
      How::Store(t, begin_ + column, left, numbers);
    }
    // numbers ← t + numbers, each as if it had been stored.
    ATTN_HD void Add(const DenseTensor& t, int column, int left, Numbers& numbers) const {
      typename How::Raw there;
      How::Fetch(t, begin_ + column, there);
      AddNeighbours<How>(there, t, begin_ + column, left, numbers);
    }
    ATTN_HD void RunChain(const DenseTensor from, const NormChain chain) const {
      if (chain.count == 0) return;
      ForEach([&](int column, int left) {
        const NeighboursPlace place = {row_, static_cast<uint32_t>(column),
                                       left < kNeighbours ? left : kNeighbours};
        Numbers numbers;
        Load(from, column, left, numbers);
        attnd::RunChain<How>(chain.steps, chain.count, place, begin_ + column, numbers);
      });
    }
    ATTN_HD static void Factors(const DenseTensor& weight, float offset, int column, int left,
                                Numbers& factors) {
      if (weight.data != nullptr) How::FloatsOf(weight, column, left, factors);
#pragma unroll
      for (int n = 0; n < kNeighbours; ++n) {
        factors[n] = weight.data == nullptr ? 1 : ptx::Add(factors[n], offset);
      }
    }
    ATTN_HD static void Biases(const DenseTensor& bias, int column, int left, Numbers& biases) {
      How::FloatsOf(bias, column, left, biases);
    }
    ATTN_HD static void Round(int32_t element, Numbers& numbers) { How::Round(element, numbers); }

   private:
    const int count_, first_;
    const int64_t begin_;
    const uint32_t row_;
  };

  template <class Columns>
  ATTN_HD static void Normalise(const NormDesc& d, int64_t vector, const Columns& columns) {
    const DenseStatistics s = Statistics(d, columns);
    if (d.is_backward == 0) return Forward(d, columns, s);
    if (columns.IsFirst()) {
      ptx::StoreGlobalFloat(&d.statistics[vector].mean, s.mean);
      ptx::StoreGlobalFloat(&d.statistics[vector].rstd, s.rstd);
    }
    Backward(d, columns, s);
  }

  // Lanes of a warp that has no more columns would add zeros.
  ATTN_HD static float OverLanes(float sum, int lanes) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) {
      if (mask < lanes) sum = ptx::Add(sum, ptx::ShuffleXor(sum, mask));
    }
    return sum;
  }

  // Fields of the descriptor are read before the loops: the compiler would read them anew behind
  // every access to memory.
  template <class Columns>
  ATTN_HD static DenseStatistics Statistics(const NormDesc& d, const Columns& columns) {
    const DenseTensor of_x = d.x;
    const auto count = static_cast<float>(d.count);
    const int lanes = d.lanes;
    const float epsilon = d.epsilon;
    float mean = 0;
    if (d.is_centred != 0) {
      float sum = 0;
      columns.ForEach([&](int column, int left) {
        Numbers x;
        columns.Load(of_x, column, left, x);
#pragma unroll
        for (int n = 0; n < kNeighbours; ++n) {
          if (n < left) sum = ptx::Add(sum, x[n]);
        }
      });
      mean = ptx::Divide(OverLanes(sum, lanes), count);
    }
    float squares = 0;
    columns.ForEach([&](int column, int left) {
      Numbers x;
      columns.Load(of_x, column, left, x);
#pragma unroll
      for (int n = 0; n < kNeighbours; ++n) {
        const float away = ptx::Subtract(x[n], mean);
        if (n < left) squares = ptx::Fma(away, away, squares);
      }
    });
    const float variance = ptx::Divide(OverLanes(squares, lanes), count);
    return {mean, ptx::Divide(1, ptx::SquareRoot(ptx::Add(variance, epsilon)))};
  }

  template <class Columns>
  ATTN_HD static void Forward(const NormDesc& d, const Columns& columns, const DenseStatistics& s) {
    const DenseTensor of_x = d.x, weight = d.weight, bias = d.bias, out = d.out;
    const float offset = d.weight_offset;
    const int32_t round_element = d.round_element;
    columns.ForEach([&](int column, int left) {
      Numbers y, factors, biases = {};
      columns.Load(of_x, column, left, y);
      Columns::Factors(weight, offset, column, left, factors);
      if (bias.data != nullptr) Columns::Biases(bias, column, left, biases);
#pragma unroll
      for (int n = 0; n < kNeighbours; ++n) y[n] = Normalised(s, y[n]);
      Columns::Round(round_element, y);
#pragma unroll
      for (int n = 0; n < kNeighbours; ++n) {
        if (bias.data != nullptr) {
          y[n] = ptx::Fma(y[n], factors[n], biases[n]);
        } else if (weight.data != nullptr) {
          y[n] = ptx::Multiply(y[n], factors[n]);
        }
      }
      columns.Store(out, column, left, y);
    });
  }

  template <class Columns>
  ATTN_HD static void Backward(const NormDesc& d, const Columns& columns,
                               const DenseStatistics& s) {
    const DenseTensor of_x = d.x, of_dy = d.dy, weight = d.weight, out = d.out;
    const float offset = d.weight_offset;
    const auto count = static_cast<float>(d.count);
    const int lanes = d.lanes;
    const bool adds = d.add != 0, is_centred = d.is_centred != 0;
    float sum = 0, along = 0;
    columns.ForEach([&](int column, int left) {
      Numbers x, dy, factors;
      columns.Load(of_x, column, left, x);
      columns.Load(of_dy, column, left, dy);
      Columns::Factors(weight, offset, column, left, factors);
#pragma unroll
      for (int n = 0; n < kNeighbours; ++n) {
        if (n >= left) break;
        const float dn = ptx::Multiply(dy[n], factors[n]);
        sum = ptx::Add(sum, dn);
        along = ptx::Fma(dn, Normalised(s, x[n]), along);
      }
    });
    const float of_mean = is_centred ? ptx::Divide(OverLanes(sum, lanes), count) : 0;
    const float of_along = ptx::Divide(OverLanes(along, lanes), count);
    columns.ForEach([&](int column, int left) {
      Numbers x, dy, factors;
      columns.Load(of_x, column, left, x);
      columns.Load(of_dy, column, left, dy);
      Columns::Factors(weight, offset, column, left, factors);
#pragma unroll
      for (int n = 0; n < kNeighbours; ++n) {
        const float dn = ptx::Multiply(dy[n], factors[n]);
        const float less = ptx::Fma(-Normalised(s, x[n]), of_along, ptx::Subtract(dn, of_mean));
        x[n] = ptx::Multiply(less, s.rstd);
      }
      if (adds) columns.Add(out, column, left, x);
      columns.Store(out, column, left, x);
    });
  }
};

using NormKernel = NormKernelOf<true>;
// Apart, since its registers would be those of the other.
using AnyNormKernel = NormKernelOf<false>;

}  // namespace attnd
