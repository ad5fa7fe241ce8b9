// Which kernel makes a product of layers, and in tiles of which size. Pure functions.
//
// Sizes of a layer decide the kernel, not how many rows a call has: a row's bits depend on no other
// row. Its tiles' size, which changes no bit, follows from rows and the GPU too: wide ones where
// there are some, else those with which the busiest multiprocessor is predicted to be done first,
// which makes its share of the tiles one after the other.
#pragma once

#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "kernels/dense/dense_params.h"
#include "kernels/layers/cuda/launch_queue.h"

namespace attnd {

// The kernel of tensor cores for this product, with large tiles, if any can make it.
std::optional<LayerKernel> TensorCoreKernel(const PlainProductDesc& desc, ElementType operand);

// Rows and columns of C that a block of this kernel makes at a time, of gradients in wide tiles at
// least: ItemsOf has the columns.
struct ProductTileSize {
  int32_t rows, columns;
};
ProductTileSize TileSizeOf(const LayerKernel& kernel);

// How much faster this kernel is than the plain one, about, which makes so much in a launch.
double GainOf(const LayerKernel& kernel);
inline constexpr double kLaunchFlops = 1e11;  // about 10 ms of a V100
// Tiles of the gradients in wide tiles of a launch.
inline constexpr int64_t kMostGradientTiles = (LaunchQueue::kTurns - 1) / kWideGradientTurns;
// Returns how many rows of C a launch has at most: it ends soon, and has `turns` words for the
// tiles of a gradient.
int64_t RowsOfLaunch(const LayerKernel& kernel, const ProductDesc& p, int64_t turns);

// How gradients in wide tiles, of one depth, are cut into items of a launch: in whole tiles, of
// `tile_columns` or (0) of the width that is predicted to be done first; but where those left over
// would occupy less than half of the multiprocessors these, the last ones, are cut along the depth.
struct GradientItems {
  struct Product {
    GradientCut cut;
    int64_t count;
  };
  std::vector<Product> products;
  double parts;  // predicted time, in those of 128 × 128 numbers over kProductBlockDepth
};
GradientItems ItemsOf(absl::Span<const ProductDesc> products, int multiprocessors,
                      int32_t tile_columns = 0);

// The one of these kernels that is predicted to be done first, of equal ones the first; one in wide
// tiles before all. At least one.
LayerKernel FastestOf(absl::Span<const LayerKernel> kernels, const ProductDesc& p,
                      int multiprocessors);

}  // namespace attnd
