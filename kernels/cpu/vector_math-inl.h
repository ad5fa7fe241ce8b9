// Exponentials and dropout bytes in vectors. Included once per Highway target; kernels/cpu only.
#if defined(ATTND_KERNELS_CPU_VECTOR_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_CPU_VECTOR_MATH_INL_H_
#undef ATTND_KERNELS_CPU_VECTOR_MATH_INL_H_
#else
#define ATTND_KERNELS_CPU_VECTOR_MATH_INL_H_
#endif

#include <hwy/highway.h>

#include <cstring>

#include "attention/dropout.h"
#include "kernels/cpu/tiles.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using FloatVector = hn::Vec<FloatTag>;
constexpr int kLanes = HWY_LANES(float);

// 2^x for x ≤ 127, relative error below 1.6·2^-24; 0 below 2^-126.5, NaN for NaN. With n =
// round(x), 2^(x − n) is a polynomial of degree 6 (weighted least squares at Chebyshev points,
// relative error 2e-9).
HWY_INLINE FloatVector Exp2(FloatVector x) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const FloatVector lowest = hn::Set(d, -127.0f);
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR
  x = hn::Max(lowest, x);  // the second operand when one is NaN: NaN stays
#else
  x = hn::IfThenElse(hn::Lt(x, lowest), lowest, x);
#endif
  // Adding 1.5·2^23 + 127 rounds to an integer and leaves n + 127 in the low bits.
  const FloatVector magic = hn::Set(d, 12582912.0f + 127.0f);
  FloatVector shifted = hn::Add(x, magic);
  FloatVector f = hn::Sub(x, hn::Sub(shifted, magic));
  FloatVector p = hn::Set(d, 0x1.41d334p-13f);
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.5f456ap-10f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.3b2dbcp-7f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.c6aed4p-5f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.ebfbdap-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 0x1.62e430p-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  // A product, not an addition to the exponent: NaN stays NaN, and n = −127 gives 0.
  return hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(du, shifted))));
}

HWY_INLINE float Exp2One(float x) { return hn::GetLane(Exp2(hn::Set(FloatTag(), x))); }

#if HWY_TARGET == HWY_SCALAR
inline void DropoutBlock(const DropoutStream& stream, uint32_t row_block, uint32_t column_block,
                         uint8_t* HWY_RESTRICT bytes, int64_t stride) {
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const PhiloxBlock block = DropoutBytes(stream, row_block, column_block, lane);
    for (uint32_t n = 0; n < 16; ++n) {
      const uint32_t row = lane / 4 + n / 8 * 8, column = n / 2 % 4 * 8 + lane % 4 * 2 + n % 2;
      bytes[row * stride + column] = static_cast<uint8_t>(block.word[n / 4] >> (n % 4 * 8));
    }
  }
}
#else
// Philox4x32-7 for some lanes of one 16×32 block at once. Each 32-bit word stands in the low half
// of a 64-bit lane, whose high half is never looked at: a widening product gives high and low at
// once.
using WideTag = hn::ScalableTag<uint64_t>;
using WideVector = hn::Vec<WideTag>;

HWY_INLINE WideVector WideProduct(WideVector a, WideVector b) {
  const hn::Repartition<uint32_t, WideTag> narrow;
  return hn::MulEven(hn::BitCast(narrow, a), hn::BitCast(narrow, b));
}

HWY_INLINE void PhiloxLanes(const DropoutStream& stream, WideVector word1, uint32_t column_block,
                            WideVector out[4]) {
  const WideTag d;
  WideVector w0 = hn::Set(d, uint64_t{stream.offset_lo}), w1 = word1;
  WideVector w2 = hn::Set(d, uint64_t{stream.head_index});
  WideVector w3 = hn::Set(d, uint64_t{column_block});
  const WideVector multiplier0 = hn::Set(d, uint64_t{0xD2511F53u});
  const WideVector multiplier1 = hn::Set(d, uint64_t{0xCD9E8D57u});
  uint32_t key_lo = stream.key_lo, key_hi = stream.key_hi;
  for (int round = 0; round < 7; ++round) {
    WideVector p0 = WideProduct(w0, multiplier0), p1 = WideProduct(w2, multiplier1);
    w0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p1), w1), hn::Set(d, uint64_t{key_lo}));
    w2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p0), w3), hn::Set(d, uint64_t{key_hi}));
    w1 = p1;
    w3 = p0;
    key_lo += 0x9E3779B9u;
    key_hi += 0xBB67AE85u;
  }
  out[0] = w0, out[1] = w1, out[2] = w2, out[3] = w3;
}

// Words `even` and `odd` of two neighbouring lanes, in each 128-bit block: low halves of `even`,
// then its high halves, then those of `odd`.
HWY_INLINE hn::Vec<hn::Repartition<uint32_t, WideTag> > HalvesTogether(WideVector even,
                                                                       WideVector odd) {
  const WideTag d;
  const hn::Repartition<uint8_t, WideTag> d8;
  alignas(16) static constexpr uint8_t kOrder[16] = {0, 1, 8,  9,  2, 3, 10, 11,
                                                     4, 5, 12, 13, 6, 7, 14, 15};
  const WideVector both = hn::Or(hn::And(even, hn::Set(d, 0xffffffff)), hn::ShiftLeft<32>(odd));
  const hn::Repartition<uint32_t, WideTag> d32;
  return hn::BitCast(d32, hn::TableLookupBytes(hn::BitCast(d8, both), hn::LoadDup128(d8, kOrder)));
}

// The deciding bytes of the block at rows 16·row_block, columns 32·column_block, row by row:
// byte of (row, column) at bytes[row·stride + column].
inline void DropoutBlock(const DropoutStream& stream, uint32_t row_block, uint32_t column_block,
                         uint8_t* HWY_RESTRICT bytes, int64_t stride) {
  const WideTag d;
  const hn::Repartition<uint32_t, WideTag> d32;
  constexpr int kRows = HWY_LANES(uint64_t) / 2;  // at once: two lanes of each row in a vector
  const WideVector index = hn::Iota(d, uint64_t{0});
  // Lanes 4r and 4r + 1 of row r.
  const WideVector lanes = hn::Sub(hn::Add(index, index), hn::And(index, hn::Set(d, uint64_t{1})));
  for (int row = 0; row < 8; row += kRows) {
    const uint64_t first = uint64_t{row_block} * 32 + 4 * row;
    WideVector left[4], right[4];
    PhiloxLanes(stream, hn::Add(lanes, hn::Set(d, first)), column_block, left);
    PhiloxLanes(stream, hn::Add(lanes, hn::Set(d, first + 2)), column_block, right);
    // Words 0 and 1 are of row r, words 2 and 3 of row r + 8. An even word's low halves are columns
    // 0 to 7, its high halves 8 to 15; an odd word's are 16 further on.
    for (int half = 0; half < 2; ++half) {
      const auto a = HalvesTogether(left[2 * half], left[2 * half + 1]);
      const auto b = HalvesTogether(right[2 * half], right[2 * half + 1]);
      alignas(64) uint8_t even[kRows][16], odd[kRows][16];
      hn::Store(hn::InterleaveLower(d32, a, b), d32, reinterpret_cast<uint32_t*>(even));
      hn::Store(hn::InterleaveUpper(d32, a, b), d32, reinterpret_cast<uint32_t*>(odd));
      for (int r = 0; r < kRows; ++r) {
        uint8_t* place = bytes + (row + r + 8 * half) * stride;
        std::memcpy(place, even[r], 16);
        std::memcpy(place + 16, odd[r], 16);
      }
    }
  }
}
#endif

// Which of kLanes scores are kept, from their bytes.
HWY_INLINE hn::Mask<FloatTag> Kept(const uint8_t* bytes, uint32_t threshold) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::Rebind<uint8_t, FloatTag> d8;
  auto wide = hn::PromoteTo(du, hn::LoadU(d8, bytes));
  const hn::RebindToSigned<FloatTag> di;
  return hn::RebindMask(
      d, hn::Gt(hn::BitCast(di, wide), hn::Set(di, static_cast<int32_t>(threshold) - 1)));
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();
#endif
