// WeightTable: where each parameter of each layer stands. Layers in order, parameters of a layer in
// order: `index` counts them so, as OptimizerLayout.group does. Offsets count elements; each tensor
// begins on a multiple of kWeightAlignment elements, so that an engine's loads are aligned in any
// element type. Trained parameters also have a place in gradients and moments, which have no room
// for frozen ones. Immutable; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "modules/graph.h"

namespace attnd {

inline constexpr int64_t kWeightAlignment = 64;

struct WeightEntry {
  std::string name;  // the layer's prefix and the parameter's name
  int64_t layer = 0;
  int64_t parameter = 0;  // in its block
  std::vector<int64_t> shape;
  int64_t elements = 0;
  int64_t offset = 0;                     // in the weights
  std::optional<int64_t> trained_offset;  // in gradients and moments; absent: frozen
  // Cast to the layout's element for products; vectors stay as they are.
  bool is_matrix() const { return shape.size() == 2; }
};

class WeightTable {
 public:
  explicit WeightTable(const ModuleGraph& graph);
  // Returns what a table of the graph takes, at most: a layout of a few KB has up to 32,768
  // parameters.
  static int64_t BytesOf(const ModuleGraph& graph);

  const std::vector<WeightEntry>& entries() const { return entries_; }
  const WeightEntry& Of(int64_t layer, int64_t parameter) const {
    return entries_[first_[layer] + parameter];
  }
  const WeightEntry* Find(absl::string_view name) const;  // null: none of that name

  int64_t elements() const { return elements_; }                  // of the weights, with gaps
  int64_t trained_elements() const { return trained_elements_; }  // of the gradients, with gaps
  int64_t matrix_elements() const { return matrix_elements_; }    // of matrices alone, with gaps

 private:
  std::vector<WeightEntry> entries_;
  std::vector<int64_t> first_;  // [layers]: the first entry of each
  absl::flat_hash_map<std::string, int64_t> by_name_;
  int64_t elements_ = 0, trained_elements_ = 0, matrix_elements_ = 0;
};

}  // namespace attnd
