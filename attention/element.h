// ElementType: how one number of a tensor is stored, and the exact conversions between 16-bit
// floats and float. Conversions to 16 bits round to nearest, ties to even; NaN stays NaN, overflow
// becomes infinity.
#pragma once

#include <cstdint>
#include <cstring>

#include "absl/strings/string_view.h"

namespace attnd {

enum class ElementType : uint8_t { kFloat16 = 1, kBFloat16 = 2, kFloat32 = 3 };

constexpr int64_t ElementBytes(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

constexpr absl::string_view ElementName(ElementType type) {
  switch (type) {
    case ElementType::kFloat16:
      return "float16";
    case ElementType::kBFloat16:
      return "bfloat16";
    case ElementType::kFloat32:
      return "float32";
  }
  return "unknown";
}

// As safetensors files name it.
constexpr absl::string_view DtypeName(ElementType type) {
  switch (type) {
    case ElementType::kFloat16:
      return "F16";
    case ElementType::kBFloat16:
      return "BF16";
    case ElementType::kFloat32:
      return "F32";
  }
  return "unknown";
}

inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float FloatFromBFloat16(uint16_t bits) { return FloatOf(uint32_t{bits} << 16); }

inline uint16_t BFloat16FromFloat(float value) {
  uint32_t bits = BitsOf(value);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);  // keep it a quiet NaN
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float FloatFromFloat16(uint16_t half) {
  uint32_t sign = uint32_t{half & 0x8000u} << 16;
  uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00) return FloatOf(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // 2^112 moves the exponent bias from 15 to 127, subnormals included, exactly.
  return FloatOf(sign | BitsOf(FloatOf(magnitude << 13) * 0x1p112f));
}

inline uint16_t Float16FromFloat(float value) {
  uint32_t bits = BitsOf(value);
  uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and above round to infinity
  if (magnitude < 0x38800000) {                       // below 2^-14: a subnormal of step 2^-24
    float shifted = FloatOf(magnitude) + 0.5f;  // its last bit is 2^-24, so this addition rounds
    return static_cast<uint16_t>(sign | (BitsOf(shifted) - 0x3f000000));
  }
  uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112 << 10)));
}

// One number of a tensor as a double or float, whatever its storage.
inline float LoadElement(ElementType type, const void* data, int64_t index) {
  switch (type) {
    case ElementType::kFloat32:
      return static_cast<const float*>(data)[index];
    case ElementType::kFloat16:
      return FloatFromFloat16(static_cast<const uint16_t*>(data)[index]);
    case ElementType::kBFloat16:
      return FloatFromBFloat16(static_cast<const uint16_t*>(data)[index]);
  }
  return 0;
}

inline void StoreElement(ElementType type, void* data, int64_t index, float value) {
  switch (type) {
    case ElementType::kFloat32:
      static_cast<float*>(data)[index] = value;
      return;
    case ElementType::kFloat16:
      static_cast<uint16_t*>(data)[index] = Float16FromFloat(value);
      return;
    case ElementType::kBFloat16:
      static_cast<uint16_t*>(data)[index] = BFloat16FromFloat(value);
      return;
  }
}

}  // namespace attnd
