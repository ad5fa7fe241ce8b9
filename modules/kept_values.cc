#include "modules/kept_values.h"

#include <variant>

#include "modules/op_uses.h"

namespace attnd {
namespace {

// Whether the op's derivative depends on what it read.
bool ReadsInputs(const ModuleOp& op) {
  if (std::holds_alternative<DropoutOp>(op.kind)) return false;
  const auto* binary = std::get_if<BinaryOp>(&op.kind);
  return binary == nullptr || binary->kind == BinaryKind::kMultiply;
}

}  // namespace

bool IsPointwise(const ModuleOp& op) {
  return !std::holds_alternative<LinearOp>(op.kind) &&
         !std::holds_alternative<AttentionOp>(op.kind);
}

std::vector<bool> NeededValues(const ModuleGraph& graph, int64_t block) {
  const std::vector<ModuleOp>& ops = graph.layout().blocks[block].ops;
  std::vector<bool> needed(ops.size() + kFirstOpValue);
  for (size_t n = 0; n < ops.size(); ++n) {
    if (ReadsInputs(ops[n])) {
      for (const ValueUse& use : ValuesOf(ops[n])) needed[use.value] = true;
    }
    if (std::holds_alternative<AttentionOp>(ops[n].kind)) needed[n + kFirstOpValue] = true;
  }
  return needed;
}

std::vector<bool> KeptValues(const ModuleGraph& graph, int64_t block, Recompute recompute) {
  const std::vector<ModuleOp>& ops = graph.layout().blocks[block].ops;
  std::vector<bool> kept(ops.size() + kFirstOpValue);
  if (recompute != Recompute::kLayers) kept = NeededValues(graph, block);
  if (recompute == Recompute::kPointwise) {
    // From the last op on, so that what a pointwise op needs is itself looked at.
    for (int64_t n = static_cast<int64_t>(ops.size()) - 1; n >= 0; --n) {
      if (!kept[n + kFirstOpValue] || !IsPointwise(ops[n])) continue;
      kept[n + kFirstOpValue] = false;
      for (const ValueUse& use : ValuesOf(ops[n])) kept[use.value] = true;
    }
  }
  kept[kInputValue] = true;
  kept[kMemoryValue] = false;
  return kept;
}

}  // namespace attnd
