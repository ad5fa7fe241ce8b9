// tiles.h: the kernels that exist, one row each: what they can do and how they cut their work. The
// build compiles each row, the cuda engine picks among them (kernels/cuda/selection.h), the
// emulator runs them. Host code; device code takes its Tile from a row as a template argument.
#pragma once

#include <string>
#include <vector>

#include "attention/element.h"
#include "kernels/rules/params.h"
#include "kernels/rules/tile_math.h"

namespace attnd {

// The instructions that a kernel is written in.
// Later ones are preferred where they have a kernel.
enum class Architecture : unsigned char { kSm70, kSm80, kSm90 };

struct ArchitectureInfo {
  Architecture architecture;
  const char* name;        // "sm70": the folder of its kernels, and their namespace in attnd
  int compute_capability;  // 70: the GPUs that its rows are made for
  LaneOrder lanes;         // how they read a mask's bitmaps
};
// Oldest first.
const std::vector<ArchitectureInfo>& Architectures();
const ArchitectureInfo& InfoOf(Architecture architecture);

// Returns the compiler's name of GPUs of this compute capability: "sm_80"; for 90 "sm_90a", whose
// code no other GPU runs.
std::string TargetOf(int compute_capability);

enum class KernelKind : unsigned char {
  kForward,
  kMaskTiles,           // ahead of either under a bool mask: its lists and bitmaps
  kKeyBounds,           // backward's first step: how large K and V are
  kDelta,               // then what belongs to a row: rowsum(dO∘O) − dlse, …
  kDropoutBits,         // ahead of a backward that reads dropout's decisions
  kForwardDropoutBits,  // ahead of such a forward
  kBackward,            // dK, dV, and dQ in pieces
  kQueryGradient,       // dQ's pieces into place
  kSinkGradient,        // one block for each (problem, batch entry, query head)
  kBiasGradient,        // one block for each 16×16 numbers of the gradient
  kMergeOutputs,        // after a forward some of whose lists are cut in runs (rules/list_runs.h)
  kMergeKeyGradients,   // after such a backward
  kKeepRows,            // after a kept bfloat16 forward: V and O in backward's scale
  kCaptureScores,  // after a forward whose map is captured: tiles of the map, summed over heads
  kCaptureSums,    // then their averages, blocks and moments
  // The operations of modules besides attention (kernels/dense), of any shape and element.
  kDenseNumbers,      // copies, functions of single numbers, dropout
  kDenseChain,        // several such functions, one after the other
  kDenseNorm,         // normalisation and its gradient, with such functions before and behind
  kDenseAnyNorm,      // the same of tensors of several elements, or not in whole groups
  kDenseNormSums,     // a norm's gradient and what those of its parameters are sums of
  kDenseStretchSums,  // those sums
  kDenseColumnSums,   // gradients of biases and norms
  kDenseRotary,
  kDenseSquares,  // of gradients, for their norm
  kDenseStep,     // of an optimizer
  kDenseProduct,  // on no tensor core: where those of products cannot
  // Products on tensor cores. How A and B lie (kernels/dense/product_params.h).
  kProductRowsRows,    // A [rows, depth], B [columns, depth]
  kProductRowsDepth,   // A [rows, depth], B [depth, columns]
  kProductDepthDepth,  // A [depth, rows], B [depth, columns]
};

struct KernelRow {
  Architecture architecture = Architecture::kSm70;
  KernelKind kind = KernelKind::kForward;
  ElementType element = ElementType::kFloat16;  // what it multiplies or reads
  int head_dim = 0;                             // both head dimensions are at most this; 0: any
  bool half_accumulate = false;                 // products accumulate in float16
  bool general = false;  // softcap, bias, ALiBi, any scale, with a mask or without
  bool listed = false;   // else: a positive scale with a mask, or without
  bool small = false;    // of listed ones: a block has 32 rows and lists of its own; of products:
                         // small tiles (kernels/dense/product_params.h)
  bool wide = false;     // of products: wide tiles, by tensor maps; small ones too
  bool dropout = false;
  bool dropout_ahead = false;  // kForwardDropoutBits or kDropoutBits decides
  bool stays = false;          // its blocks, tile.blocks_per_sm each SM, take many tiles
  int maps = 0;                // tensor maps (MapOf) that it loads by
  bool ordered = true;  // backward: the same bits of dQ every time, in whatever order blocks run
  bool rests_by_row = false;  // of dQ's second integers (NeedsDqRest): only rows that need them
  Tile tile = {};             // see tile_math.h; kDelta and kQueryGradient: q_rows only
  const char* reason = "";    // who needs it
  // Bytes that may spill when its target's registers run short: more stops the build.
  int spill_bytes = 0;
};

// Tells whether the kernel of backward itself zeroes dQ's sums, rather than the host.
inline bool ZeroesSums(const KernelRow& row) {
  return row.kind == KernelKind::kBackward && row.stays;
}

// "forward_d64_f32_linear_dropout", of bfloat16 "forward_bf16_d64_f32_linear_dropout", of float32
// as three products of TF32 numbers "forward_tf32x3_d64_f32_linear_dropout", of float16 numbers (on
// sm_70) "forward_f16x3_d64_f32_linear_dropout": the kernel's name in messages, receipts and the
// index. No other row of a GPU has it.
std::string NameOf(const KernelRow& row);

// Every row that is built, those of one architecture, and those that a GPU of this compute
// capability is given: its own, and of the one before what its own cannot do. Empty: too old.
const std::vector<KernelRow>& KernelRows();
// GPUs of at least this compute capability start a launch's blocks while the one before ends.
inline constexpr int kOverlappingLaunches = 90;
std::vector<KernelRow> KernelRowsOf(Architecture architecture);
std::vector<KernelRow> KernelRowsOfGpu(int compute_capability);

}  // namespace attnd
