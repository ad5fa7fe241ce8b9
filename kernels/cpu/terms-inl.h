// Numbers as bfloat16 terms in the tiles of tile_product.h, and what tiles cannot hold.
//
// x = x1 + x2: the upper half of x's bits, and of what that leaves, rounded. A bfloat16 is one term
// and a float16 two, exactly; of P and dS, computed in float32, two keep all but 2^-16.
//
// A row of a tensor that holds an infinity or NaN, or nothing but numbers so small that tiles take
// some for zero, is special: it is zero in the tiles, and its share of a product is added in
// float32 afterwards, as if that row alone had no tiles. What the row's neighbours get stays the
// same bits.
//
// Included once per Highway target, for AVX-512 only; kernels/cpu only.
#if defined(ATTND_KERNELS_CPU_TERMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_CPU_TERMS_INL_H_
#undef ATTND_KERNELS_CPU_TERMS_INL_H_
#else
#define ATTND_KERNELS_CPU_TERMS_INL_H_
#endif

#include <hwy/highway.h>

#include "kernels/cpu/matrix_tiles.h"
#include "kernels/cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_AVX3
static_assert(kLanes == kTileSide && kSkipKeys == kTileDepth && kSkipKeys == kBlockSide);

using BitTag = hn::RebindToUnsigned<FloatTag>;
using BitVector = hn::Vec<BitTag>;

constexpr int TermsOf(ElementType element) { return element == ElementType::kBFloat16 ? 1 : 2; }
constexpr int kComputedTerms = 2;  // of P and dS

// The tiles to multiply a problem with, or null.
inline const TileUnit* TilesFor(const Problem& p) {
  return p.element == ElementType::kFloat32 ? nullptr : MatrixTiles();
}

// Tiles of an operand of `length` rows (of A) or columns (of B) and `depth` k.
constexpr int TileCount(int64_t length) {
  return static_cast<int>((length + kTileSide - 1) / kTileSide);
}
constexpr int DepthBlocks(int64_t depth) {
  return static_cast<int>((depth + kTileDepth - 1) / kTileDepth);
}
constexpr int64_t PackedWords(int64_t length, int64_t depth, int terms) {
  return RoundUp(length, kBlockSide) * RoundUp(depth, kTileDepth) * terms;
}

// The tiles of `side` that a span of rows or columns touches.
inline Span TilesOf(const Span& span, int side) {
  if (span.empty()) return Span{};
  return {span.begin / side, (span.end + side - 1) / side};
}

// The numbers' terms, each in the upper half of its lane; the lower half means nothing.
template <int kTerms>
HWY_INLINE void Split(FloatVector x, BitVector* terms) {
  const FloatTag d;
  const BitTag du;
  terms[0] = hn::BitCast(du, x);
  if constexpr (kTerms == 2) {
    const BitVector upper = hn::And(terms[0], hn::Set(du, 0xffff0000u));
    const FloatVector rest = hn::Sub(x, hn::BitCast(d, upper));
    terms[1] = hn::Add(hn::BitCast(du, rest), hn::Set(du, 0x8000u));
  }
}

HWY_INLINE BitVector PairOf(BitVector low, BitVector high) {
  const BitTag du;
  const hn::Repartition<uint16_t, BitTag> d16;
  return hn::BitCast(
      du, hn::OddEven(hn::BitCast(d16, high), hn::BitCast(d16, hn::ShiftRight<16>(low))));
}

// Stores the pairs of kLanes numbers `low` and `high`, 16 k further, in row `row` of the tiles of
// their terms.
template <int kTerms>
HWY_INLINE void StorePairs(const BitVector* low, const BitVector* high, int row, uint16_t* tiles) {
  const BitTag du;
  for (int t = 0; t < kTerms; ++t) {
    hn::StoreU(PairOf(low[t], high[t]), du,
               reinterpret_cast<uint32_t*>(tiles + t * kTileWords + row * kTileDepth));
  }
}

// The rows of a tile that are special.
struct SpecialRows {
  int count = 0;
  int16_t rows[kMaxKeyRows];
  void Add(int row) { rows[count++] = static_cast<int16_t>(row); }
  bool Contains(int row) const { return std::find(rows, rows + count, row) != rows + count; }
};

// Follows the numbers of a row.
class RowWatch {
 public:
  RowWatch() : largest_(hn::Zero(BitTag())) {}
  HWY_INLINE void See(FloatVector x) {
    const BitTag du;
    largest_ = hn::Max(largest_, hn::And(hn::BitCast(du, x), hn::Set(du, 0x7fffffffu)));
  }
  HWY_INLINE bool IsFinite() const {
    const BitTag du;
    return hn::AllTrue(du, hn::Lt(largest_, hn::Set(du, 0x7f800000u)));
  }
  // Finite, and what tiles take for zero is below 2^-26 of the largest number; or all are zero.
  HWY_INLINE bool FitsTiles() const {
    const BitTag du;
    const BitVector smallest = hn::Set(du, (127u - 100) << 23);
    if (hn::AllTrue(du, hn::Lt(largest_, smallest))) {
      return hn::AllTrue(du, hn::Eq(largest_, hn::Zero(du)));
    }
    return IsFinite();
  }

 private:
  BitVector largest_;
};

// Calls body.operator()<kElement>() for one of the 16-bit types.
template <class Body>
HWY_INLINE void With16Bits(ElementType element, const Body& body) {
  if (element == ElementType::kFloat16) return body.template operator()<ElementType::kFloat16>();
  body.template operator()<ElementType::kBFloat16>();
}

template <ElementType kElement>
bool RowFitsTiles(const void* row, int count) {
  RowWatch watch;
  for (int c = 0; c < count; c += kLanes) watch.See(LoadFirst<kElement>(row, c, count - c));
  return watch.FitsTiles();
}

inline void FindSpecialRows(ElementType element, const RowsOf& from, SpecialRows& special) {
  With16Bits(element, [&]<ElementType kElement>() {
    for (int r = 0; r < from.rows; ++r) {
      if (!RowFitsTiles<kElement>(RowAt(from, element, r), from.count)) special.Add(r);
    }
  });
}

// Clears row `row` of an operand packed by rows of A.
inline void ClearRow(int row, int depth_blocks, int terms, uint16_t* tiles) {
  uint16_t* first = tiles + int64_t{row / kTileSide} * depth_blocks * terms * kTileWords;
  for (int n = 0; n < depth_blocks * terms; ++n) {
    std::memset(first + n * kTileWords + row % kTileSide * kTileDepth, 0, 2 * kTileDepth);
  }
}

// Rows of a tensor as A, [row][number]; special rows are zero and added to `special`.
inline void PackRows(ElementType element, const RowsOf& from, uint16_t* tiles,
                     SpecialRows& special) {
  With16Bits(element, [&]<ElementType kElement>() {
    constexpr int kTerms = TermsOf(kElement);
    const int blocks = DepthBlocks(from.count);
    for (int r = 0; r < from.rows; ++r) {
      const void* row = RowAt(from, kElement, r);
      uint16_t* out = tiles + int64_t{r / kTileSide} * blocks * kTerms * kTileWords;
      RowWatch watch;
      for (int c = 0; c < from.count; c += kTileDepth, out += kTerms * kTileWords) {
        const FloatVector x = LoadFirst<kElement>(row, c, from.count - c);
        const FloatVector y = LoadFirst<kElement>(row, c + kLanes, from.count - c - kLanes);
        watch.See(x);
        watch.See(y);
        BitVector low[kTerms], high[kTerms];
        Split<kTerms>(x, low);
        Split<kTerms>(y, high);
        StorePairs<kTerms>(low, high, r % kTileSide, out);
      }
      if (watch.FitsTiles()) continue;
      special.Add(r);
      ClearRow(r, blocks, kTerms, tiles);
    }
  });
}

// Two rows 16 k apart as one row of the tiles of B, [k][column]. A missing row is null.
template <ElementType kElement>
void PackRowPair(const void* low_row, const void* high_row, int count, int row, int64_t block_words,
                 uint16_t* tiles) {
  constexpr int kTerms = TermsOf(kElement);
  for (int c = 0; c < count; c += kLanes, tiles += block_words) {
    const FloatVector zero = hn::Zero(FloatTag());
    BitVector low[kTerms], high[kTerms];
    Split<kTerms>(low_row != nullptr ? LoadFirst<kElement>(low_row, c, count - c) : zero, low);
    Split<kTerms>(high_row != nullptr ? LoadFirst<kElement>(high_row, c, count - c) : zero, high);
    StorePairs<kTerms>(low, high, row, tiles);
  }
}

// Rows of a tensor as B, [k = row][number]; rows beyond the last up to a whole block and special
// ones are zero.
inline void PackDepthRows(ElementType element, const RowsOf& from, const SpecialRows& special,
                          uint16_t* tiles) {
  With16Bits(element, [&]<ElementType kElement>() {
    constexpr int kTerms = TermsOf(kElement);
    const int blocks = DepthBlocks(from.rows);
    auto row = [&](int r) {
      return r < from.rows && !special.Contains(r) ? RowAt(from, kElement, r) : nullptr;
    };
    for (int k = 0; k < blocks; ++k) {
      for (int r = 0; r < kTileSide; ++r) {
        const int low = k * kTileDepth + r;
        PackRowPair<kElement>(row(low), row(low + kTileSide), from.count, r,
                              blocks * kTerms * kTileWords, tiles + k * kTerms * kTileWords);
      }
    }
  });
}

// 32-bit words of a tile, for shuffles that Highway has no names for.
using TileRow [[gnu::vector_size(64), gnu::aligned(4), gnu::may_alias]] = uint32_t;

HWY_INLINE void TransposeFour(const TileRow* rows, TileRow* out) {
  auto low = [](TileRow a, TileRow b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
  };
  auto high = [](TileRow a, TileRow b) {
    return __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15,
                                   31);
  };
  auto low_pairs = [](TileRow a, TileRow b) {
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
  };
  auto high_pairs = [](TileRow a, TileRow b) {
    return __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30,
                                   31);
  };
  const TileRow low01 = low(rows[0], rows[1]), low23 = low(rows[2], rows[3]);
  const TileRow high01 = high(rows[0], rows[1]), high23 = high(rows[2], rows[3]);
  out[0] = low_pairs(low01, low23);
  out[1] = high_pairs(low01, low23);
  out[2] = low_pairs(high01, high23);
  out[3] = high_pairs(high01, high23);
}

// Transposes 16×16 words, whose rows lie some words apart; `from` may be `to`.
template <class Word>
void TransposeTile(const Word* from, int64_t from_row, Word* to, int64_t to_row) {
  auto even = [](TileRow a, TileRow b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
  };
  auto odd = [](TileRow a, TileRow b) {
    return __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30,
                                   31);
  };
  auto store = [&](int row, TileRow words) {
    *reinterpret_cast<TileRow*>(to + row * to_row) = words;
  };
  TileRow fours[4][4];  // [rows 4g to 4g + 3][j]: columns j, j + 4, j + 8, j + 12 of them
  for (int g = 0; g < 4; ++g) {
    TileRow rows[4];
    for (int r = 0; r < 4; ++r) {
      rows[r] = *reinterpret_cast<const TileRow*>(from + (4 * g + r) * from_row);
    }
    TransposeFour(rows, fours[g]);
  }
  for (int j = 0; j < 4; ++j) {
    const TileRow even01 = even(fours[0][j], fours[1][j]), even23 = even(fours[2][j], fours[3][j]);
    const TileRow odd01 = odd(fours[0][j], fours[1][j]), odd23 = odd(fours[2][j], fours[3][j]);
    store(j, even(even01, even23));
    store(4 + j, even(odd01, odd23));
    store(8 + j, odd(even01, even23));
    store(12 + j, odd(odd01, odd23));
  }
}

// A's tiles of a matrix become B's of the transposed one, or the other way round.
inline void TransposeTiles(int64_t words, uint16_t* tiles) {
  for (uint16_t* tile = tiles; tile < tiles + words; tile += kTileWords) {
    uint32_t* pairs = reinterpret_cast<uint32_t*>(tile);
    TransposeTile(pairs, kTileSide, pairs, kTileSide);
  }
}

// Numbers of a float row from `column`, zero from `end` on.
HWY_INLINE FloatVector LoadBefore(const float* row, int column, int end) {
  const FloatTag d;
  if (column >= end) return hn::Zero(d);
  if (column + kLanes <= end) return hn::LoadU(d, row + column);
  return hn::IfThenElseZero(hn::FirstN(d, end - column), hn::LoadU(d, row + column));
}

// Calls body(k, load) for blocks [begin, end) of k of float rows whose numbers from `count` on are
// zero: load(row, column) where all are numbers, and where some are not.
template <class Body>
HWY_INLINE void ForEachDepthBlock(int begin, int end, int count, const Body& body) {
  const int whole = HWY_MIN(end, count / kTileDepth);
  for (int k = begin; k < whole; ++k) {
    body(k,
         [](const float* row, int column) HWY_ATTR { return hn::LoadU(FloatTag(), row + column); });
  }
  for (int k = HWY_MAX(begin, whole); k < end; ++k) {
    body(k, [=](const float* row, int column) HWY_ATTR { return LoadBefore(row, column, count); });
  }
}

// Blocks [begin, end) of k of one float row as row `row` of A; numbers from `count` on are zero.
inline void PackFloatRow(const float* from, int count, int begin, int end, int row,
                         uint16_t* tiles) {
  ForEachDepthBlock(begin, end, count, [=](int k, const auto& load) HWY_ATTR {
    BitVector low[kComputedTerms], high[kComputedTerms];
    Split<kComputedTerms>(load(from, k * kTileDepth), low);
    Split<kComputedTerms>(load(from, k * kTileDepth + kLanes), high);
    StorePairs<kComputedTerms>(low, high, row, tiles + (k - begin) * kComputedTerms * kTileWords);
  });
}

// A special row's float32 numbers.
struct FloatRow {
  alignas(64) float at[kMaxHeadDim];
  FloatRow(ElementType element, const RowsOf& from, int row) {
    CopyRows(element, {RowAt(from, element, row), from.stride, 1, from.count}, at, 0);
  }
};

inline float Dot(const FloatRow& a, const FloatRow& b, int count) {
  const FloatTag d;
  FloatVector sum = hn::Zero(d);
  for (int c = 0; c < count; c += kLanes) {
    sum = hn::MulAdd(hn::Load(d, a.at + c), hn::Load(d, b.at + c), sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

inline void AddMultiple(float factor, const float* row, int count, float* sum) {
  const FloatTag d;
  for (int c = 0; c < count; c += kLanes) {
    hn::StoreU(hn::MulAdd(hn::Set(d, factor), hn::LoadU(d, row + c), hn::LoadU(d, sum + c)), d,
               sum + c);
  }
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();
#endif
