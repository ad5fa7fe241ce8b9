#include "kernels/layers/cuda/product_choice.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/round_up.h"

namespace attnd {
namespace {

// A small tile takes this part of a large tile's time: a quarter of its products, for each of which
// warps of 32 × 32 numbers read twice the operands from shared memory. That takes 64 cycles for 16
// of the depth, and the tensor cores of an H100 205 for a large tile's. Of float32 both take three
// times as much.
constexpr double kSmallTileTime = 0.31;

// Gradients in wide tiles (H200, over 1,024 rows): a part of 192 columns takes 1.3 times as long as
// one of 128.
constexpr double kWideGradientTime = 1.3;
// Parts of one tile beside each other wait for each other's sums: they take this many times as
// long, and this share of the time of all one after the other at least.
constexpr double kWaitingTime = 2.1, kLeastCutTime = 0.55;
constexpr int64_t kItemBlocks = 4;  // beside whole tiles

// Checks that rows of numbers, `chunk` of which are 16 bytes, are in whole chunks.
bool IsInChunks(const void* data, int64_t stride, int64_t chunk) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % chunk == 0 &&
         stride * 16 < kMostProductRowBytes * chunk;
}

GradientItems ItemsInTiles(absl::Span<const ProductDesc> products, int32_t tile_columns,
                           int multiprocessors) {
  std::vector<int64_t> tiles;
  for (const ProductDesc& p : products) {
    tiles.push_back(ProductTiles(p, kWideProductRows, tile_columns));
  }
  const int64_t all_tiles = std::accumulate(tiles.begin(), tiles.end(), int64_t{0});
  const int64_t blocks = ProductTurns(products[0]);
  const int64_t waves = all_tiles / multiprocessors, rest = all_tiles % multiprocessors;
  const bool is_cut = rest > 0 && 2 * rest < multiprocessors && blocks > 1;
  const int64_t item_blocks = waves > 0 ? std::min(kItemBlocks, blocks) : 1;
  const auto all = static_cast<double>(blocks);
  double parts = all * static_cast<double>(waves);
  if (is_cut) {
    const auto most = static_cast<double>(DivideUp(rest * blocks, int64_t{multiprocessors}));
    parts += std::min(all, std::max(kWaitingTime * most, kLeastCutTime * all));
  } else if (rest > 0) {
    parts += all;
  }
  if (tile_columns == kWideGradientColumns) parts *= kWideGradientTime;
  GradientItems items = {{}, parts};
  int64_t whole_left = is_cut ? all_tiles - rest : all_tiles;
  for (int64_t of_one : tiles) {
    const int64_t whole = std::min(whole_left, of_one);
    whole_left -= whole;
    items.products.push_back(
        {{tile_columns, static_cast<int32_t>(whole), static_cast<int32_t>(item_blocks)},
         whole + (of_one - whole) * DivideUp(blocks, item_blocks)});
  }
  return items;
}

double TimeIn(const LayerKernel& kernel, const ProductDesc& p, int multiprocessors) {
  if (kernel.wide) return 0;
  const ProductTileSize size = TileSizeOf(kernel);
  const int64_t blocks = ProductTurns(p);
  const double of_one = kernel.small ? kSmallTileTime : 1;
  return (blocks > 1 ? kWaitingTime : 1) * of_one *
         static_cast<double>(
             DivideUp(ProductTiles(p, size.rows, size.columns) * blocks, int64_t{multiprocessors}));
}

}  // namespace

std::optional<LayerKernel> TensorCoreKernel(const PlainProductDesc& desc, ElementType operand) {
  const ProductDesc& p = desc.product;
  const int64_t chunk = 16 / ElementBytes(operand);
  const bool a_by_depth = desc.a_by_depth != 0, b_by_depth = desc.b_by_depth != 0;
  if (desc.a_element != desc.operand || desc.b_element != desc.operand ||
      (a_by_depth && !b_by_depth) || a_by_depth != (p.result == kProductAddBlocks) ||
      !IsInChunks(p.a, p.a_stride, chunk) || !IsInChunks(p.b, p.b_stride, chunk) ||
      !IsInChunks(p.c, p.c_stride, chunk) || !IsInChunks(p.bias, 0, chunk) ||
      (a_by_depth ? p.rows : p.depth) % chunk != 0 || p.columns % chunk != 0) {
    return std::nullopt;
  }
  return LayerKernel(a_by_depth   ? KernelKind::kProductDepthDepth
                     : b_by_depth ? KernelKind::kProductRowsDepth
                                  : KernelKind::kProductRowsRows,
                     operand);
}

ProductTileSize TileSizeOf(const LayerKernel& kernel) {
  if (kernel.kind == KernelKind::kDenseProduct) return {kPlainTile, kPlainTile};
  if (kernel.wide) {
    const bool is_gradient = kernel.kind == KernelKind::kProductDepthDepth;
    return {kernel.small ? kShortProductRows : kWideProductRows,
            is_gradient ? kNarrowGradientColumns : kWideProductColumns};
  }
  const int32_t size = kernel.small ? kSmallProductTile : kProductTile;
  return {size, size};
}

double GainOf(const LayerKernel& kernel) {
  if (kernel.kind == KernelKind::kDenseProduct) return 1;
  return kernel.element == ElementType::kFloat32 ? 3 : 8;
}

int64_t RowsOfLaunch(const LayerKernel& kernel, const ProductDesc& p, int64_t turns) {
  const ProductTileSize tile = TileSizeOf(kernel);
  const double row_flops = 2.0 * p.columns * std::max(p.depth, 1);
  auto most = static_cast<int64_t>(GainOf(kernel) * kLaunchFlops / row_flops);
  if (kernel.kind == KernelKind::kProductDepthDepth) {
    if (kernel.wide) turns = (turns - 1) / kWideGradientTurns;
    most = std::min(most, turns / ProductTilesAlong(p.columns, tile.columns) * tile.rows);
  }
  return std::max(most / tile.rows, int64_t{1}) * tile.rows;
}

GradientItems ItemsOf(absl::Span<const ProductDesc> products, int multiprocessors,
                      int32_t tile_columns) {
  if (tile_columns != 0) return ItemsInTiles(products, tile_columns, multiprocessors);
  GradientItems narrow = ItemsInTiles(products, kNarrowGradientColumns, multiprocessors);
  // Few rows: nothing hides a wide one's passages of C.
  if (ProductTurns(products[0]) == 1) return narrow;
  GradientItems wide = ItemsInTiles(products, kWideGradientColumns, multiprocessors);
  return wide.parts < narrow.parts ? wide : narrow;
}

LayerKernel FastestOf(absl::Span<const LayerKernel> kernels, const ProductDesc& p,
                      int multiprocessors) {
  return *std::min_element(kernels.begin(), kernels.end(),
                           [&](const LayerKernel& a, const LayerKernel& b) {
                             return TimeIn(a, p, multiprocessors) < TimeIn(b, p, multiprocessors);
                           });
}

}  // namespace attnd
