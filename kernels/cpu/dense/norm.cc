#include "kernels/cpu/dense/norm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/dense/norm.cc"
#include "kernels/cpu/targets.h"
//
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/dense/chunks-inl.h"
#include "kernels/cpu/dense/dense_product.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

// One vector of x, chunk by chunk.
class NormVector {
 public:
  NormVector(const NormOperands& norm, int64_t vector) : norm_(norm), begin_(vector * norm.count) {}

  NormStatistics Statistics() const {
    const float mean = norm_.is_centred
                           ? Sum([](FloatVector x) { return x; }) / static_cast<float>(norm_.count)
                           : 0.0f;
    const FloatVector centre = hn::Set(FloatTag(), mean);
    const float square = Sum([&](FloatVector x) {
      const FloatVector away = hn::Sub(x, centre);
      return hn::Mul(away, away);
    });
    const double variance = double{square} / static_cast<double>(norm_.count);
    return {mean, static_cast<float>(1 / std::sqrt(variance + double{norm_.epsilon}))};
  }

  // (x − mean)·rstd of columns [first, first + count).
  void Normalised(const NormStatistics& s, int64_t first, int64_t count, float* out) const {
    const FloatTag d;
    alignas(64) Chunk buffer;
    const float* x = Floats(norm_.x.element, norm_.x.data, begin_ + first, count, buffer);
    const FloatVector mean = hn::Set(d, s.mean), rstd = hn::Set(d, s.rstd);
    for (int64_t n = 0; n < count; n += kLanes) {
      hn::StoreU(hn::Mul(hn::Sub(hn::LoadU(d, x + n), mean), rstd), d, out + n);
    }
  }
  void Rounded(int64_t count, float* normalised) const {
    if (norm_.round_before_weight.has_value()) {
      RoundFloats(*norm_.round_before_weight, normalised, count);
    }
  }

  // w + offset, or 1.
  void Factors(int64_t first, int64_t count, float* out) const {
    const FloatTag d;
    if (norm_.weight.data == nullptr) {
      for (int64_t n = 0; n < count; n += kLanes) hn::StoreU(hn::Set(d, 1.0f), d, out + n);
      return;
    }
    LoadFloats(norm_.weight.element, norm_.weight.data, first, count, out);
    const FloatVector offset = hn::Set(d, norm_.weight_offset);
    for (int64_t n = 0; n < count; n += kLanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, out + n), offset), d, out + n);
    }
  }

  int64_t begin() const { return begin_; }

  template <class Body>
  void ForEachChunk(const Body& body) const {
    for (int64_t first = 0; first < norm_.count; first += kChunk) {
      body(first, std::min(kChunk, norm_.count - first));
    }
  }

 private:
  template <class Function>
  float Sum(const Function& f) const {
    const FloatTag d;
    FloatVector sum = hn::Zero(d);
    ForEachChunk([&](int64_t first, int64_t count) {
      alignas(64) Chunk buffer;
      const float* x = Floats(norm_.x.element, norm_.x.data, begin_ + first, count, buffer);
      for (int64_t n = 0; n < count; n += kLanes) {
        FloatVector term = f(hn::LoadU(d, x + n));
        if (count - n < kLanes) term = hn::IfThenElseZero(hn::FirstN(d, count - n), term);
        sum = hn::Add(sum, term);
      }
    });
    return hn::GetLane(hn::SumOfLanes(d, sum));
  }

  const NormOperands& norm_;
  const int64_t begin_;
};

void NormForwardImpl(const NormOperands& norm, Tensor y, IndexRange vectors) {
  const FloatTag d;
  for (int64_t v = vectors.first; v < vectors.first + vectors.count; ++v) {
    const NormVector vector(norm, v);
    const NormStatistics statistics = vector.Statistics();
    vector.ForEachChunk([&](int64_t first, int64_t count) {
      alignas(64) Chunk out, factors, bias = {};
      vector.Normalised(statistics, first, count, out);
      vector.Rounded(count, out);
      vector.Factors(first, count, factors);
      const bool has_bias = norm.bias.data != nullptr;
      if (has_bias) LoadFloats(norm.bias.element, norm.bias.data, first, count, bias);
      for (int64_t n = 0; n < count; n += kLanes) {
        const FloatVector x = hn::LoadU(d, out + n), w = hn::LoadU(d, factors + n);
        hn::StoreU(has_bias ? hn::MulAdd(x, w, hn::LoadU(d, bias + n)) : hn::Mul(x, w), d, out + n);
      }
      StoreFloats(out, y.element, y.data, vector.begin() + first, count);
    });
  }
}

// dn = dy·(w + offset) of a chunk.
HWY_INLINE void ScaledGradient(const NormVector& vector, ConstTensor dy, int64_t first,
                               int64_t count, float* out) {
  const FloatTag d;
  alignas(64) Chunk buffer;
  const float* from = Floats(dy.element, dy.data, vector.begin() + first, count, buffer);
  vector.Factors(first, count, out);
  for (int64_t n = 0; n < count; n += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, from + n), hn::LoadU(d, out + n)), d, out + n);
  }
}

void NormBackwardImpl(const NormOperands& norm, ConstTensor dy, Tensor dx, bool add,
                      NormStatistics* statistics, IndexRange vectors) {
  const FloatTag d;
  for (int64_t v = vectors.first; v < vectors.first + vectors.count; ++v) {
    const NormVector vector(norm, v);
    const NormStatistics s = statistics[v] = vector.Statistics();
    FloatVector mean = hn::Zero(d), along = hn::Zero(d);
    vector.ForEachChunk([&](int64_t first, int64_t count) {
      alignas(64) Chunk dn, x;
      ScaledGradient(vector, dy, first, count, dn);
      vector.Normalised(s, first, count, x);
      for (int64_t n = 0; n < count; n += kLanes) {
        const auto here = hn::FirstN(d, std::min<int64_t>(kLanes, count - n));
        const FloatVector gradient = hn::IfThenElseZero(here, hn::LoadU(d, dn + n));
        const FloatVector place = hn::IfThenElseZero(here, hn::LoadU(d, x + n));
        mean = hn::Add(mean, gradient);
        along = hn::MulAdd(gradient, place, along);
      }
    });
    const float scale = 1.0f / static_cast<float>(norm.count);
    const float of_mean = norm.is_centred ? hn::GetLane(hn::SumOfLanes(d, mean)) * scale : 0.0f;
    const float of_along = hn::GetLane(hn::SumOfLanes(d, along)) * scale;
    vector.ForEachChunk([&](int64_t first, int64_t count) {
      alignas(64) Chunk dn, x;
      ScaledGradient(vector, dy, first, count, dn);
      vector.Normalised(s, first, count, x);
      for (int64_t n = 0; n < count; n += kLanes) {
        const FloatVector less = hn::NegMulAdd(hn::LoadU(d, x + n), hn::Set(d, of_along),
                                               hn::Sub(hn::LoadU(d, dn + n), hn::Set(d, of_mean)));
        hn::StoreU(hn::Mul(less, hn::Set(d, s.rstd)), d, dn + n);
      }
      StoreOrAdd(dn, add, dx.element, dx.data, vector.begin() + first, count);
    });
  }
}

// The sums of a chunk of columns over some vectors.
struct NormSums {
  alignas(64) Chunk weight = {}, bias = {};
  void Add(const float* dy, const float* n, int64_t count) {
    const FloatTag d;
    for (int64_t at = 0; at < count; at += kLanes) {
      const FloatVector gradient = hn::LoadU(d, dy + at);
      hn::StoreU(hn::MulAdd(gradient, hn::LoadU(d, n + at), hn::LoadU(d, weight + at)), d,
                 weight + at);
      hn::StoreU(hn::Add(gradient, hn::LoadU(d, bias + at)), d, bias + at);
    }
  }
  void Add(const NormSums& other, int64_t count) {
    const FloatTag d;
    for (int64_t at = 0; at < count; at += kLanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, weight + at), hn::LoadU(d, other.weight + at)), d,
                 weight + at);
      hn::StoreU(hn::Add(hn::LoadU(d, bias + at), hn::LoadU(d, other.bias + at)), d, bias + at);
    }
  }
};

void AddNormGradientsImpl(const NormOperands& norm, const NormGradients& g, IndexRange columns) {
  constexpr int64_t kStretch = 32;  // vectors: no chain is long
  const int64_t block = kGradientBlockRows * g.per_row;
  for (int64_t n = 0; n < columns.count; n += kChunk) {
    const int64_t first = columns.first + n, count = std::min(kChunk, columns.count - n);
    for (int64_t begin = 0; begin < g.vectors; begin += block) {
      const int64_t end = std::min(g.vectors, begin + block);
      NormSums sums;
      for (int64_t v = begin; v < end; v += kStretch) {
        NormSums stretch;
        for (int64_t at = v; at < std::min(end, v + kStretch); ++at) {
          alignas(64) Chunk buffer, x;
          const NormVector vector(norm, at);
          const float* dy = Floats(g.dy.element, g.dy.data, vector.begin() + first, count, buffer);
          vector.Normalised(g.statistics[at], first, count, x);
          vector.Rounded(count, x);
          stretch.Add(dy, x, count);
        }
        sums.Add(stretch, count);
      }
      const ElementType element = ElementType::kFloat32;
      if (g.d_weight != nullptr) StoreOrAdd(sums.weight, true, element, g.d_weight, first, count);
      if (g.d_bias != nullptr) StoreOrAdd(sums.bias, true, element, g.d_bias, first, count);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {

HWY_EXPORT(NormForwardImpl);
HWY_EXPORT(NormBackwardImpl);
HWY_EXPORT(AddNormGradientsImpl);

void NormForward(const NormOperands& norm, Tensor y, IndexRange vectors) {
  HWY_DYNAMIC_DISPATCH(NormForwardImpl)(norm, y, vectors);
}

void NormBackward(const NormOperands& norm, ConstTensor dy, Tensor dx, bool add,
                  NormStatistics* statistics, IndexRange vectors) {
  HWY_DYNAMIC_DISPATCH(NormBackwardImpl)(norm, dy, dx, add, statistics, vectors);
}

void AddNormGradients(const NormOperands& norm, const NormGradients& gradients,
                      IndexRange columns) {
  HWY_DYNAMIC_DISPATCH(AddNormGradientsImpl)(norm, gradients, columns);
}

}  // namespace attnd
#endif
