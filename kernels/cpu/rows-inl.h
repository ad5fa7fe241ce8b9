// Rows of tensors in any element type to and from padded float rows, and the packing of K and V.
// Included once per Highway target; kernels/cpu only.
#if defined(ATTND_KERNELS_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_CPU_ROWS_INL_H_
#undef ATTND_KERNELS_CPU_ROWS_INL_H_
#else
#define ATTND_KERNELS_CPU_ROWS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "attention/element.h"
#include "kernels/cpu/gemm-inl.h"
#include "kernels/cpu/tiles.h"
#include "kernels/cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Highway's own float16 conversions are exact where the processor has them.
#define ATTND_NATIVE_FLOAT16 (HWY_TARGET <= HWY_AVX2 || HWY_ARCH_ARM_A64)

template <ElementType kElement>
HWY_INLINE FloatVector LoadVector(const void* row, int64_t index) {
  const FloatTag d;
  if constexpr (kElement == ElementType::kFloat32) {
    return hn::LoadU(d, static_cast<const float*>(row) + index);
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(row) + index;
    const hn::Rebind<uint16_t, FloatTag> d16;
    if constexpr (kElement == ElementType::kBFloat16) {
      const hn::RebindToUnsigned<FloatTag> du;
      return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, from))));
    } else {
#if ATTND_NATIVE_FLOAT16
      const hn::Rebind<hwy::float16_t, FloatTag> dh;
      return hn::PromoteTo(d, hn::BitCast(dh, hn::LoadU(d16, from)));
#else
      alignas(64) float wide[kLanes];
      for (int n = 0; n < kLanes; ++n) wide[n] = FloatFromFloat16(from[n]);
      return hn::Load(d, wide);
#endif
    }
  }
}

// Numbers rounded to bfloat16: their bits in the upper halves; the lower ones mean nothing.
HWY_INLINE auto BFloat16Bits(FloatVector value) {
  const hn::RebindToUnsigned<FloatTag> du;
  const auto bits = hn::BitCast(du, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fff)));
  // A NaN keeps its upper half, made quiet; rounding could turn it into infinity.
  const auto nan = hn::RebindMask(du, hn::IsNaN(value));
  return hn::IfThenElse(nan, hn::Or(bits, hn::Set(du, 0x400000)), rounded);
}

template <ElementType kElement>
HWY_INLINE void StoreVector(FloatVector value, void* row, int64_t index) {
  const FloatTag d;
  if constexpr (kElement == ElementType::kFloat32) {
    hn::StoreU(value, d, static_cast<float*>(row) + index);
  } else {
    uint16_t* to = static_cast<uint16_t*>(row) + index;
    const hn::Rebind<uint16_t, FloatTag> d16;
    if constexpr (kElement == ElementType::kBFloat16) {
      const hn::RebindToSigned<FloatTag> di;
      hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, hn::ShiftRight<16>(BFloat16Bits(value)))), d16,
                 to);
    } else {
#if ATTND_NATIVE_FLOAT16
      const hn::Rebind<hwy::float16_t, FloatTag> dh;
      hn::StoreU(hn::BitCast(d16, hn::DemoteTo(dh, value)), d16, to);
#else
      alignas(64) float wide[kLanes];
      hn::Store(value, d, wide);
      for (int n = 0; n < kLanes; ++n) to[n] = Float16FromFloat(wide[n]);
#endif
    }
  }
}

// Lanes before `count` of elements at `row` + index, zero in the others; reads nothing beyond them.
template <ElementType kElement>
HWY_INLINE FloatVector LoadFirst(const void* row, int64_t index, int64_t count) {
  if (count >= kLanes) return LoadVector<kElement>(row, index);
  alignas(64) uint8_t copy[kLanes * 4] = {};
  constexpr int64_t kBytes = ElementBytes(kElement);
  std::memcpy(copy, static_cast<const uint8_t*>(row) + index * kBytes,
              std::max<int64_t>(count, 0) * kBytes);  // max: or g++ warns of vectors of one lane
  return LoadVector<kElement>(copy, 0);
}

template <ElementType kElement>
HWY_INLINE void StoreFirst(FloatVector value, void* row, int64_t index, int64_t count) {
  if (count >= kLanes) return StoreVector<kElement>(value, row, index);
  alignas(64) uint8_t copy[kLanes * 4];
  constexpr int64_t kBytes = ElementBytes(kElement);
  StoreVector<kElement>(value, copy, 0);
  std::memcpy(static_cast<uint8_t*>(row) + index * kBytes, copy, count * kBytes);
}

// Calls body.operator()<kElement>() for the run-time element type.
template <class Body>
HWY_INLINE auto WithElement(ElementType element, const Body& body) {
  switch (element) {
    case ElementType::kFloat16:
      return body.template operator()<ElementType::kFloat16>();
    case ElementType::kBFloat16:
      return body.template operator()<ElementType::kBFloat16>();
    default:
      return body.template operator()<ElementType::kFloat32>();
  }
}

// Rows of a tensor as they lie in memory: `count` elements each, `stride` elements apart.
struct RowsOf {
  const void* data;
  int64_t stride;
  int rows, count;
};

inline const void* RowAt(const RowsOf& from, ElementType element, int row) {
  return static_cast<const uint8_t*>(from.data) + row * from.stride * ElementBytes(element);
}

// Calls body(rows of one panel, the first of them) for each panel's rows.
template <class Body>
void ForEachPanel(ElementType element, const RowsOf& from, const Body& body) {
  for (int first = 0; first < from.rows; first += kMaxPanelColumns) {
    const int rows = HWY_MIN(kMaxPanelColumns, from.rows - first);
    body(RowsOf{RowAt(from, element, first), from.stride, rows, from.count}, int64_t{first});
  }
}

// Copies them to float rows of `out_stride`, zero up to a multiple of kMaxLanes. False if a number
// is infinite or NaN.
template <ElementType kElement>
bool CopyRowsAs(const RowsOf& from, float* HWY_RESTRICT out, int64_t out_stride) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const auto exponent = hn::Set(di, 0x7f800000);
  auto largest = hn::Zero(di);
  for (int r = 0; r < from.rows; ++r) {
    const void* row = RowAt(from, kElement, r);
    int c = 0;
    for (; c < from.count; c += kLanes) {
      FloatVector value = LoadFirst<kElement>(row, c, from.count - c);
      largest = hn::Max(largest, hn::And(hn::BitCast(di, value), exponent));
      hn::StoreU(value, d, out + r * out_stride + c);
    }
    for (; c < RoundUp(from.count, kMaxLanes); c += kLanes) {
      hn::StoreU(hn::Zero(d), d, out + r * out_stride + c);
    }
  }
  return hn::AllFalse(di, hn::Eq(largest, exponent));
}

inline bool CopyRows(ElementType element, const RowsOf& from, float* out, int64_t out_stride) {
  switch (element) {
    case ElementType::kFloat16:
      return CopyRowsAs<ElementType::kFloat16>(from, out, out_stride);
    case ElementType::kBFloat16:
      return CopyRowsAs<ElementType::kBFloat16>(from, out, out_stride);
    default:
      return CopyRowsAs<ElementType::kFloat32>(from, out, out_stride);
  }
}

// out[n] = factor·row[n], n < count, in the element type.
template <ElementType kElement>
void StoreRowAs(const float* row, float factor, int count, void* out) {
  const FloatTag d;
  const FloatVector scale = hn::Set(d, factor);
  for (int c = 0; c < count; c += kLanes) {
    StoreFirst<kElement>(hn::Mul(scale, LoadFirst<ElementType::kFloat32>(row, c, count - c)), out,
                         c, count - c);
  }
}

inline void StoreRow(ElementType element, const float* row, float factor, int count, void* out) {
  switch (element) {
    case ElementType::kFloat16:
      return StoreRowAs<ElementType::kFloat16>(row, factor, count, out);
    case ElementType::kBFloat16:
      return StoreRowAs<ElementType::kBFloat16>(row, factor, count, out);
    default:
      return StoreRowAs<ElementType::kFloat32>(row, factor, count, out);
  }
}

// True if all numbers of float32 rows are finite.
inline bool AreFinite(const RowsOf& from) {
  const hn::RebindToSigned<FloatTag> di;
  const auto exponent = hn::Set(di, 0x7f800000);
  auto largest = hn::Zero(di);
  for (int r = 0; r < from.rows; ++r) {
    const float* row = static_cast<const float*>(from.data) + r * from.stride;
    for (int c = 0; c < from.count; c += kLanes) {
      FloatVector value = LoadFirst<ElementType::kFloat32>(row, c, from.count - c);
      largest = hn::Max(largest, hn::And(hn::BitCast(di, value), exponent));
    }
  }
  return hn::AllFalse(di, hn::Eq(largest, exponent));
}

#if HWY_TARGET != HWY_SCALAR
// out[n·kPanelColumns + m] = rows[m·stride + n], m, n < 4.
HWY_INLINE void Transpose4x4(const float* HWY_RESTRICT rows, int64_t stride,
                             float* HWY_RESTRICT out) {
  const hn::FixedTag<float, 4> d;
  const auto r0 = hn::LoadU(d, rows), r1 = hn::LoadU(d, rows + stride);
  const auto r2 = hn::LoadU(d, rows + 2 * stride), r3 = hn::LoadU(d, rows + 3 * stride);
  const auto low01 = hn::InterleaveLower(d, r0, r1), low23 = hn::InterleaveLower(d, r2, r3);
  const auto high01 = hn::InterleaveUpper(d, r0, r1), high23 = hn::InterleaveUpper(d, r2, r3);
  hn::StoreU(hn::ConcatLowerLower(d, low23, low01), d, out);
  hn::StoreU(hn::ConcatUpperUpper(d, low23, low01), d, out + kPanelColumns);
  hn::StoreU(hn::ConcatLowerLower(d, high23, high01), d, out + 2 * kPanelColumns);
  hn::StoreU(hn::ConcatUpperUpper(d, high23, high01), d, out + 3 * kPanelColumns);
}
#endif

// Some keys, some numbers of each.
inline void TransposeBlock(const float* HWY_RESTRICT rows, int64_t stride, int keys, int numbers,
                           float* HWY_RESTRICT out) {
  int key = 0;
#if HWY_TARGET != HWY_SCALAR
  for (; key + 4 <= keys; key += 4) {
    const float* four = rows + key * stride;
    int n = 0;
    for (; n + 4 <= numbers; n += 4) Transpose4x4(four + n, stride, out + n * kPanelColumns + key);
    for (; n < numbers; ++n) {
      for (int m = 0; m < 4; ++m) out[n * kPanelColumns + key + m] = four[m * stride + n];
    }
  }
#endif
  for (; key < keys; ++key) {
    for (int n = 0; n < numbers; ++n) out[n * kPanelColumns + key] = rows[key * stride + n];
  }
}

// One panel of `count` keys, in blocks of whole cache lines on both sides: rows of K and of a panel
// lie so far apart that a first-level cache keeps few of either.
inline void TransposePanel(const float* HWY_RESTRICT rows, int64_t stride, int count, int dim,
                           float* HWY_RESTRICT panel) {
  constexpr int kBlock = 16;
  for (int key = 0; key < count; key += kBlock) {
    for (int n = 0; n < dim; n += kBlock) {
      TransposeBlock(rows + key * stride + n, stride, HWY_MIN(kBlock, count - key),
                     HWY_MIN(kBlock, dim - n), panel + n * kPanelColumns + key);
    }
  }
}

// Row-major floats [keys][stride] → panels [keys / kPanelColumns][dim][kPanelColumns], columns
// beyond `keys` zero up to a whole panel: B of a product with the transposed matrix.
inline void TransposeToPanels(const float* rows, int64_t stride, int keys, int dim, float* panels) {
  for (int first = 0; first < keys; first += kPanelColumns, panels += dim * kPanelColumns) {
    const int count = HWY_MIN(kPanelColumns, keys - first);
    if (count < kPanelColumns) std::memset(panels, 0, sizeof(float) * dim * kPanelColumns);
    TransposePanel(rows + first * stride, stride, count, dim, panels);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();
#endif
