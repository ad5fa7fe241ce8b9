// NormKernel: layer and RMS normalisation of vectors that lie end to end, and its gradient, a warp
// a vector (NormDesc).
//   mean = Σx/n (RMS: 0)   rstd = 1/√(Σ(x − mean)²/n + ε)   ν = (x − mean)·rstd
//   y = round(ν)·(w + offset) + b
//   dn = dy·(w + offset)   dx = (dn − Σdn/n − ν·Σ(dn·ν)/n)·rstd   (RMS: without Σdn/n)
// Sums: a lane's columns are a chain, eight neighbours in every 256; then a tree over lanes. A
// vector's bits depend on the vector alone. Where rows are whole 16 bytes of one element a stretch
// of them is loaded at once. A vector of 16-bit numbers that is one stretch, 1,024 columns, is read
// once and kept in registers; others are read for each of the sums and for the result, from the
// cache but for the first time. A chain of functions (chain.h) may come before, which stores what
// the norm reads, and another behind.
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
    const NormDesc d = *static_cast<const NormDesc*>(params.dense);  // read at once
    const int64_t vector = int64_t{at.block} * kNormVectorsOfBlock + (at.thread >> 5);
    if (vector >= d.vectors) return;
    const Vector v = {d, vector * d.count, static_cast<uint32_t>(vector), at.thread & 31};
    Stretch numbers;  // of a vector that is kept
                      // One place for both chains: two would be twice the code, and its registers.
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      if (side == 1) Normalise(v, vector, numbers);
      RunChain(v, side == 0 ? d.in : d.out, side == 0 ? d.before : d.after, side == 1 && v.IsKept(),
               numbers);
    }
  }

 private:
  static constexpr int kStep = 32 * kNeighbours, kTogether = 4;
  using Numbers = float[kNeighbours];
  using Stretch = float[kTogether][kNeighbours];

  // A lane's columns are those from kNeighbours * lane on, in steps of kStep.
  struct Vector {
    const NormDesc& desc;
    int64_t begin;
    uint32_t row;
    int lane;

    ATTN_HD bool IsWhole(const DenseTensor& t) const {
      return t.data == nullptr || (reinterpret_cast<uint64_t>(t.data) & 15) == 0;
    }
    // All tensors in whole 16 bytes, the rows of one element.
    ATTN_HD bool IsWhole() const {
      const int32_t element = desc.x.element;
      return desc.count % kNeighbours == 0 && desc.out.element == element &&
             (desc.is_backward == 0 || desc.dy.element == element) && IsWhole(desc.x) &&
             IsWhole(desc.dy) && IsWhole(desc.out) && IsWhole(desc.weight) && IsWhole(desc.bias);
    }
    ATTN_HD bool IsKept() const {
      return desc.count <= kTogether * kStep && desc.x.element != kBiasFloat32 && IsWhole();
    }
    template <class Body>
    ATTN_HD void ForStretches(int steps, const Body& body) const {
#pragma unroll 1
      for (int first = lane * kNeighbours; first < desc.count; first += steps * kStep) body(first);
    }
  };

  // Runs a chain on the numbers of `from`, or on those that are kept.
  ATTN_HD static void RunChain(const Vector& v, const DenseTensor& from, const NormChain& chain,
                               bool is_kept, Stretch& numbers) {
    if (chain.count == 0) return;
    v.ForStretches(kTogether, [&](int first) {
      if (!is_kept) {
#pragma unroll
        for (int s = 0; s < kTogether; ++s) {
          const int column = first + s * kStep, left = v.desc.count - column;
          if (left > 0) LoadNeighbours(from, v.begin + column, left, numbers[s]);
        }
      }
      RunChain(v, first, chain, numbers);
    });
  }
  // Steps of columns take their turns at one place, so that a chain's code stands here once.
  ATTN_HD static void RunChain(const Vector& v, int first, const NormChain& chain,
                               Stretch& numbers) {
#pragma unroll 1
    for (int s = 0; s < kTogether; ++s) {
      const int column = first + s * kStep, left = v.desc.count - column;
      Numbers now;
#pragma unroll
      for (int n = 0; n < kNeighbours; ++n) {
        now[n] = numbers[0][n];
#pragma unroll
        for (int next = 1; next < kTogether; ++next) numbers[next - 1][n] = numbers[next][n];
      }
      if (left > 0) {
        const NeighboursPlace place = {v.row, static_cast<uint32_t>(column),
                                       left < kNeighbours ? left : kNeighbours};
        attnd::RunChain(chain.steps, chain.count, place, v.begin + column, now);
      }
#pragma unroll
      for (int n = 0; n < kNeighbours; ++n) numbers[kTogether - 1][n] = now[n];
    }
  }

  ATTN_HD static void Normalise(const Vector& v, int64_t vector, Stretch& numbers) {
    if (!v.IsWhole()) {
      Norm<AnyRows>(v, vector, numbers);
    } else if (v.desc.x.element == kBiasFloat32) {
      Norm<WholeFloats>(v, vector, numbers);
    } else if (v.desc.x.element == kBiasFloat16) {
      Norm<WholeHalves<Float16>>(v, vector, numbers);
    } else {
      Norm<WholeHalves<BFloat16>>(v, vector, numbers);
    }
  }

  // Eight neighbours as they lie in registers, and how many steps of them are loaded together.
  struct Eight {
    float numbers[kNeighbours];
  };
  struct AnyRows {
    static constexpr int kSteps = 1;
    using Words = Eight;
    ATTN_HD static void Load(const DenseTensor& t, int64_t index, int left, Words& words) {
      LoadNeighbours(t, index, left, words.numbers);
    }
    ATTN_HD static void Unpack(const Words& words, Numbers& numbers) {
#pragma unroll
      for (int n = 0; n < kNeighbours; ++n) numbers[n] = words.numbers[n];
    }
    ATTN_HD static void LoadFactors(const DenseTensor& t, int64_t index, int left,
                                    Numbers& numbers) {
      LoadNeighbours(t, index, left, numbers);
    }
    ATTN_HD static void Store(const DenseTensor& t, int64_t index, int left,
                              const Numbers& numbers) {
      StoreNeighbours(t, index, left, numbers);
    }
    ATTN_HD static bool Has(int n, int left) { return n < left; }
  };
  struct WholeRows {
    ATTN_HD static void LoadFactors(const DenseTensor& t, int64_t index, int, Numbers& numbers) {
      LoadChunk(t, index, numbers);
    }
    ATTN_HD static bool Has(int, int) { return true; }
  };
  struct WholeFloats : WholeRows {
    static constexpr int kSteps = 2;
    using Words = Eight;
    ATTN_HD static void Load(const DenseTensor& t, int64_t index, int, Words& words) {
      LoadFloats(static_cast<const char*>(t.data) + index * 4, words.numbers);
    }
    ATTN_HD static void Unpack(const Words& words, Numbers& numbers) {
      AnyRows::Unpack(words, numbers);
    }
    ATTN_HD static void Store(const DenseTensor& t, int64_t index, int, const Numbers& numbers) {
      StoreFloats(static_cast<char*>(t.data) + index * 4, numbers);
    }
  };
  template <class Element>
  struct WholeHalves : WholeRows {
    static constexpr int kSteps = kTogether;
    using Words = uint4;
    ATTN_HD static void Load(const DenseTensor& t, int64_t index, int, Words& words) {
      words = ptx::LoadGlobal128(static_cast<const char*>(t.data) + index * 2);
    }
    ATTN_HD static void Unpack(const Words& words, Numbers& numbers) {
      attnd::Unpack<Element>(words, numbers);
    }
    ATTN_HD static Words Pack(const Numbers& numbers) { return Packed<Element>(numbers); }
    ATTN_HD static void Store(const DenseTensor& t, int64_t index, int, const Numbers& numbers) {
      ptx::StoreGlobal128(static_cast<char*>(t.data) + index * 2, Packed<Element>(numbers));
    }
  };

  // body(step, column, how many columns there are from it on).
  template <class Rows, class Body>
  ATTN_HD static void ForSteps(const Vector& v, int first, const Body& body) {
#pragma unroll
    for (int s = 0; s < Rows::kSteps; ++s) {
      const int column = first + s * kStep;
      if (column < v.desc.count) body(s, column, v.desc.count - column);
    }
  }
  template <class Rows>
  ATTN_HD static void Load(const Vector& v, const DenseTensor& t, int first,
                           typename Rows::Words (&to)[Rows::kSteps]) {
    ForSteps<Rows>(v, first, [&](int s, int column, int left) {
      Rows::Load(t, v.begin + column, left, to[s]);
    });
  }
  template <class Rows>
  ATTN_HD static void LoadFactors(const Vector& v, int column, int left, Numbers& factors) {
    const NormDesc& d = v.desc;
    if (d.weight.data != nullptr) Rows::LoadFactors(d.weight, column, left, factors);
#pragma unroll
    for (int n = 0; n < kNeighbours; ++n) {
      factors[n] = d.weight.data == nullptr ? 1 : ptx::Add(factors[n], d.weight_offset);
    }
  }

  ATTN_HD static float OverLanes(float sum) {
    for (int mask = 16; mask > 0; mask >>= 1) sum = ptx::Add(sum, ptx::ShuffleXor(sum, mask));
    return sum;
  }

  // `kept`: the numbers that the chain before has left, if there is one; at the end the result's.
  template <class Rows>
  ATTN_HD static void Norm(const Vector& v, int64_t vector, Stretch& kept) {
    const NormDesc& d = v.desc;
    const bool is_kept = Rows::kSteps == kTogether && v.IsKept(), is_backward = d.is_backward != 0;
    typename Rows::Words x[Rows::kSteps], dy[Rows::kSteps];
    if constexpr (Rows::kSteps == kTogether) {
      if (is_kept) Begin<Rows>(v, kept, x, dy);
    }
    const auto load = [&](int first, bool both) {
      if (is_kept) return;
      Load<Rows>(v, d.x, first, x);
      if (both) Load<Rows>(v, d.dy, first, dy);
    };
    const DenseStatistics of = Statistics<Rows>(v, load, x);
    float of_mean = 0, of_along = 0;
    if (is_backward) {
      if (v.lane == 0) {
        ptx::StoreGlobalFloat(&d.statistics[vector].mean, of.mean);
        ptx::StoreGlobalFloat(&d.statistics[vector].rstd, of.rstd);
      }
      float sum = 0, along = 0;
      v.ForStretches(Rows::kSteps, [&](int first) {
        load(first, true);
        ForSteps<Rows>(v, first, [&](int s, int column, int left) {
          Numbers factors, of_x, of_dy;
          LoadFactors<Rows>(v, column, left, factors);
          Rows::Unpack(x[s], of_x);
          Rows::Unpack(dy[s], of_dy);
#pragma unroll
          for (int n = 0; n < kNeighbours; ++n) {
            if (!Rows::Has(n, left)) break;
            const float dn = ptx::Multiply(of_dy[n], factors[n]);
            sum = ptx::Add(sum, dn);
            along = ptx::Fma(dn, Normalised(of, of_x[n]), along);
          }
        });
      });
      const auto count = static_cast<float>(d.count);
      of_mean = d.is_centred != 0 ? ptx::Divide(OverLanes(sum), count) : 0;
      of_along = ptx::Divide(OverLanes(along), count);
    }
    v.ForStretches(Rows::kSteps, [&](int first) {
      load(first, is_backward);
      ForSteps<Rows>(v, first, [&](int s, int column, int left) {
        Numbers factors, result, beside;
        LoadFactors<Rows>(v, column, left, factors);
        Rows::Unpack(x[s], result);
        if (is_backward) {
          Rows::Unpack(dy[s], beside);
#pragma unroll
          for (int n = 0; n < kNeighbours; ++n) {
            const float dn = ptx::Multiply(beside[n], factors[n]);
            const float less =
                ptx::Fma(-Normalised(of, result[n]), of_along, ptx::Subtract(dn, of_mean));
            result[n] = ptx::Multiply(less, of.rstd);
          }
          if (d.add != 0) {
            typename Rows::Words there;
            Rows::Load(d.out, v.begin + column, left, there);
            Rows::Unpack(there, beside);
#pragma unroll
            for (int n = 0; n < kNeighbours; ++n) {
              result[n] = Added(d.out.element, beside[n], result[n]);
            }
          }
        } else {
          if (d.bias.data != nullptr) Rows::LoadFactors(d.bias, column, left, beside);
#pragma unroll
          for (int n = 0; n < kNeighbours; ++n) {
            const float y = RoundTo(d.round_element, Normalised(of, result[n]));
            result[n] = d.bias.data != nullptr     ? ptx::Fma(y, factors[n], beside[n])
                        : d.weight.data != nullptr ? ptx::Multiply(y, factors[n])
                                                   : y;
          }
        }
        if (d.stores != 0 || !is_kept) Rows::Store(d.out, v.begin + column, left, result);
        if (!is_kept || d.after.count == 0) return;
#pragma unroll
        for (int n = 0; n < kNeighbours; ++n) kept[s][n] = RoundTo(d.out.element, result[n]);
      });
    });
  }
  // Brings the rows of a vector that is kept.
  template <class Rows>
  ATTN_HD static void Begin(const Vector& v, const Stretch& kept,
                            typename Rows::Words (&x)[kTogether],
                            typename Rows::Words (&dy)[kTogether]) {
    const NormDesc& d = v.desc;
    const int first = v.lane * kNeighbours;
    const bool is_backward = d.is_backward != 0, has_chain = d.before.count != 0;
    if (is_backward || !has_chain) Load<Rows>(v, d.x, first, x);
    if (is_backward && !has_chain) Load<Rows>(v, d.dy, first, dy);
    if (!has_chain) return;
#pragma unroll
    for (int s = 0; s < kTogether; ++s) {
      if (is_backward) {
        dy[s] = Rows::Pack(kept[s]);
      } else {
        x[s] = Rows::Pack(kept[s]);
      }
    }
  }
  template <class Rows, class LoadStretch>
  ATTN_HD static DenseStatistics Statistics(const Vector& v, const LoadStretch& load,
                                            const typename Rows::Words (&x)[Rows::kSteps]) {
    const auto count = static_cast<float>(v.desc.count);
    float mean = 0, squares = 0;
    if (v.desc.is_centred != 0) {
      float sum = 0;
      v.ForStretches(Rows::kSteps, [&](int first) {
        load(first, false);
        ForSteps<Rows>(v, first, [&](int s, int, int left) {
          Numbers of_x;
          Rows::Unpack(x[s], of_x);
#pragma unroll
          for (int n = 0; n < kNeighbours; ++n) {
            if (Rows::Has(n, left)) sum = ptx::Add(sum, of_x[n]);
          }
        });
      });
      mean = ptx::Divide(OverLanes(sum), count);
    }
    v.ForStretches(Rows::kSteps, [&](int first) {
      load(first, false);
      ForSteps<Rows>(v, first, [&](int s, int, int left) {
        Numbers of_x;
        Rows::Unpack(x[s], of_x);
#pragma unroll
        for (int n = 0; n < kNeighbours; ++n) {
          const float away = ptx::Subtract(of_x[n], mean);
          if (Rows::Has(n, left)) squares = ptx::Fma(away, away, squares);
        }
      });
    });
    const float variance = ptx::Divide(OverLanes(squares), count);
    return {mean, ptx::Divide(1, ptx::SquareRoot(ptx::Add(variance, v.desc.epsilon)))};
  }
};

}  // namespace attnd
