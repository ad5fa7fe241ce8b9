// The two halves of ModuleGraph::Make: a layout's frame (counts, sizes, names, layers), and the ops
// of one block, whose shapes are found on the way. Errors name the wire's path. Any thread.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "modules/block_shapes.h"
#include "modules/layout.h"

namespace attnd {

// All but ops and the layers' attention_scale. O(layers · parameters).
absl::Status CheckFrame(const ModuleLayout& layout);

// The frame is valid.
absl::StatusOr<BlockShapes> CheckBlock(const ModuleLayout& layout, int64_t block);

// An attention op's own fields; its columns have been checked. `path` is "block[0].op[3]".
absl::Status CheckAttentionOptions(const AttentionOp& op, bool is_cross, absl::string_view path);

}  // namespace attnd
