// ProductTuning: what a search found to be faster for products of one module than what is
// predicted (product_choice.h). No bit depends on it. ProductLog: what it may choose from.
// Values; one thread at a time.
#pragma once

#include <bit>
#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "kernels/dense/dense_params.h"
#include "kernels/tiles.h"

namespace attnd {

// A product of a layer, whatever rows a call has. `other`: the depth; of a gradient C's rows.
struct ProductKey {
  KernelKind kind = KernelKind::kProductRowsRows;
  int64_t columns = 0, other = 0;
  auto operator<=>(const ProductKey&) const = default;
};
inline ProductKey KeyOf(KernelKind kind, const ProductDesc& p) {
  return {kind, p.columns, kind == KernelKind::kProductDepthDepth ? p.rows : p.depth};
}

struct ProductChoice {
  std::optional<bool> small;     // tiles, where there are both; absent: as predicted
  int32_t gradient_columns = 0;  // of tiles of wide gradients that this one begins; 0: as predicted
  bool apart = false;            // in wide tiles: begins a launch of its own
  bool operator==(const ProductChoice&) const = default;
};
using ProductChoices = std::map<ProductKey, ProductChoice>;

// The power of two of rows whose calls take the same choices.
inline int64_t RowsBucket(int64_t rows) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
}

struct ProductTuning {
  int64_t rows_bucket = 0;  // calls of other numbers of rows go as predicted
  ProductChoices products;

  ProductChoice Of(KernelKind kind, const ProductDesc& p) const {
    if (products.empty()) return {};
    const int64_t rows = kind == KernelKind::kProductDepthDepth ? p.depth : p.rows;
    const auto found = products.find(KeyOf(kind, p));
    const bool is_there = found != products.end() && RowsBucket(rows) == rows_bucket;
    return is_there ? found->second : ProductChoice();
  }
};

struct ProductLog {
  struct Group {
    std::vector<ProductKey> keys;
    int32_t gradient_columns = 0;  // of tiles, as predicted; 0: no gradients
  };
  std::map<ProductKey, bool> sized;  // products with a choice of tiles: predicted small
  std::vector<Group> groups;         // in wide tiles, of one launch each
};

}  // namespace attnd
