// dense_params.h: the descriptors of this folder's kernels other than products, one a launch, at
// LaunchParams.dense. The host fills them; every architecture's kernels and the emulator read them.
// Elements are chosen at run time: each operation is one kernel. Rules: operands.h.
//
// Errors     none here: the host has refused or cut what a kernel cannot do.
#pragma once

#include "kernels/dense/product_params.h"
#include "kernels/rules/params.h"

namespace attnd {

struct DenseTensor {
  void* data;       // null: none
  int32_t element;  // BiasElementCode
};

// The operations on single numbers: out(row, column) ← f(a(row, column), b(row, column)).
enum NumbersOp : int32_t {
  kNumbersZero,     // 0; no a
  kNumbersCopy,     // a; its bits where elements are equal
  kNumbersScaled,   // scale · a
  kNumbersSum,      // a + scale · b
  kNumbersProduct,  // a · (scale · b)
  kNumbersDrop,     // a · 0 or a · scale
  kNumbersCurve,    // curve(a)
  kNumbersSlope,    // b · slope of curve at a
};
struct NumbersRule {
  int32_t op;     // NumbersOp
  int32_t curve;  // Curve
  float scale;
  // The generator of dropout (attention/elementwise_dropout.h).
  uint32_t key_lo, key_hi, offset_lo, first_row, threshold;
};
struct NumbersDesc {
  DenseTensor a, b, out;
  int64_t a_stride, out_stride;  // numbers from row to row; b's is a's
  int64_t rows, columns;         // together below 2^31 numbers
  NumbersRule rule;
  int32_t add;     // the result is rounded, added to out, rounded again
  int32_t passes;  // NumbersPasses
  // The element of all tensors where all groups of neighbours are whole and aligned, else
  // kBiasNone.
  int32_t whole;
};
// A thread has `passes` groups of neighbours of a row; rows begin new groups.
inline constexpr int32_t kNumbersThreads = 256, kNumbersOfGroup = 8;
constexpr int64_t NumbersGroupsOfRow(int64_t columns) {
  return (columns + kNumbersOfGroup - 1) / kNumbersOfGroup;
}
// Several where there are enough for all multiprocessors: a thread reads its descriptor once.
constexpr int32_t NumbersPasses(int64_t rows, int64_t columns) {
  constexpr int64_t kManyBlocks = 4096;
  const int64_t blocks = rows * NumbersGroupsOfRow(columns) / kNumbersThreads;
  return blocks >= kManyBlocks ? 4 : 1;
}
constexpr int64_t NumbersBlocks(int64_t rows, int64_t columns) {
  const int64_t of_block = int64_t{kNumbersThreads} * NumbersPasses(rows, columns);
  return (rows * NumbersGroupsOfRow(columns) + of_block - 1) / of_block;
}

// A chain of such functions on tensors of one shape, end to end, without strides: a step's result
// is rounded to the element of `out`, stored there or not, and is what the next step reads.
struct NumbersStep {
  NumbersRule rule;
  DenseTensor other, out;  // the operand beside the chain, or null; the result's place
  int32_t chain_is_b;      // the chain is the function's b, and `other` its a
  int32_t add;             // as NumbersDesc's
  int32_t stores;
  int32_t is_aside;  // the next step reads what this one read
};
inline constexpr int32_t kMostNumbersSteps = 8;
struct ChainDesc {
  DenseTensor in;
  const NumbersStep* steps;
  int32_t count, passes, whole;  // as NumbersDesc's, of the steps too
  int64_t rows, columns;         // together below 2^31 numbers
};

struct DenseStatistics {  // NormStatistics
  float mean, rstd;
};
struct NormChain {
  const NumbersStep* steps;
  int32_t count;
};
// Vectors of `count` numbers end to end, NormLanes each. Forward: out = y. Backward: out = dx, and
// statistics.
struct NormDesc {
  DenseTensor x, weight, bias, dy, out;
  DenseStatistics* statistics;
  int64_t vectors;
  int32_t count;
  int32_t is_centred;
  int32_t round_element;  // of what the weight multiplies; kBiasNone: not rounded
  int32_t is_backward, add;
  float epsilon, weight_offset;
  // Chains on the same vectors: one from `in`, whose last step stores x (backward: dy), and one
  // from out on.
  DenseTensor in;
  NormChain before, after;
  int32_t whole;  // as NumbersDesc's, of chains too, where weight and bias are float32
  int32_t lanes;  // NormLanes
};
inline constexpr int32_t kNormThreads = 256;
// Lanes of a warp that have columns of a vector, so that warps have whole vectors, all of them.
constexpr int32_t NormLanes(int32_t count, int64_t vectors) {
  int32_t lanes = 8;
  while (lanes < 32 && (count > lanes * 8 || vectors % (32 / lanes) != 0)) lanes *= 2;
  return lanes;
}

// sums[n] += Σ in(row, n), and of norms also weight_sums[n] += Σ in(row, n)·normalised(row, n): in
// blocks of block_rows rows, those in stretches of kSumStretch. A block of threads has 32 columns
// of one of SumParts, all columns of the first part first. Of a block of rows later parts wait for
// their turn, and the last block to be done adds them all. A launch has some of these, one after
// the other.
struct ColumnSumsDesc {
  DenseTensor in;   // [rows, columns]
  int32_t operand;  // numbers are rounded to it first
  int32_t columns;
  int64_t rows, block_rows;  // block_rows: a multiple of kSumStretch
  float* sums;               // or null
  float* weight_sums;        // or null
  DenseTensor x;             // as in; of norms
  const DenseStatistics* statistics;
  int32_t round_element;
  int32_t* turns;  // [SumTurns], zero before and after
  float* carries;  // [SumCarries]: sums of each block of rows so far
  int32_t blocks;  // of threads: SumBlocks
};
inline constexpr int32_t kSumColumns = 32, kSumStretch = 32, kSumThreads = 256, kSumMostRows = 2048;
constexpr int32_t SumGroups(const ColumnSumsDesc& d) {
  return (d.columns + kSumColumns - 1) / kSumColumns;
}
constexpr int32_t SumPartsOfBlock(const ColumnSumsDesc& d) {
  return static_cast<int32_t>((d.block_rows + kSumMostRows - 1) / kSumMostRows);
}
constexpr int64_t SumRowBlocks(const ColumnSumsDesc& d) {
  return (d.rows + d.block_rows - 1) / d.block_rows;
}
constexpr int64_t SumParts(const ColumnSumsDesc& d) {
  return d.rows / d.block_rows * SumPartsOfBlock(d) +
         (d.rows % d.block_rows + kSumMostRows - 1) / kSumMostRows;
}
constexpr int64_t SumBlocks(const ColumnSumsDesc& d) { return SumParts(d) * SumGroups(d); }
// For each group of columns: how many blocks of rows are done, and for each of these, where it has
// several parts, whose turn it is.
constexpr int64_t SumTurns(const ColumnSumsDesc& d) {
  return SumGroups(d) * (SumPartsOfBlock(d) > 1 ? 1 + SumRowBlocks(d) : 1);
}
// The sums that a block of rows leaves, side by side.
constexpr int64_t SumsOfBlock(const ColumnSumsDesc& d) {
  return int64_t{d.weight_sums != nullptr ? 2 : 1} * d.columns;
}
// A single part adds its sums at once.
constexpr int64_t SumCarries(const ColumnSumsDesc& d) {
  return SumParts(d) > 1 ? SumRowBlocks(d) * SumsOfBlock(d) : 0;
}

// heads [rows, head_count, dim]: the pairs of `count` angles turned in place, a thread for each row
// and angle.
struct RotaryDesc {
  DenseTensor heads;
  const uint32_t* positions;  // [rows]
  const float* frequency;     // [count]
  int64_t rows;
  int32_t head_count, dim, count;
  int32_t is_interleaved, is_backward;
  float factor;
};
inline constexpr int32_t kRotaryThreads = 256;

// The parts of gradients' squared norms: runs[32·w + n] = Σ gradient², in float64, over kSquaresRun
// numbers in order, run n of warp w of the launch. A range has whole warps.
// Or, with `totals`, after that: totals[n] = before + the runs of range n, in order, a warp each.
struct SquaresRange {
  const float* gradient;
  int64_t count;
  double before;
  int32_t first_warp;
};
struct SquaresDesc {
  const SquaresRange* ranges;
  double* runs;
  double* totals;
  int32_t range_count, warps;
};
inline constexpr int32_t kSquaresRun = 1024, kSquaresWarps = 4,
                         kSquaresNumbersOfWarp = 32 * kSquaresRun;

// One step of an optimizer on one tensor: modules/optimizer.h's ApplyStep, StepScalars and all. The
// gradient is 0 afterwards; `packed`, if there is one, is the parameter as products read it.
struct StepDesc {
  float* gradient;
  float* parameter;
  DenseTensor packed;
  float *first, *second, *second_max;  // null: the optimizer does not have it
  int64_t count;
  int32_t first_block;
  int32_t is_adam, is_coupled, is_amsgrad, is_nesterov, is_first;
  float multiplier, decay, rate, momentum, gain;
  float toward1, keep2, toward2, root_correction, epsilon;
};
// Tensors of one launch: most are small.
struct StepListDesc {
  const StepDesc* steps;
  int32_t count;
};
inline constexpr int32_t kStepThreads = 256,
                         kStepNumbersOfBlock = 8 * kStepThreads;  // eight a thread

// A product of any elements: A's and B's numbers are rounded to `operand` first. Tiles of
// kPlainTile rows and columns, numbered row by row of tiles.
struct PlainProductDesc {
  ProductDesc product;  // c_element any; with kProductAdd the sum is rounded to it, then added
  int32_t a_element, b_element, operand;
  int32_t a_by_depth,
      b_by_depth;  // A [depth, rows], B [depth, columns]; else [rows or columns, depth]
};
inline constexpr int32_t kPlainTile = 64, kPlainDepth = 16;

}  // namespace attnd
