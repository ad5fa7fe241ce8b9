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
// In the lower half of the word.
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
ATTN_HD void StoreNumber(void* data, int32_t element, int64_t index, float value) {
  char* at = static_cast<char*>(data) + index * BytesOfElement(element);
  if (element == kBiasFloat32) {
    ptx::StoreGlobalFloat(at, value);
  } else {
    ptx::StoreGlobal16(at, HalfOfFloat(element, value));
  }
}

// As if it had been stored; kBiasNone: as it is.
ATTN_HD float RoundTo(int32_t element, float value) {
  if (element == kBiasFloat32 || element == kBiasNone) return value;
  return FloatOfHalf(element, HalfOfFloat(element, value) & 0xffffu);
}

// value is rounded first, then, when it is stored, the sum.
ATTN_HD float Added(int32_t element, float there, float value) {
  return ptx::Add(there, RoundTo(element, value));
}
// out ← value, or out ← out + value.
ATTN_HD void StoreOrAdd(void* data, int32_t element, int64_t index, float value, bool add) {
  if (add) value = Added(element, LoadNumber(data, element, index), value);
  StoreNumber(data, element, index, value);
}

}  // namespace attnd
