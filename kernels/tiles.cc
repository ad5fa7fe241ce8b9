#include "kernels/tiles.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

const char* KindName(KernelKind kind) {
  switch (kind) {
    case KernelKind::kForward:
      return "forward";
    case KernelKind::kMaskTiles:
      return "mask_tiles";
    case KernelKind::kKeyBounds:
      return "key_bounds";
    case KernelKind::kDelta:
      return "delta";
    case KernelKind::kDropoutBits:
      return "dropout_bits";
    case KernelKind::kForwardDropoutBits:
      return "forward_dropout_bits";
    case KernelKind::kBackward:
      return "backward";
    case KernelKind::kQueryGradient:
      return "query_gradient";
    case KernelKind::kSinkGradient:
      return "sink_gradient";
    case KernelKind::kBiasGradient:
      return "bias_gradient";
    case KernelKind::kMergeOutputs:
      return "merge_outputs";
    case KernelKind::kMergeKeyGradients:
      return "merge_key_gradients";
    case KernelKind::kKeepRows:
      return "keep_rows";
    case KernelKind::kCaptureScores:
      return "capture_scores";
    case KernelKind::kCaptureSums:
      return "capture_sums";
    case KernelKind::kDenseNumbers:
      return "dense_numbers";
    case KernelKind::kDenseChain:
      return "dense_chain";
    case KernelKind::kDenseNorm:
      return "dense_norm";
    case KernelKind::kDenseAnyNorm:
      return "dense_any_norm";
    case KernelKind::kDenseNormSums:
      return "dense_norm_sums";
    case KernelKind::kDenseStretchSums:
      return "dense_stretch_sums";
    case KernelKind::kDenseColumnSums:
      return "dense_column_sums";
    case KernelKind::kDenseRotary:
      return "dense_rotary";
    case KernelKind::kDenseSquares:
      return "dense_squares";
    case KernelKind::kDenseStep:
      return "dense_step";
    case KernelKind::kDenseProduct:
      return "dense_product";
    case KernelKind::kProductRowsRows:
      return "product_rows_rows";
    case KernelKind::kProductRowsDepth:
      return "product_rows_depth";
    case KernelKind::kProductDepthDepth:
      return "product_depth_depth";
  }
  return "unknown";
}

// The kinds of scores that a row is for.
struct Scores {
  bool general, listed;
};
constexpr Scores kLinear = {false, false}, kListed = {false, true}, kGeneral = {true, false};

const char* ScoresReason(Scores scores, bool dropout) {
  if (dropout) return "the same in training with dropout";
  if (scores.general) return "softcap, bias, ALiBi, a scale that is not positive";
  return scores.listed ? "masks, and nothing else on scores"
                       : "plain, causal and windowed attention";
}

// Two blocks an SM leave 128 registers: descriptors that are looked up outside the loop, and with
// dropout some of the generator's state, spill. So does what a run's rows want (rules/list_runs.h).
// General scores keep the descriptors of options that are not in use, dropout at 256 columns and
// float16 scores a few words.
int SpillBytes(Scores scores, bool dropout, bool is_crowded) {
  if (scores.general) return dropout ? 320 : 256;
  if (dropout) return scores.listed ? 200 : 144;
  return is_crowded ? 64 : 16;
}

void AddBackward(int head_dim, std::vector<KernelRow>& rows) {
  const int q_rows = head_dim > 128 ? 16 : 32;
  const int kv_rows = head_dim <= 64 ? 128 : head_dim <= 128 ? 64 : 32;
  for (bool ordered : {true, false}) {
    for (Scores scores : {kLinear, kListed, kGeneral}) {
      if (scores.listed && !ordered) continue;  // too little to gain
      for (bool dropout : {false, true}) {
        rows.push_back({.kind = KernelKind::kBackward,
                        .head_dim = head_dim,
                        .general = scores.general,
                        .listed = scores.listed,
                        .dropout = dropout,
                        .ordered = ordered,
                        .tile = {q_rows, kv_rows, head_dim, 1},
                        .reason = ordered ? ScoresReason(scores, dropout)
                                          : "allow_nondeterministic: dQ by atomics, 3 to 5 points",
                        .spill_bytes = SpillBytes(scores, dropout, false)});
      }
    }
  }
  const Tile rows_only = {64, 0, head_dim, 2};
  for (bool ordered : {true, false}) {
    rows.push_back({.kind = KernelKind::kQueryGradient,
                    .head_dim = head_dim,
                    .stays = true,
                    .ordered = ordered,
                    .tile = rows_only,
                    .reason = "after backward: dQ in its rows"});
  }
}

constexpr int kSmallRows = 32;
// Adds rows for masks whose tiles are mostly empty inside: a score warp and an output warp a block.
void AddSmallForward(int head_dim, std::vector<KernelRow>& rows) {
  for (bool dropout : {false, true}) {
    const int blocks = head_dim > 64 ? 4 : head_dim > 32 ? 6 : 8;
    rows.push_back({.kind = KernelKind::kForward,
                    .head_dim = head_dim,
                    .listed = true,
                    .small = true,
                    .dropout = dropout,
                    .tile = {kSmallRows, 32, head_dim, blocks},
                    .reason = "masks that show little of a tile of 128 rows"});
  }
}

// The same: one warp (of wide heads two) makes P and dV, one dS and dK, all of them dQ.
void AddSmallBackward(int head_dim, std::vector<KernelRow>& rows) {
  for (bool dropout : {false, true}) {
    rows.push_back({.kind = KernelKind::kBackward,
                    .head_dim = head_dim,
                    .listed = true,
                    .small = true,
                    .dropout = dropout,
                    .tile = {kSmallRows, 32, head_dim,
                             head_dim > 64   ? 2
                             : head_dim > 32 ? 4
                                             : 6},
                    .reason = "masks that show little of a tile of 64 rows and 128 keys",
                    .spill_bytes = head_dim > 64   ? 0
                                   : head_dim > 32 ? 4
                                                   : 16});  // of 168 registers
  }
}

// The registers of 256 threads hold Q and O of 128 rows up to 128 wide, of 64 beyond.
Tile ForwardTile(int head_dim) {
  return {head_dim > 128 ? 64 : 128, 32, head_dim, head_dim <= 64 ? 2 : 1};
}

void AddForward(int head_dim, std::vector<KernelRow>& rows) {
  for (Scores scores : {kLinear, kListed, kGeneral}) {
    for (bool dropout : {false, true}) {
      rows.push_back({.kind = KernelKind::kForward,
                      .head_dim = head_dim,
                      .general = scores.general,
                      .listed = scores.listed,
                      .dropout = dropout,
                      .tile = ForwardTile(head_dim),
                      .reason = ScoresReason(scores, dropout),
                      .spill_bytes = SpillBytes(scores, dropout, head_dim <= 64)});
    }
    rows.push_back({.kind = KernelKind::kForward,
                    .head_dim = head_dim,
                    .half_accumulate = true,
                    .general = scores.general,
                    .listed = scores.listed,
                    .tile = ForwardTile(head_dim),
                    .reason = "calls that ask for float16 accumulators",
                    .spill_bytes = SpillBytes(scores, false, head_dim <= 64)});
  }
}

// Adds the kernels that every architecture needs around its forward and backward, for rows of
// `element`. On sm_70 the code around the search under a mask or a bias (rules/seen_keys.h) spills.
void AddPasses(ElementType element, std::vector<KernelRow>& rows) {
  for (KernelKind kind : {KernelKind::kKeyBounds, KernelKind::kDelta}) {
    rows.push_back({.kind = kind,
                    .element = element,
                    .stays = true,
                    .tile = {64, 0, 0, 4},
                    .reason = "ahead of backward",
                    .spill_bytes = kind == KernelKind::kDelta ? 120 : 0});
  }
  rows.push_back({.kind = KernelKind::kBiasGradient,
                  .element = element,
                  .tile = {16, 16, 0, 1},
                  .reason = "gradients of bias tensors"});
}
void AddSmall(ElementType element, std::vector<KernelRow>& rows) {
  AddPasses(element, rows);
  // On sm_70 the walk over heads spills a few words between two of them.
  rows.push_back({.kind = KernelKind::kCaptureScores,
                  .element = element,
                  .tile = {kCaptureRows, element == ElementType::kFloat32 ? 64 : 128, 0, 1},
                  .reason = "captured attention maps",
                  .spill_bytes = element == ElementType::kFloat16 ? 20 : 0});
  if (element != ElementType::kFloat32) {
    rows.push_back({.kind = KernelKind::kMergeOutputs,
                    .element = element,
                    .tile = {0, 0, 0, 4},
                    .reason = "masks with long lists of tiles"});
  }
  if (element != ElementType::kFloat16) return;
  rows.push_back({.kind = KernelKind::kMergeKeyGradients,
                  .tile = {0, 0, 0, 4},
                  .reason = "masks with long lists of tiles"});
  rows.push_back({.kind = KernelKind::kMaskTiles,
                  .tile = {0, 0, 0, 1},
                  .reason = "ahead of calls with a bool mask"});
  rows.push_back({.kind = KernelKind::kSinkGradient,
                  .tile = {16, 16, 0, 1},
                  .reason = "gradients of sink logits"});
  rows.push_back({.kind = KernelKind::kCaptureSums,
                  .tile = {kCaptureRows, 0, 0, 1},
                  .reason = "captured attention maps"});
}

// Adds the kernels of modules besides attention, the same code for every architecture. Volta needs
// fewer blocks that wait for memory together, and some of what norms and sums compute with spills.
void AddDense(int number_blocks, int chain_blocks, std::vector<KernelRow>& rows) {
  const auto add = [&rows](KernelKind kind, int blocks, int spill_bytes = 0) {
    rows.push_back({.kind = kind,
                    .tile = {0, 0, 0, blocks},
                    .reason = "layers of modules",
                    .spill_bytes = spill_bytes});
  };
  add(KernelKind::kDenseNumbers, number_blocks);
  add(KernelKind::kDenseChain, chain_blocks);
  add(KernelKind::kDenseNorm, 4, 48);
  add(KernelKind::kDenseAnyNorm, 4, 272);
  add(KernelKind::kDenseColumnSums, 3, 24);
  add(KernelKind::kDenseRotary, 1);
  add(KernelKind::kDenseSquares, 1);
  add(KernelKind::kDenseStep, 1);
  add(KernelKind::kDenseProduct, 2, 16);
}

// In float32 the state for the rare second run spills, on sm_80 also what that run has in flight.
void AddProducts(ElementType element, bool small, std::vector<KernelRow>& rows) {
  for (KernelKind kind : {KernelKind::kProductRowsRows, KernelKind::kProductRowsDepth,
                          KernelKind::kProductDepthDepth}) {
    rows.push_back({.kind = kind,
                    .element = element,
                    .small = small,
                    .tile = {0, 0, 0, small ? 4 : 2},
                    .reason = small ? "layers of few rows" : "linear layers of modules",
                    .spill_bytes = element != ElementType::kFloat32 ? 0
                                   : small                          ? 80
                                                                    : 480});
  }
}

// Adds products in wide tiles, and in those of half the rows. Registers of gradients in tiles of
// 192 columns go to the threads that sum: the one that brings spills.
void AddWideProducts(ElementType element, std::vector<KernelRow>& rows) {
  for (KernelKind kind : {KernelKind::kProductRowsRows, KernelKind::kProductRowsDepth,
                          KernelKind::kProductDepthDepth}) {
    for (bool small : {false, true}) {
      if (small && kind == KernelKind::kProductDepthDepth) continue;
      rows.push_back({.architecture = Architecture::kSm90,
                      .kind = kind,
                      .element = element,
                      .small = small,
                      .wide = true,
                      .stays = true,
                      .tile = {0, 0, 0, 1},
                      .reason = small ? "layers of few rows" : "layers of many rows",
                      .spill_bytes = kind == KernelKind::kProductDepthDepth ? 96 : 0});
    }
  }
}

// float32 as three products of float16. A lane holds both parts of Q: of 32 rows up to 64 wide, of
// 16 rows beyond (kernels/sm70/forward_layout.h). Beside two sums of O the stagers spill.
void AddSplitForward(int head_dim, std::vector<KernelRow>& rows) {
  for (Scores scores : {kLinear, kListed, kGeneral}) {
    for (bool dropout : {false, true}) {
      rows.push_back({.kind = KernelKind::kForward,
                      .element = ElementType::kFloat32,
                      .head_dim = head_dim,
                      .general = scores.general,
                      .listed = scores.listed,
                      .dropout = dropout,
                      .tile = {head_dim > 64 ? 64 : 128, 32, head_dim, 1},
                      .reason = ScoresReason(scores, dropout),
                      .spill_bytes = head_dim > 64 ? 256 : 64});
    }
  }
}

// Shared memory holds K and V of 64 keys up to 64 wide, of 32 beyond.
void AddSplitBackward(int head_dim, std::vector<KernelRow>& rows) {
  for (Scores scores : {kLinear, kListed, kGeneral}) {
    for (bool dropout : {false, true}) {
      rows.push_back({.kind = KernelKind::kBackward,
                      .element = ElementType::kFloat32,
                      .head_dim = head_dim,
                      .general = scores.general,
                      .listed = scores.listed,
                      .dropout = dropout,
                      .tile = {32, head_dim > 64 ? 32 : 64, head_dim, 1},
                      .reason = ScoresReason(scores, dropout)});
    }
  }
  rows.push_back({.kind = KernelKind::kQueryGradient,
                  .element = ElementType::kFloat32,
                  .head_dim = head_dim,
                  .stays = true,
                  .tile = {64, 0, head_dim, 2},
                  .reason = "after backward: dQ in its rows"});
}

std::vector<KernelRow> Sm70Rows() {
  std::vector<KernelRow> rows;
  for (int head_dim : {32, 64, 96, 128, 256}) AddForward(head_dim, rows);
  for (int head_dim : {64, 128}) {
    AddSplitForward(head_dim, rows);
    AddSplitBackward(head_dim, rows);
  }
  for (int head_dim : {32, 64, 128}) AddSmallForward(head_dim, rows);
  for (int head_dim : {32, 64, 96, 128, 256}) AddBackward(head_dim, rows);
  for (int head_dim : {32, 64, 128}) AddSmallBackward(head_dim, rows);
  AddSmall(ElementType::kFloat16, rows);
  AddPasses(ElementType::kFloat32, rows);
  rows.push_back({.kind = KernelKind::kKeepRows,
                  .tile = {64, 0, 0, 1},
                  .reason = "after a forward in bfloat16 whose tensors stay for backward"});
  AddDense(3, 3, rows);
  // A step of a chain spills beside a vector and a column's sums.
  rows.push_back({.kind = KernelKind::kDenseNormSums,
                  .tile = {0, 0, 0, 2},
                  .reason = "layers of modules of many rows",
                  .spill_bytes = 168});
  rows.push_back({.kind = KernelKind::kDenseStretchSums,
                  .tile = {0, 0, 0, 1},
                  .reason = "layers of modules of many rows"});
  AddProducts(ElementType::kFloat16, false, rows);
  for (KernelRow& row : rows) row.architecture = Architecture::kSm70;
  return rows;
}

// The tile is as wide as 255 registers of 128 threads (forward) or 256 (backward) allow.
Tile ForwardTileOfSm80(int head_dim) {
  return head_dim > 128 ? Tile{64, 64, head_dim, 1} : Tile{128, 64, head_dim, 1};
}
Tile BackwardTileOfSm80(int head_dim) { return {64, head_dim > 128 ? 64 : 128, head_dim, 1}; }
// In float32 two blocks an SM share its memory, but for backward of wide heads.
Tile FloatForwardTile(int head_dim) { return {128, head_dim > 64 ? 32 : 64, head_dim, 1}; }
Tile FloatBackwardTile(int head_dim) { return {64, 64, head_dim, head_dim > 64 ? 1 : 2}; }

void AddSm80(ElementType element, int head_dim, std::vector<KernelRow>& rows) {
  const bool is_float = element == ElementType::kFloat32;
  for (Scores scores : {kLinear, kListed, kGeneral}) {
    for (bool dropout : {false, true}) {
      KernelRow row = {.element = element,
                       .head_dim = head_dim,
                       .general = scores.general,
                       .listed = scores.listed,
                       .dropout = dropout,
                       .reason = ScoresReason(scores, dropout),
                       .spill_bytes = is_float ? 640 : 512};
      row.kind = KernelKind::kForward;
      row.tile = is_float ? FloatForwardTile(head_dim) : ForwardTileOfSm80(head_dim);
      rows.push_back(row);
      row.kind = KernelKind::kBackward;
      row.tile = is_float ? FloatBackwardTile(head_dim) : BackwardTileOfSm80(head_dim);
      rows.push_back(row);
      if (is_float || scores.listed || scores.general) continue;  // too little to gain
      row.ordered = false;
      row.reason = "allow_nondeterministic: dQ by atomics";
      rows.push_back(row);
    }
  }
  for (bool ordered : {true, false}) {
    if (is_float && !ordered) continue;
    rows.push_back({.kind = KernelKind::kQueryGradient,
                    .element = element,
                    .head_dim = head_dim,
                    .stays = true,
                    .ordered = ordered,
                    .tile = {64, 0, head_dim, is_float ? 2 : 4},
                    .reason = "after backward: dQ in its rows",
                    .spill_bytes = head_dim > 64 ? 96 : 0});  // between accumulators
  }
}

// One warp of 32 rows, and two of 32 keys: as many blocks as registers allow.
void AddSmallOfSm80(ElementType element, int head_dim, std::vector<KernelRow>& rows) {
  for (bool dropout : {false, true}) {
    KernelRow row = {.element = element,
                     .head_dim = head_dim,
                     .listed = true,
                     .small = true,
                     .dropout = dropout};
    row.kind = KernelKind::kForward;
    row.tile = {kSmallRows, 32, head_dim, head_dim > 64 ? 8 : head_dim > 32 ? 12 : 16};
    row.reason = "masks that show little of a tile of 128 rows";
    rows.push_back(row);
    row.kind = KernelKind::kBackward;
    row.tile = {kSmallRows, 32, head_dim, head_dim > 64 ? 4 : 6};
    row.reason = "masks that show little of a tile of 64 rows and 128 keys";
    rows.push_back(row);
  }
}

std::vector<KernelRow> Sm80Rows() {
  std::vector<KernelRow> rows;
  for (ElementType element : {ElementType::kFloat16, ElementType::kBFloat16}) {
    for (int head_dim : {32, 64, 128, 256}) AddSm80(element, head_dim, rows);
    for (int head_dim : {32, 64, 128}) AddSmallOfSm80(element, head_dim, rows);
    AddSmall(element, rows);
  }
  // Wider heads' rows of float32 and their sums fit neither registers nor shared memory.
  for (int head_dim : {64, 128}) AddSm80(ElementType::kFloat32, head_dim, rows);
  AddSmall(ElementType::kFloat32, rows);
  AddDense(6, 5, rows);
  for (ElementType element :
       {ElementType::kFloat16, ElementType::kBFloat16, ElementType::kFloat32}) {
    for (bool small : {false, true}) AddProducts(element, small, rows);
  }
  for (KernelRow& row : rows) row.architecture = Architecture::kSm80;
  return rows;
}

// Registers: two consumers of 64 × 128 numbers of O, or three of 64 × 64.
Tile ForwardTileOfSm90(int head_dim) {
  return head_dim > 64 ? Tile{128, 128, head_dim, 1} : Tile{192, 128, head_dim, 1};
}
constexpr int kWidestOfSm90 = 128;

// General scores keep a slope beside each score, for which registers have no room. Warps that bring
// have 24 registers, and spill.
void AddBackwardOfSm90(ElementType element, int head_dim, std::vector<KernelRow>& rows) {
  for (Scores scores : {kLinear, kListed}) {
    for (bool dropout : {false, true}) {
      KernelRow row = {.architecture = Architecture::kSm90,
                       .kind = KernelKind::kBackward,
                       .element = element,
                       .head_dim = head_dim,
                       .listed = scores.listed,
                       .dropout = dropout,
                       .dropout_ahead = dropout,
                       .stays = true,
                       .maps = kBackwardMaps,
                       .rests_by_row = true,
                       .tile = {64, 128, head_dim, 1},
                       .reason = ScoresReason(scores, dropout),
                       .spill_bytes = 256};
      rows.push_back(row);
      if (scores.listed) continue;  // too little to gain
      row.ordered = false;
      row.reason = "allow_nondeterministic: dQ by atomics";
      rows.push_back(row);
    }
  }
  for (bool ordered : {true, false}) {
    rows.push_back({.architecture = Architecture::kSm90,
                    .kind = KernelKind::kQueryGradient,
                    .element = element,
                    .head_dim = head_dim,
                    .ordered = ordered,
                    .tile = {64, 0, head_dim, 4},
                    .reason = "after backward: dQ in its rows",
                    .spill_bytes = head_dim > 64 ? 96 : 0});
  }
}

std::vector<KernelRow> Sm90Rows() {
  std::vector<KernelRow> rows;
  rows.push_back({.architecture = Architecture::kSm90,
                  .kind = KernelKind::kDropoutBits,
                  .tile = {kDqBlockRows, 128, 0, 3},
                  .reason = "ahead of backward with dropout"});
  for (int head_dim : {64, kWidestOfSm90}) {
    Tile tile = ForwardTileOfSm90(head_dim);
    tile.blocks_per_sm = head_dim > 64 ? 4 : 2;
    rows.push_back({.architecture = Architecture::kSm90,
                    .kind = KernelKind::kForwardDropoutBits,
                    .head_dim = head_dim,
                    .tile = tile,
                    .reason = "ahead of forward with dropout"});
  }
  for (ElementType element : {ElementType::kFloat16, ElementType::kBFloat16}) {
    AddWideProducts(element, rows);
    for (int head_dim : {64, kWidestOfSm90}) {
      AddBackwardOfSm90(element, head_dim, rows);
      for (Scores scores : {kLinear, kListed, kGeneral}) {
        for (bool dropout : {false, true}) {
          rows.push_back({.architecture = Architecture::kSm90,
                          .kind = KernelKind::kForward,
                          .element = element,
                          .head_dim = head_dim,
                          .general = scores.general,
                          .listed = scores.listed,
                          .dropout = dropout,
                          .dropout_ahead = dropout,
                          .stays = true,
                          .maps = kForwardMaps,
                          .tile = ForwardTileOfSm90(head_dim),
                          .reason = ScoresReason(scores, dropout),
                          .spill_bytes = 512});
        }
      }
    }
  }
  return rows;
}

}  // namespace

std::string NameOf(const KernelRow& row) {
  std::string name = KindName(row.kind);
  if (row.element == ElementType::kBFloat16) name += "_bf16";
  if (row.element == ElementType::kFloat32) {
    name += row.architecture == Architecture::kSm70 ? "_f16x3" : "_tf32x3";
  }
  if (row.head_dim == 0) return name + (row.small ? "_small" : "") + (row.wide ? "_wide" : "");
  name += "_d" + std::to_string(row.head_dim);
  if (row.kind == KernelKind::kForwardDropoutBits) return name;
  if (row.kind == KernelKind::kQueryGradient) return name + (row.ordered ? "" : "_atomic");
  name += row.half_accumulate ? "_f16" : "_f32";
  name += row.general ? "_general" : row.small ? "_small" : row.listed ? "_listed" : "_linear";
  if (row.dropout) name += "_dropout";
  if (!row.ordered) name += "_atomic";
  if (row.ordered && row.rests_by_row) name += "_by_row";
  return name;
}

const std::vector<ArchitectureInfo>& Architectures() {
  static const std::vector<ArchitectureInfo>& all =
      *new std::vector<ArchitectureInfo>{{Architecture::kSm70, "sm70", 70, kLanesOfSm70},
                                         {Architecture::kSm80, "sm80", 80, kLanesOfSm80},
                                         {Architecture::kSm90, "sm90", 90, kLanesOfSm80}};
  return all;
}

const ArchitectureInfo& InfoOf(Architecture architecture) {
  return *std::find_if(Architectures().begin(), Architectures().end(),
                       [&](const auto& info) { return info.architecture == architecture; });
}

const std::vector<KernelRow>& KernelRows() {
  static const std::vector<KernelRow>& rows = *[] {
    auto* all = new std::vector<KernelRow>(Sm70Rows());
    for (const std::vector<KernelRow>& rows : {Sm80Rows(), Sm90Rows()}) {
      all->insert(all->end(), rows.begin(), rows.end());
    }
    return all;
  }();
  return rows;
}

std::vector<KernelRow> KernelRowsOf(Architecture architecture) {
  std::vector<KernelRow> rows;
  std::copy_if(KernelRows().begin(), KernelRows().end(), std::back_inserter(rows),
               [&](const KernelRow& row) { return row.architecture == architecture; });
  return rows;
}

std::vector<KernelRow> KernelRowsOfGpu(int compute_capability) {
  if (compute_capability < 70) return {};
  if (compute_capability < 80) return KernelRowsOf(Architecture::kSm70);
  std::vector<KernelRow> rows = KernelRowsOf(Architecture::kSm80);
  if (compute_capability != 90) return rows;
  std::erase_if(rows, [](const KernelRow& row) {
    if (row.element == ElementType::kFloat32) return false;
    if (row.kind >= KernelKind::kProductRowsRows) return true;  // wide tiles are faster
    if (row.small || row.head_dim > kWidestOfSm90) return false;
    if (row.kind == KernelKind::kQueryGradient) return row.head_dim >= 64;
    return row.kind == KernelKind::kForward ||
           (row.kind == KernelKind::kBackward && !row.general && !row.ordered);
  });
  const std::vector<KernelRow> own = KernelRowsOf(Architecture::kSm90);
  rows.insert(rows.end(), own.begin(), own.end());
  return rows;
}

std::string TargetOf(int compute_capability) {
  return absl::StrCat("sm_", compute_capability, compute_capability == 90 ? "a" : "");
}

}  // namespace attnd
