// Matrices as bfloat16 in the tiles of tile_product.h, one term, where a pair is (k, k + 1): words
// of 32 bits of a row in memory. Beyond the depth tiles are zero up to a whole block of
// kTileDepth; what stands in rows and columns beyond the last means nothing.
//
// Included once per Highway target, for AVX-512 only; kernels/cpu only.
#if defined(ATTND_KERNELS_CPU_DENSE_BFLOAT16_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_CPU_DENSE_BFLOAT16_TILES_INL_H_
#undef ATTND_KERNELS_CPU_DENSE_BFLOAT16_TILES_INL_H_
#else
#define ATTND_KERNELS_CPU_DENSE_BFLOAT16_TILES_INL_H_
#endif

#include <hwy/highway.h>

#include <cstring>

#include "kernels/cpu/dense/chunks-inl.h"
#include "kernels/cpu/terms-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX3

using WordBuffer = uint16_t[kChunk];

// `count` numbers as bfloat16, where they lie or in `buffer`; at most kChunk.
inline const uint16_t* BFloat16Words(ElementType element, const void* numbers, int64_t count,
                                     uint16_t* buffer) {
  if (element == ElementType::kBFloat16) return static_cast<const uint16_t*>(numbers);
  alignas(64) Chunk floats;
  LoadFloats(element, numbers, 0, count, floats);
  StoreFloats(floats, ElementType::kBFloat16, buffer, 0, count);
  return buffer;
}

// Rows of numbers over k as A, from the top of a tile; blocks of 16 rows lie `block_words` apart.
inline void PackTileRows(ElementType element, const RowsOf& from, int64_t block_words,
                         uint16_t* tiles) {
  alignas(64) WordBuffer buffer;
  const int whole = from.count / kTileDepth;
  for (int r = 0; r < from.rows; ++r) {
    if (r + kRowsAhead < from.rows) {
      AskFor(element, RowAt(from, element, r + kRowsAhead), 0, from.count);
    }
    const uint16_t* row = BFloat16Words(element, RowAt(from, element, r), from.count, buffer);
    uint16_t* to = tiles + r / kTileSide * block_words + r % kTileSide * kTileDepth;
    for (int k = 0; k < whole; ++k, row += kTileDepth, to += kTileWords) {
      std::memcpy(to, row, kTileDepth * sizeof(uint16_t));
    }
    const int rest = from.count % kTileDepth;
    if (rest == 0) continue;
    std::memset(to, 0, kTileDepth * sizeof(uint16_t));
    std::memcpy(to, row, rest * sizeof(uint16_t));
  }
}

// The pairs (low[n], high[n]) as words of one row of tiles `step` numbers apart; no high: zeros.
inline void PackTilePairs(const uint16_t* low, const uint16_t* high, int64_t count, int64_t step,
                          uint16_t* tiles) {
  const BitTag du;
  const hn::Rebind<uint16_t, BitTag> d16;
  auto store = [&](const uint16_t* even, const uint16_t* odd, uint16_t* to) HWY_ATTR {
    const BitVector upper = hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, odd)));
    hn::StoreU(hn::Or(hn::PromoteTo(du, hn::LoadU(d16, even)), upper), du,
               reinterpret_cast<uint32_t*>(to));
  };
  alignas(64) static constexpr uint16_t kZeros[kTileSide] = {};
  const int64_t whole = count / kTileSide * kTileSide;
  for (int64_t n = 0; n < whole; n += kTileSide, tiles += step) {
    store(low + n, high == nullptr ? kZeros : high + n, tiles);
  }
  if (whole == count) return;
  alignas(64) uint16_t ends[2][kTileSide] = {};
  std::memcpy(ends[0], low + whole, (count - whole) * sizeof(uint16_t));
  if (high != nullptr) std::memcpy(ends[1], high + whole, (count - whole) * sizeof(uint16_t));
  store(ends[0], ends[1], tiles);
}

// Rows k of numbers as B.
inline void PackTileDepth(ElementType element, const RowsOf& from, uint16_t* tiles) {
  const int64_t step = DepthBlocks(from.rows) * kTileWords;
  alignas(64) WordBuffer buffers[2];
  auto row = [&](int k, uint16_t* buffer) {
    return BFloat16Words(element, RowAt(from, element, k), from.count, buffer);
  };
  auto ask_for = [&](int k) {
    if (k < from.rows) AskFor(element, RowAt(from, element, k), 0, from.count);
  };
  for (int k = 0; k < DepthBlocks(from.rows) * kTileDepth; k += 2) {
    uint16_t* to = tiles + k / kTileDepth * kTileWords + k % kTileDepth * kTileSide;
    if (k < from.rows) {
      ask_for(k + kRowsAhead);
      ask_for(k + kRowsAhead + 1);
      PackTilePairs(row(k, buffers[0]), k + 1 < from.rows ? row(k + 1, buffers[1]) : nullptr,
                    from.count, step, to);
      continue;
    }
    for (int n = 0; n < from.count; n += kTileSide, to += step) {
      std::memset(to, 0, kTileDepth * sizeof(uint16_t));
    }
  }
}

// B of rows n from A of them, or A of rows k from B of them.
inline void TurnTiles(int64_t length, int64_t depth, uint16_t* tiles) {
  TransposeTiles(RoundUp(length, kTileSide) * RoundUp(depth, kTileDepth), tiles);
}

#endif  // HWY_TARGET == HWY_AVX3

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();
#endif
