// Stretches of tensors in any element as floats, and back. Included once per Highway target;
// kernels/cpu only.
#if defined(ATTND_KERNELS_CPU_DENSE_CHUNKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_CPU_DENSE_CHUNKS_INL_H_
#undef ATTND_KERNELS_CPU_DENSE_CHUNKS_INL_H_
#else
#define ATTND_KERNELS_CPU_DENSE_CHUNKS_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "kernels/cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kChunk = 512;  // floats: a few of them lie in a first-level cache
using Chunk = float[kChunk];     // alignas(64) where it is declared

// Asks for the lines of `count` numbers. Rows of a matrix lie pages apart, where hardware does not
// look ahead: to be called kRowsAhead rows before.
constexpr int kRowsAhead = 8;
inline void AskFor(ElementType element, const void* from, int64_t index, int64_t count) {
  const int64_t bytes = ElementBytes(element);
  const uint8_t* line = static_cast<const uint8_t*>(from) + index * bytes;
  for (int64_t n = 0; n < count * bytes; n += 64) hwy::Prefetch(line + n);
}

// `count` floats at `out`, zero up to a whole vector.
inline void LoadFloats(ElementType element, const void* from, int64_t index, int64_t count,
                       float* HWY_RESTRICT out) {
  WithElement(element, [&]<ElementType kElement>() {
    for (int64_t n = 0; n < count; n += kLanes) {
      hn::StoreU(LoadFirst<kElement>(from, index + n, count - n), FloatTag(), out + n);
    }
  });
}

inline void StoreFloats(const float* HWY_RESTRICT from, ElementType element, void* to,
                        int64_t index, int64_t count) {
  WithElement(element, [&]<ElementType kElement>() {
    for (int64_t n = 0; n < count; n += kLanes) {
      StoreFirst<kElement>(hn::LoadU(FloatTag(), from + n), to, index + n, count - n);
    }
  });
}

// In place, as if they had been stored in `element`. Whole vectors.
inline void RoundFloats(ElementType element, float* floats, int64_t count) {
  if (element == ElementType::kFloat32) return;
  WithElement(element, [&]<ElementType kElement>() {
    alignas(64) uint8_t stored[kLanes * 4];
    const FloatTag d;
    for (int64_t n = 0; n < count; n += kLanes) {
      FloatVector x = hn::LoadU(d, floats + n);
      if constexpr (kElement == ElementType::kBFloat16) {
        const hn::RebindToUnsigned<FloatTag> du;
        x = hn::BitCast(d, hn::And(BFloat16Bits(x), hn::Set(du, 0xffff0000u)));
      } else {
        StoreVector<kElement>(x, stored, 0);
        x = LoadVector<kElement>(stored, 0);
      }
      hn::StoreU(x, d, floats + n);
    }
  });
}

// As they are, where that needs no copy: float32, in whole vectors.
inline const float* Floats(ElementType element, const void* from, int64_t index, int64_t count,
                           float* buffer) {
  if (element == ElementType::kFloat32 && count % kLanes == 0) {
    return static_cast<const float*>(from) + index;
  }
  LoadFloats(element, from, index, count, buffer);
  return buffer;
}

// to ← floats, or to ← to + floats: these are rounded first, then the sum. Changes `floats`.
inline void StoreOrAdd(float* floats, bool add, ElementType element, void* to, int64_t index,
                       int64_t count) {
  if (add) {
    alignas(64) Chunk old;
    RoundFloats(element, floats, count);
    const float* sums = Floats(element, to, index, count, old);
    for (int64_t n = 0; n < count; n += kLanes) {
      const auto sum = hn::Add(hn::LoadU(FloatTag(), sums + n), hn::LoadU(FloatTag(), floats + n));
      hn::StoreU(sum, FloatTag(), floats + n);
    }
  }
  StoreFloats(floats, element, to, index, count);
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();
#endif
