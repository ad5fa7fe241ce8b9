// params.h: the parameters of a launch of the device kernels: an array of problems (ProblemDesc),
// each with its sequences, and a list of tiles to work on (TileWork), one per block. All are PODs,
// filled by the host, read by every architecture's kernels and by the emulator. Pointers are the
// device's; in the emulator they are the host's.
//
// Launch     grid.x = tile_count, block b works on tiles[b]; or fewer blocks, which have equal
//            shares of them, or of which each takes the next tile until there is none. A tile's
//            result depends on its problem alone. Longest tiles first (any order is right).
// Rows       of Q, K, V, O and their gradients start 16-byte aligned and hold whole 16-byte chunks
//            (8 float16, 4 float32): where rows are not whole the host pads copies with zeros.
// Errors     none here: the host has refused what a kernel cannot do.
#pragma once

#include "base/hd.h"
#include "kernels/ptx/tensor_map.h"

namespace attnd {

// Rows of 16-bit numbers: element (b, h, row, d) is at data[b·batch + h·head + row·row_stride + d].
// A float32 counts as two of them.
struct RowTensor {
  void* data;
  int64_t batch, head, row_stride;  // in elements, multiples of 8
};
ATTN_HD char* RowOf(const RowTensor& t, int64_t batch, int64_t head, int64_t row) {
  return static_cast<char*>(t.data) + 2 * (batch * t.batch + head * t.head + row * t.row_stride);
}

// One batch entry or one packed sequence. Row i sees keys [i + low, i + high] inside [0, kv_len).
struct SequenceDesc {
  int32_t q_begin, q_len;    // rows of this sequence: q_begin + i within (batch index, head)
  int32_t kv_begin, kv_len;  // likewise keys; key padding is already cut off
  int32_t low, high;         // diagonal and window, clamped to ±kUnboundedKeys
  int32_t diagonal;          // row i is aligned with key i + diagonal (ALiBi)
  int32_t batch;             // index into the tensors' batch stride: b if dense, 0 if packed
};
inline constexpr int32_t kUnboundedKeys = 1 << 29;

enum DenominatorCode : int32_t { kDenominatorSoftmax, kDenominatorZeroRest, kDenominatorSink };
enum BiasElementCode : int32_t { kBiasNone, kBiasFloat16, kBiasBFloat16, kBiasFloat32 };

// A tensor over (b, h, i, j) whose broadcast dimensions have stride 0.
struct BroadcastTensor {
  const void* data;
  int64_t batch, head, row;  // elements
  int32_t column;            // 1, or 0 where every key shares one value
  int32_t element;           // BiasElementCode
  int32_t has_pairs;         // whether two keys' biases, the first one's even, are one aligned word
};

// A bool mask as its caller sent it: bit j&7 of byte j>>3 of a row. Read by the kernel that lists
// its tiles (mask_tiles.h) and by no other.
struct MaskBits {
  const void* data;          // null: none
  int64_t batch, head, row;  // bytes; 0 where all share one
  int32_t rows, columns;     // 1: all share one
};

// A plan says which tiles a block visits under a mask, whatever way the mask was described. It is
// what one or more (b, h) see. It has a line for each of a block's own tiles (of rows in forward,
// of keys in backward), and a line lists the other side's tiles that hold anything, ascending: a
// tile's number, and 1 + the number of its bitmap, or 0 where all of it is visible. Bitmaps:
// tile_lists.h. The host makes it from masks by description, a kernel ahead from bool masks.
struct alignas(16) MaskLine {
  uint32_t begin, end;  // its tiles
  uint32_t bitmap;      // number of the bitmap that its tiles count from
  uint32_t unused;
};
// LaneOrder says how lanes hold scores (tile_lists.h), hence the bits of bitmaps: m8n8k4's
// numbering, or m16n8k16's.
enum LaneOrder : int32_t { kLanesOfSm70, kLanesOfSm80 };
inline constexpr int kListedTileBits = 15;  // 2^20 keys, 32 a tile
inline constexpr uint32_t kListedTileMask = (1u << kListedTileBits) - 1;
inline constexpr int64_t kMaxListedBitmaps = (int64_t{1} << (32 - kListedTileBits)) - 1;
struct TileLists {
  MaskLine* lines;  // line l of plan n: lines[n·plan_lines + l]; null: no mask
  uint32_t* tiles;
  uint32_t* bitmaps;        // tile_rows·tile_keys / 32 words each
  const uint32_t* plan_of;  // of (b, h) at b·batch + h·head; null: the plan is that number
  int64_t batch, head;
  int32_t plan_lines;            // 1: it holds for all of a block's own tiles
  int32_t line_tiles;            // room for a line's tiles; 1: what is listed holds for every tile
  int32_t tile_rows, tile_keys;  // of the kernels that read them
  int32_t by_keys;               // whether lines are tiles of keys
  LaneOrder lanes;               // of the kernels that read them
  int32_t run;    // 0: a line is visited as a whole; n: its n-th run alone (list_runs.h)
  int32_t whole;  // then the problem that it is a run of
};
// Lines much longer than others are cut into so many runs of tiles, about equal.
inline constexpr int32_t kListRuns = 8;
// Rows or keys of a block of the kernels that merge runs (merge_runs.h).
inline constexpr int32_t kMergedRows = 8;

// The maps of a problem's tensors (TensorMap).
enum MapOf : int32_t {
  kMapOfQ,
  kMapOfK,
  kMapOfV,
  kForwardMaps,
  kMapOfDo = kForwardMaps,
  kBackwardMaps
};

struct ProblemDesc {
  RowTensor q, k, v, o;
  float* lse;                   // (b, h, i): lse[seq.batch·lse_batch + h·lse_head + q_begin + i]
  int64_t lse_batch, lse_head;  // delta has the same strides
  const SequenceDesc* sequences;
  int32_t q_heads, kv_heads, group;  // group = q_heads / kv_heads
  int32_t qk_chunks, v_chunks;       // 16-byte chunks that a row of Q, K (V, O, dO) really has
  float scale, scale_log2;           // scale_log2 = scale·log2(e)
  float softcap;                     // 0: none
  BroadcastTensor bias;
  const float* alibi_slopes;  // null, or (b, h): alibi_slopes[b·alibi_batch + h]
  int64_t alibi_batch;
  int32_t denominator;       // DenominatorCode
  const float* sink_logits;  // [q_heads]
  // Dropout (attention/dropout.h): head index of (b, h) is dropout_head + b·dropout_batch + h.
  uint32_t dropout_threshold;  // 0: none
  float dropout_scale;         // 256/(256 − threshold)
  uint32_t dropout_key_lo, dropout_key_hi, dropout_offset_lo;
  uint32_t dropout_head, dropout_batch;
  // Backward; of a kept bfloat16 forward where V and O go once more (kernels/sm70/keep_rows.h).
  union {
    RowTensor d_o, kept_o;
  };
  RowTensor d_q, d_k;
  union {
    RowTensor d_v, kept_v;
  };
  // Workspace with the strides of lse, written by Delta: rowsum(dO∘O) − dlse, …
  float* delta;
  const float* d_lse;       // null: zero; strides of lse
  float* dq_sums;           // workspace: dQ in lane order (float32 or int32), see below
  int64_t dq_head;          // numbers per (b, q head): DqSumFloats(longest q_len, tile head_dim)
  int64_t dq_block;         // numbers of 64 queries
  int64_t dq_rest;          // from an int32 sum to that of what it leaves, in numbers; 0: none
  int32_t dq_bits;          // of the int32 sums (FixedPoint, backward_passes.h); 0: float32
  int32_t dq_rests_by_row;  // 1: only rows with a negative dq_factor have rests (kernels/tiles.h)
  uint32_t* dq_non_finite;  // workspace, zeroed: a bit for each sum that is not finite
  int64_t non_finite_head;  // words per (b, q head): a 32nd of dq_head
  float* d_bias;            // float32 of the bias's shape with the bias's strides, or null
  float* d_sink;            // [batch, q_heads], or null
  int32_t batch_count;      // entries or sequences
  int64_t bias_rows, bias_columns;  // the bias's last two dimensions
  // dQ, dK and dV leave in the call's element type, times these powers of two (0 in float16). What
  // a kept bfloat16 forward was divided by, V in two scales.
  int32_t bfloat16_gradients, d_q_exponent;
  union {
    int32_t d_k_exponent, v_exponent;
  };
  union {
    int32_t d_v_exponent, kept_v_exponent;
  };
  uint32_t* gradient_bounds;  // workspace, zeroed: see kernels/rules/gradient_scale.h
  int32_t* gains;             // … and the gain of each 64 rows: (b·q_heads + h)·gains_head + n
  int64_t gains_head;
  uint32_t* key_sizes;  // workspace: what KeyBounds finds of each key (seen_keys.h)
  int64_t most_keys;    // of a sequence, a multiple of kKeyGroup
  float* stabilizer;    // … lse in units of log2 less P's gain, ∞ where no key is visible, …
  float* dq_factor;     // … and the power of two of a row's dQ in fixed point, or its negative
  TileLists tile_lists;
  MaskBits mask;
  const TensorMap* maps;  // MapOf; null where the kernels load rows
};
inline constexpr int32_t kGradientBoundWords = 5;  // per (b, KV head)

// dQ is summed in blocks of 64 queries, each of 64·PaddedColumns numbers; block n of (b, h) starts
// at dq_sums + (b·q_heads + h)·dq_head + n·64·PaddedColumns. b counts entries or sequences.
inline constexpr int32_t kDqBlockRows = 64;
ATTN_HD constexpr int64_t DqBlocks(int64_t q_len) {
  return (q_len + kDqBlockRows - 1) / kDqBlockRows;
}
// Columns of a row in backward's shared memory and in dQ's sums.
ATTN_HD constexpr int32_t PaddedColumns(int32_t tile_head_dim) {
  return tile_head_dim <= 64 ? 64 : tile_head_dim <= 128 ? 128 : 256;
}
// Words a KV head in key_sizes: one a key and one for kKeyGroup neighbours.
inline constexpr int32_t kKeyGroup = 8;
ATTN_HD constexpr int64_t KeySizeWords(int64_t most_keys) {
  return most_keys + most_keys / kKeyGroup;
}
ATTN_HD constexpr int64_t DqSumFloats(int64_t q_len, int32_t tile_head_dim) {
  return DqBlocks(q_len) * kDqBlockRows * PaddedColumns(tile_head_dim);
}

// The work of one block. Forward: rows [tile·q_rows, +q_rows) of query head `head`. Backward: keys
// [tile·kv_rows, +kv_rows) of KV head `head`. KeyBounds, Delta and dQ kernels: 64 rows of query
// head `head`. KeepRows: 64 rows of O's or V's heads. CaptureScores: `batch` is the split, `head`
// the slot, `tile` of the map; CaptureSums: `batch` is the tile's first cell, `head` its first
// slot.
struct TileWork {
  int32_t problem, batch, head, tile;
};

// CaptureDesc describes the map that a launch captures of one call, whose parts are problems [0,
// parts) (capture_map.h). A map's tiles are kCaptureRows × tile_keys. Each is the sum of `splits`
// sums over a share of the call's heads. The call alone determines `splits`, so that few tiles fill
// a GPU.
inline constexpr int32_t kCaptureRows = 128;
struct CaptureDesc {
  float* sums;         // of the tiles at hand: slots of [kCaptureRows][tile_keys]
  double* cells;       // the sums of each tile's blocks, one tile after the other
  double* moments;     // of each tile Σ(x − origin), its squares, its cubes
  float* map;          // [rows, keys], or null
  int32_t rows, keys;  // of the map
  int32_t block;       // rows and keys of a block
  int32_t tile_keys, key_tiles;
  int32_t parts, heads;  // heads: of each part, batch entries · query heads
  int32_t splits;
  float share;    // 1 / heads of the call
  double origin;  // PowerSums (attention/patterns/attention_map.h)
};

struct LaunchParams {
  const ProblemDesc* problems;
  const TileWork* tiles;
  int32_t tile_count;
  // Kernels whose blocks take tile after tile have a word that began as zero, and the number of
  // tiles that earlier launches of it took. A launch of n tiles adds n. The word after it counts
  // row_tiles.
  uint32_t* taken;
  uint32_t taken_before;
  const CaptureDesc* capture;  // null: none
  const void* dense;           // what a kernel of kernels/dense is told, in place of the others
  // Where a kernel decides dropout ahead (sm90/dropout_bits.h): its decisions, and of each tile how
  // many rounds (visits) of other tiles stand before its own there.
  uint32_t* dropout_bits;
  const uint32_t* first_rounds;
  // Backward that zeroes dQ's sums has the dQ kernel's tiles.
  const TileWork* row_tiles;
  int32_t row_tile_count;
};

// ThreadIndex says which thread of which block this is: entry.cuh (or the emulator) makes it, and
// nothing else reads the hardware's.
struct ThreadIndex {
  int thread, block;
  int blocks = 1;
};

}  // namespace attnd
