// ModuleGraph: a layout that has been checked, with the shape of every value. Holding one means
// that any call whose rows are valid can be computed: sizes fit, values are read after they are
// made, each op's gradient is defined. Immutable; any thread.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "modules/block_shapes.h"
#include "modules/layout.h"

namespace attnd {

// Layers [first, end) of a module. end 0: up to its last.
struct LayerRange {
  int64_t first = 0, end = 0;
  int64_t size() const { return end - first; }
};

class ModuleGraph {
 public:
  // InvalidArgument "block[0].op[3].linear.weight: expected ..., got ...". Memory and time are
  // those of the layout, whatever its sizes say.
  static absl::StatusOr<ModuleGraph> Make(ModuleLayout layout);

  const ModuleLayout& layout() const { return layout_; }
  const BlockShapes& shapes(int64_t block) const { return shapes_[block]; }
  const ModuleBlock& BlockOf(int64_t layer) const {
    return layout_.blocks[layout_.layers[layer].block];
  }
  const BlockShapes& ShapesOf(int64_t layer) const { return shapes_[layout_.layers[layer].block]; }

  // Layers [first, end) as a module of their own, of the same bits: its x is what the layer before
  // gives, as wide as that is.
  ModuleGraph Slice(int64_t first, int64_t end) const;
  int64_t first_layer() const { return first_layer_; }  // of a slice; dropout's sites count from it
  int64_t layers() const { return static_cast<int64_t>(layout_.layers.size()); }
  LayerRange Resolved(LayerRange range) const {
    return {range.first, range.end == 0 ? layers() : range.end};
  }
  // The element of the input of a range that begins with `layer`, or of the output of one that ends
  // before it.
  ElementType BorderElement(int64_t layer) const {
    return layer == layers() ? y_element() : ElementOf(layer, kInputValue);
  }
  // The elements of x and dx, and of y and dy: the layout's, unless a slice is cut where values are
  // wide.
  ElementType x_element() const { return ElementOf(0, kInputValue); }
  ElementType y_element() const { return y_is_wide_ ? layout_.wide_element : layout_.element; }

  // Whether the input of `layer` is of wide_element: what the layer before gives. x of a whole
  // module never is.
  bool InputIsWide(int64_t layer) const;
  ElementType ElementOf(int64_t layer, int64_t value) const;
  // The last op that reads each value, [ops + 2]: −1 where none does, ops.size() for the output.
  std::vector<int64_t> LastUses(int64_t block) const;

 private:
  ModuleGraph(ModuleLayout layout, std::vector<BlockShapes> shapes)
      : layout_(std::move(layout)), shapes_(std::move(shapes)) {}

  ModuleLayout layout_;
  std::vector<BlockShapes> shapes_;
  int64_t first_layer_ = 0;
  bool x_is_wide_ = false, y_is_wide_ = false;
};

}  // namespace attnd
