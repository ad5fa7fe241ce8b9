#include "modules/graph.h"

#include "base/status_macros.h"
#include "modules/check_layout.h"
#include "modules/field_error.h"
#include "modules/op_uses.h"

namespace attnd {
namespace {

absl::Status CheckAttentionScales(const ModuleLayout& layout,
                                  const std::vector<BlockShapes>& shapes) {
  for (size_t n = 0; n < layout.layers.size(); ++n) {
    const ModuleLayer& layer = layout.layers[n];
    const std::string path = absl::StrCat("layer[", n, "].attention_scale");
    const size_t count = shapes[layer.block].attention_ops.size();
    if (!layer.attention_scale.empty() && layer.attention_scale.size() != count) {
      return WrongField(path, absl::StrCat("none, or one for each of ", count, " attention ops"),
                        layer.attention_scale.size());
    }
    for (float scale : layer.attention_scale) RETURN_IF_ERROR(FieldIsFinite(path, scale));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModuleGraph> ModuleGraph::Make(ModuleLayout layout) {
  RETURN_IF_ERROR(CheckFrame(layout));
  std::vector<BlockShapes> shapes;
  for (size_t n = 0; n < layout.blocks.size(); ++n) {
    ASSIGN_OR_RETURN(BlockShapes of_block, CheckBlock(layout, n));
    shapes.push_back(std::move(of_block));
  }
  RETURN_IF_ERROR(CheckAttentionScales(layout, shapes));
  return ModuleGraph(std::move(layout), std::move(shapes));
}

ModuleGraph ModuleGraph::Slice(int64_t first, int64_t end) const {
  ModuleLayout layout = layout_;
  layout.layers = {layout_.layers.begin() + first, layout_.layers.begin() + end};
  ModuleGraph slice(std::move(layout), shapes_);
  slice.first_layer_ = first_layer_ + first;
  slice.x_is_wide_ = InputIsWide(first);
  const bool is_last = end == static_cast<int64_t>(layout_.layers.size());
  slice.y_is_wide_ = is_last ? y_is_wide_ : InputIsWide(end);
  return slice;
}

bool ModuleGraph::InputIsWide(int64_t layer) const {
  return layer == 0 ? x_is_wide_ : BlockOf(layer - 1).ops.back().wide;
}

ElementType ModuleGraph::ElementOf(int64_t layer, int64_t value) const {
  const bool wide = value == kInputValue ? InputIsWide(layer) : ShapesOf(layer).values[value].wide;
  return wide ? layout_.wide_element : layout_.element;
}

std::vector<int64_t> ModuleGraph::LastUses(int64_t block) const {
  const std::vector<ModuleOp>& ops = layout_.blocks[block].ops;
  std::vector<int64_t> last(ops.size() + kFirstOpValue, -1);
  for (size_t n = 0; n < ops.size(); ++n) {
    for (const ValueUse& use : ValuesOf(ops[n])) last[use.value] = n;
  }
  last.back() = ops.size();
  return last;
}

}  // namespace attnd
