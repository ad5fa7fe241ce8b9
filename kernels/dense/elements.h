// Single numbers of tensors whose element is told at run time. Errors: none. Threads: pure but for
// memory.
#pragma once

#include "kernels/dense/dense_params.h"
#include "kernels/ptx/scalar_instructions.h"
#include "kernels/rules/half_element.h"

namespace attnd {

ATTN_HD int32_t BytesOfElement(int32_t element) { return element == kBiasFloat32 ? 4 : 2; }

ATTN_HD float FloatOfHalf(int32_t element, uint32_t half) {
  return element == kBiasFloat16 ? ptx::LowHalf(half) : BFloat16::Low(half);
}
// Returns the number in the lower half of the word.
ATTN_HD uint32_t HalfOfFloat(int32_t element, float value) {
  return element == kBiasFloat16 ? Float16::Pack(value, 0) : BFloat16::Pack(value, 0);
}

ATTN_HD float LoadNumber(const void* data, int32_t element, int64_t index) {
  const char* at = static_cast<const char*>(data) + index * BytesOfElement(element);
  return element == kBiasFloat32 ? ptx::LoadGlobalFloat(at)
                                 : FloatOfHalf(element, ptx::LoadGlobal16(at));
}
ATTN_HD float LoadNumber(const DenseTensor& t, int64_t index) {
  return LoadNumber(t.data, t.element, index);
}
// Numbers `step` apart.
struct Strided {
  int64_t first, step;
  ATTN_HD int64_t operator()(int n) const { return first + n * step; }
};
// numbers[n] ← number index(n) of t, for n < count, else 0. No load waits for another.
template <int kNumbers, class IndexOf>
ATTN_HD void LoadNumbers(const DenseTensor& t, int count, const IndexOf& index,
                         float (&numbers)[kNumbers]) {
  if (t.element == kBiasFloat32) {
    const auto* at = static_cast<const float*>(t.data);
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) {
      numbers[n] = n < count ? ptx::LoadGlobalFloat(at + index(n)) : 0;
    }
    return;
  }
  const auto* at = static_cast<const uint16_t*>(t.data);
  uint32_t halves[kNumbers];
#pragma unroll
  for (int n = 0; n < kNumbers; ++n) halves[n] = n < count ? ptx::LoadGlobal16(at + index(n)) : 0;
#pragma unroll
  for (int n = 0; n < kNumbers; ++n) numbers[n] = FloatOfHalf(t.element, halves[n]);
}

// ---- Eight neighbours of a row, a thread's share where it may be: 16 bytes at a time where they
// are whole and aligned.
inline constexpr int kNeighbours = 8;
ATTN_HD bool IsChunk(const void* at, int count) {
  return count >= kNeighbours && (reinterpret_cast<uint64_t>(at) & 15) == 0;
}
ATTN_HD char* PlaceOf(const DenseTensor& t, int64_t index) {
  return static_cast<char*>(t.data) + index * BytesOfElement(t.element);
}
template <class Element>
ATTN_HD void Unpack(uint4 words, float (&numbers)[kNeighbours]) {
  const uint32_t word[] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    numbers[2 * n] = Element::Low(word[n]);
    numbers[2 * n + 1] = Element::High(word[n]);
  }
}
template <class Element>
ATTN_HD uint4 Packed(const float (&v)[kNeighbours]) {
  return make_uint4(Element::Pack(v[0], v[1]), Element::Pack(v[2], v[3]), Element::Pack(v[4], v[5]),
                    Element::Pack(v[6], v[7]));
}
ATTN_HD void LoadFloats(const char* at, float (&numbers)[kNeighbours]) {
#pragma unroll
  for (int n = 0; n < kNeighbours; n += 4) {
    const uint4 words = ptx::LoadGlobal128(at + n * 4);
    numbers[n] = ptx::BitsFloat(words.x);
    numbers[n + 1] = ptx::BitsFloat(words.y);
    numbers[n + 2] = ptx::BitsFloat(words.z);
    numbers[n + 3] = ptx::BitsFloat(words.w);
  }
}
ATTN_HD void StoreFloats(char* at, const float (&v)[kNeighbours]) {
#pragma unroll
  for (int n = 0; n < kNeighbours; n += 4) {
    ptx::StoreGlobal128(at + n * 4, make_uint4(ptx::FloatBits(v[n]), ptx::FloatBits(v[n + 1]),
                                               ptx::FloatBits(v[n + 2]), ptx::FloatBits(v[n + 3])));
  }
}
// numbers[n] ← number index + n of t, for n < count, else 0 or anything.
ATTN_HD void LoadNeighbours(const DenseTensor& t, int64_t index, int count,
                            float (&numbers)[kNeighbours]) {
  const char* at = PlaceOf(t, index);
  if (!IsChunk(at, count)) return LoadNumbers(t, count, Strided{index, 1}, numbers);
  if (t.element == kBiasFloat32) return LoadFloats(at, numbers);
  const uint4 words = ptx::LoadGlobal128(at);
  if (t.element == kBiasFloat16) {
    Unpack<Float16>(words, numbers);
  } else {
    Unpack<BFloat16>(words, numbers);
  }
}
ATTN_HD void StoreNumber(void* data, int32_t element, int64_t index, float value) {
  char* at = static_cast<char*>(data) + index * BytesOfElement(element);
  if (element == kBiasFloat32) {
    ptx::StoreGlobalFloat(at, value);
  } else {
    ptx::StoreGlobal16(at, HalfOfFloat(element, value));
  }
}

ATTN_HD void StoreNeighbours(const DenseTensor& t, int64_t index, int count,
                             const float (&numbers)[kNeighbours]) {
  char* at = PlaceOf(t, index);
  if (!IsChunk(at, count)) {
#pragma unroll
    for (int n = 0; n < kNeighbours; ++n) {
      if (n < count) StoreNumber(t.data, t.element, index + n, numbers[n]);
    }
    return;
  }
  if (t.element == kBiasFloat32) return StoreFloats(at, numbers);
  ptx::StoreGlobal128(
      at, t.element == kBiasFloat16 ? Packed<Float16>(numbers) : Packed<BFloat16>(numbers));
}

// Rounds as if it had been stored; kBiasNone leaves it as it is.
ATTN_HD float RoundTo(int32_t element, float value) {
  if (element == kBiasFloat32 || element == kBiasNone) return value;
  return FloatOfHalf(element, HalfOfFloat(element, value) & 0xffffu);
}

// How a kernel reads and writes groups of neighbours: of any tensors, or fast.
struct AnyNeighbours {
  static constexpr bool kAreWhole = false;
  struct Raw {};
  // Fetch has the memory begin to send what Load gives: number index + n of t, for n < count.
  ATTN_HD static void Fetch(const DenseTensor&, int64_t, Raw&) {}
  ATTN_HD static void Load(const Raw&, const DenseTensor& t, int64_t index, int count,
                           float (&numbers)[kNeighbours]) {
    LoadNeighbours(t, index, count, numbers);
  }
  ATTN_HD static void FloatsOf(const DenseTensor& t, int64_t index, int count,
                               float (&numbers)[kNeighbours]) {
    LoadNeighbours(t, index, count, numbers);
  }
  ATTN_HD static void Round(int32_t element, float (&numbers)[kNeighbours]) {
#pragma unroll
    for (int n = 0; n < kNeighbours; ++n) numbers[n] = RoundTo(element, numbers[n]);
  }
  ATTN_HD static void Store(const DenseTensor& t, int64_t index, int count,
                            const float (&numbers)[kNeighbours]) {
    StoreNeighbours(t, index, count, numbers);
  }
};
// All tensors have one element and, of a norm, its weights float32, and all groups are whole and
// aligned. A group waits in registers as it lies in memory.
struct WholeNeighbours {
  static constexpr bool kAreWhole = true;
  ATTN_HD static void FloatsOf(const DenseTensor& t, int64_t index, int,
                               float (&numbers)[kNeighbours]) {
    LoadFloats(static_cast<const char*>(t.data) + index * 4, numbers);
  }
};
struct WholeFloats : WholeNeighbours {
  struct Raw {
    float numbers[kNeighbours];
  };
  ATTN_HD static void Fetch(const DenseTensor& t, int64_t index, Raw& raw) {
    LoadFloats(static_cast<const char*>(t.data) + index * 4, raw.numbers);
  }
  ATTN_HD static void Load(const Raw& raw, const DenseTensor&, int64_t, int,
                           float (&numbers)[kNeighbours]) {
#pragma unroll
    for (int n = 0; n < kNeighbours; ++n) numbers[n] = raw.numbers[n];
  }
  ATTN_HD static void Round(int32_t, float (&)[kNeighbours]) {}
  ATTN_HD static void Store(const DenseTensor& t, int64_t index, int,
                            const float (&numbers)[kNeighbours]) {
    StoreFloats(static_cast<char*>(t.data) + index * 4, numbers);
  }
};
template <class Element>
struct WholeHalves : WholeNeighbours {
  using Raw = uint4;
  ATTN_HD static void Fetch(const DenseTensor& t, int64_t index, Raw& raw) {
    raw = ptx::LoadGlobal128(static_cast<const char*>(t.data) + index * Element::kBytes);
  }
  ATTN_HD static void Load(const Raw& raw, const DenseTensor&, int64_t, int,
                           float (&numbers)[kNeighbours]) {
    Unpack<Element>(raw, numbers);
  }
  ATTN_HD static void Round(int32_t element, float (&numbers)[kNeighbours]) {
    if (element != kBiasNone) Unpack<Element>(Packed<Element>(numbers), numbers);
  }
  ATTN_HD static void Store(const DenseTensor& t, int64_t index, int,
                            const float (&numbers)[kNeighbours]) {
    ptx::StoreGlobal128(static_cast<char*>(t.data) + index * Element::kBytes,
                        Packed<Element>(numbers));
  }
};
// Calls body(how), where `whole` is the element of all tensors.
template <class Body>
ATTN_HD void WithWholeNeighbours(int32_t whole, const Body& body) {
  if (whole == kBiasFloat32) return body(WholeFloats());
  if (whole == kBiasFloat16) return body(WholeHalves<Float16>());
  body(WholeHalves<BFloat16>());
}
// Or kBiasNone: any.
template <class Body>
ATTN_HD void WithNeighbours(int32_t whole, const Body& body) {
  if (whole == kBiasNone) return body(AnyNeighbours());
  WithWholeNeighbours(whole, body);
}
// numbers are rounded first, then, when they are stored, the sums.
template <class How>
ATTN_HD void AddNeighbours(const typename How::Raw& there, const DenseTensor& t, int64_t index,
                           int count, float (&numbers)[kNeighbours]) {
  float old[kNeighbours];
  How::Load(there, t, index, count, old);
  How::Round(t.element, numbers);
#pragma unroll
  for (int n = 0; n < kNeighbours; ++n) numbers[n] = ptx::Add(old[n], numbers[n]);
}

// out ← value, or out ← out + value: value is rounded first, then, when it is stored, the sum.
ATTN_HD void StoreOrAdd(void* data, int32_t element, int64_t index, float value, bool add) {
  if (add) value = ptx::Add(LoadNumber(data, element, index), RoundTo(element, value));
  StoreNumber(data, element, index, value);
}

}  // namespace attnd
