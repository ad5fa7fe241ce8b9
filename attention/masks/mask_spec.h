// MaskSpec: which keys a row sees, said as data. A mask is a set of (batch entry, query head, row,
// key); here are the ways to spell one. It is filled from the wire's MaskSpec field by field and
// means nothing until MaskDescription::Make has checked it.
//
// Coordinates. A problem may be a part of the mask: with MaskOrigin o, its (b, h, i, j) is
//   I = i + o.row_begin    J = j + o.key_begin    B = b + o.batch_begin    H = h + o.head_begin
//   Q = i + offset + o.key_begin
// where `offset` places the diagonal of the call's sequence b. Lists count rows I and keys J.
// Expressions count the query position Q and keys J: an alignment moves expressions, never lists.
// In packed layouts i and j count inside a sequence, b is the sequence's number, and rows and keys
// are the longest sequence's.
//
// Values; any thread. Depth: whoever builds a MaskExpr from outside bounds its depth first, since
// its destructor recurses.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

namespace attnd {

// Limits of a mask, docs of the wire repeat them. Rows and keys as those of a problem.
inline constexpr int64_t kMaxMaskLength = int64_t{1} << 20;
inline constexpr int64_t kMaxMaskBatch = int64_t{1} << 20;
inline constexpr int64_t kMaxMaskHeads = int64_t{1} << 16;
inline constexpr int64_t kMaxMaskPatterns = 4096;
inline constexpr int64_t kMaxMaskNodes = 4096;  // in all; and in one pattern with what it refers to
inline constexpr int64_t kMaxMaskDepth = 16;    // of a pattern with what it refers to
inline constexpr int64_t kMaxMaskRectangles = 65536;

// ---- Expressions. Each says when (Q, J) is visible; mod and ⌊ ⌋ round down, also below 0.

struct AllKeys {  // always
  friend bool operator==(const AllKeys&, const AllKeys&) = default;
};
struct RelativeWindow {  // Q − left ≤ J ≤ Q + right; −1: no bound on that side
  int32_t left = 0, right = 0;
  friend bool operator==(const RelativeWindow&, const RelativeWindow&) = default;
};
struct Dilated {  // (Q − J) mod step = 0 and −left·step ≤ J − Q ≤ right·step; −1: no bound
  uint32_t step = 0;
  int32_t left = 0, right = 0;
  friend bool operator==(const Dilated&, const Dilated&) = default;
};
struct StrideRel {  // (Q − J) mod p = phase
  uint32_t p = 0, phase = 0;
  friend bool operator==(const StrideRel&, const StrideRel&) = default;
};
struct StrideCol {  // lo ≤ J mod p < hi
  uint32_t p = 0, lo = 0, hi = 0;
  friend bool operator==(const StrideCol&, const StrideCol&) = default;
};
struct BlockWindow {  // lo ≤ ⌊(J + shift)/p⌋ − ⌊(Q + shift)/p⌋ ≤ hi
  uint32_t p = 0;
  int32_t lo = 0, hi = 0;
  std::vector<int32_t> shift;  // none (0), one, or one for each batch entry B
  friend bool operator==(const BlockWindow&, const BlockWindow&) = default;
};
enum class GlobalDirection : uint8_t { kBoth = 0, kRows = 1, kColumns = 2 };
struct Global {  // Q (rows), J (columns) or either lies in one of the intervals [start, end)
  std::vector<uint32_t> start, end;
  GlobalDirection direction = GlobalDirection::kBoth;
  friend bool operator==(const Global&, const Global&) = default;
};
struct Prefix {               // J < len
  std::vector<uint32_t> len;  // one, or one for each batch entry B
  friend bool operator==(const Prefix&, const Prefix&) = default;
};
struct Segment {  // Q and J in the same [cu[n], cu[n + 1])
  std::vector<uint32_t> cu;
  friend bool operator==(const Segment&, const Segment&) = default;
};
// row[I] = key[J] ≠ 0. A list in spite of its place: it counts mask rows, not query positions.
struct Groups {
  std::vector<uint32_t> row, key;  // [rows], [keys]; per_batch: [batch, rows], [batch, keys]
  bool per_batch = false;
  friend bool operator==(const Groups&, const Groups&) = default;
};
// In each row of blocks per_row key blocks of block × block, drawn without replacement (BigBird)
// from those that MaskExpr::of, if there, does not hold entirely. nk = ⌈keys / block⌉ of the
// extents, R = ⌊Q / block⌋, m candidates in ascending order, words w_n of Philox4x32-10 with
//   key = (seed mod 2³², ⌊seed / 2³²⌋)    counter = (⌊n / 4⌋, R, per_head ? H : 0, 0x6D61736B)
// word n mod 4. For n = 0 … min(per_row, m) − 1: x = n + ⌊w_n·(m − n) / 2³²⌋, swap candidates n and
// x, and candidate n is drawn. (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
// 1, 2, 3", SC'11.) "Entirely": at every J of the block and every Q of R that a row of the extents
// has under this call's diagonal.
struct RandomBlocks {
  uint32_t block = 0, per_row = 0;
  uint64_t seed = 0;
  bool per_head = false;
  friend bool operator==(const RandomBlocks&, const RandomBlocks&) = default;
};
struct AllOf {  // every one of `of`; none: always
  friend bool operator==(const AllOf&, const AllOf&) = default;
};
struct AnyOf {  // at least one of `of`; none: never
  friend bool operator==(const AnyOf&, const AnyOf&) = default;
};
struct Negate {  // not of[0]
  friend bool operator==(const Negate&, const Negate&) = default;
};
struct PatternRef {  // what an earlier pattern says
  uint32_t pattern = 0;
  friend bool operator==(const PatternRef&, const PatternRef&) = default;
};

struct MaskExpr {
  // monostate: nothing was set, refused. A place in this list is part of ids: it only grows.
  std::variant<std::monostate, AllKeys, RelativeWindow, Dilated, StrideRel, StrideCol, BlockWindow,
               Global, Prefix, Segment, Groups, RandomBlocks, AllOf, AnyOf, Negate, PatternRef>
      op;
  // Operands of AllOf and AnyOf; the one of Negate; of RandomBlocks none, or what it excludes.
  std::vector<MaskExpr> of;
  friend bool operator==(const MaskExpr&, const MaskExpr&) = default;
};

// ---- Lists.

enum class BitOrder : uint8_t {
  kRowMajorLsb = 0,       // bit r·bk + c of a block's bytes, least significant first
  kTile8ColumnMajor = 1,  // 8 × 8 tiles in column-major order, bit r·8 + c in a tile's 8 bytes
};
// Blocks of bq × bk scores; row R of blocks keeps indices[indptr[R] .. indptr[R + 1]), ascending.
struct BlockList {
  uint32_t bq = 0, bk = 0;
  std::vector<uint32_t> indptr;   // [⌈rows / bq⌉ + 1]
  std::vector<uint32_t> indices;  // blocks of keys
  std::vector<uint8_t> kind;      // a byte for each block: 0 full, 1 partial; empty: all full
  // Partial blocks have one of these at most: their bits, ⌈bq·bk / 8⌉ bytes a bitmap; an
  // expression.
  std::vector<uint8_t> bitmaps;
  BitOrder order = BitOrder::kRowMajorLsb;
  std::optional<MaskExpr> partial_expr;
  std::vector<uint32_t> bitmap_of;  // of the n-th partial block; empty: the n-th
  friend bool operator==(const BlockList&, const BlockList&) = default;
};
// Key J is hidden from rows [start, end) of its m runs, entries J·m + n; what is left of `base`.
struct ColRuns {
  uint32_t m = 0;
  std::vector<uint32_t> start, end;  // [keys, m]
  std::optional<MaskExpr> base;      // absent: all
  friend bool operator==(const ColRuns&, const ColRuns&) = default;
};
// Row I keeps keys first + stride·k, 0 ≤ k < count, of its r runs, entries I·r + n (ACSR: r = 1).
struct RowRuns {
  uint32_t r = 0;
  std::vector<uint32_t> first, stride, count;  // [rows, r]
  friend bool operator==(const RowRuns&, const RowRuns&) = default;
};
// Row I keeps keys [begin, end) of its r runs, entries I·r + n, ascending and disjoint.
struct RowIntervals {
  uint32_t r = 0;
  std::vector<uint32_t> begin, end;  // [rows, r]
  friend bool operator==(const RowIntervals&, const RowIntervals&) = default;
};
enum class RectangleShape : uint8_t {
  kFull = 0,
  kCausal = 1,  // key_end − J ≥ row_end − I: the diagonal ends in the lower right corner
  kInverseCausal = 2,  // J − key_begin ≥ I − row_begin: it begins in the upper left one
  kBand = 3,           // both
};
struct MaskRectangle {
  uint32_t row_begin = 0, row_end = 0, key_begin = 0, key_end = 0;
  RectangleShape shape = RectangleShape::kFull;
  friend auto operator<=>(const MaskRectangle&, const MaskRectangle&) = default;
};
struct Rectangles {  // their union
  std::vector<MaskRectangle> of;
  friend bool operator==(const Rectangles&, const Rectangles&) = default;
};
struct MaskBitmap {  // bit I·row_pitch_bits + J, least significant first, 1 = visible
  uint32_t row_pitch_bits = 0;
  std::vector<uint8_t> data;
  friend bool operator==(const MaskBitmap&, const MaskBitmap&) = default;
};

// monostate: nothing was set, refused. A place in this list is part of ids: it only grows.
using MaskPattern = std::variant<std::monostate, MaskExpr, BlockList, ColRuns, RowRuns,
                                 RowIntervals, Rectangles, MaskBitmap>;

// ---- The mask.

enum class EmptyRow : uint8_t {
  kZero = 0,    // O = 0, lse = −∞, zero gradients
  kReject = 1,  // INVALID_ARGUMENT
};

// Where a problem lies in the mask's own coordinates.
struct MaskOrigin {
  int64_t row_begin = 0, key_begin = 0, batch_begin = 0, head_begin = 0;
  friend bool operator==(const MaskOrigin&, const MaskOrigin&) = default;
};

// The whole mask's size. 0: that of the problem; of batch and heads: any that are met.
struct MaskExtents {
  int64_t batch = 0, q_heads = 0, rows = 0, keys = 0;
  friend bool operator==(const MaskExtents&, const MaskExtents&) = default;
};

struct MaskSpec {
  std::vector<MaskPattern> pattern;
  // Which pattern (B, H) uses: 1, q_heads or batch·q_heads entries of the extents.
  std::vector<uint32_t> pattern_of;
  EmptyRow empty_row = EmptyRow::kZero;
  MaskOrigin origin;
  MaskExtents extents;
  friend bool operator==(const MaskSpec&, const MaskSpec&) = default;
};

// Tells a mask about the call that uses it.
struct MaskCall {
  int64_t batch = 0;  // entries or packed sequences
  int64_t q_heads = 0;
  int64_t rows = 0;  // q_len; packed: of the longest sequence
  int64_t keys = 0;  // kv_len, key lengths not counted; packed: of the longest sequence
  // The diagonal: Q = i + offset + key_begin. One for all, or one for each batch entry b.
  std::vector<int64_t> offsets = {0};
  int64_t OffsetAt(int64_t b) const { return offsets[offsets.size() == 1 ? 0 : b]; }
  friend bool operator==(const MaskCall&, const MaskCall&) = default;
};

}  // namespace attnd
