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

// Philox4x32-7 for some lanes of one 16×32 block at once. Each 32-bit word stands in the low half
// of a 64-bit lane, whose high half is never looked at: a widening product gives high and low at
// once.
using WideTag = hn::ScalableTag<uint64_t>;
using WideVector = hn::Vec<WideTag>;

HWY_INLINE WideVector WideProduct(WideVector a, WideVector b) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(WideTag(), (hn::GetLane(a) & 0xffffffff) * (hn::GetLane(b) & 0xffffffff));
#else
  const hn::Repartition<uint32_t, WideTag> narrow;
  return hn::MulEven(hn::BitCast(narrow, a), hn::BitCast(narrow, b));
#endif
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

// The deciding bytes of the block at rows 16·row_block, columns 32·column_block, row by row:
// byte of (row, column) at bytes[row·stride + column].
inline void DropoutBlock(const DropoutStream& stream, uint32_t row_block, uint32_t column_block,
                         uint8_t* HWY_RESTRICT bytes, int64_t stride) {
  const WideTag d;
  constexpr int kWide = HWY_LANES(uint64_t);
  alignas(64) uint64_t words[4][32];
  for (int lane = 0; lane < 32; lane += kWide) {
    WideVector out[4];
    PhiloxLanes(stream, hn::Iota(d, uint64_t{row_block} * 32 + lane), column_block, out);
    for (int w = 0; w < 4; ++w) hn::Store(out[w], d, words[w] + lane);
  }
  // Word w of lane 4·r + c holds row r + 8·(w >> 1): its low half columns 16·(w & 1) + 2c and the
  // next, its high half those 8 further on.
  for (int r = 0; r < 8; ++r) {
    for (int w = 0; w < 4; ++w) {
      const uint64_t* four = words[w] + 4 * r;
      uint64_t low = 0, high = 0;
      for (int c = 0; c < 4; ++c) {
        low |= (four[c] & 0xffff) << (16 * c);
        high |= ((four[c] >> 16) & 0xffff) << (16 * c);
      }
      uint8_t* place = bytes + (r + 8 * (w >> 1)) * stride + 16 * (w & 1);
      std::memcpy(place, &low, sizeof(low));
      std::memcpy(place + 8, &high, sizeof(high));
    }
  }
}

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
