#include "modules/layer_schedule.h"

#include <algorithm>
#include <numeric>
#include <variant>

#include "modules/op_order.h"
#include "modules/op_uses.h"

namespace attnd {
namespace {

constexpr int64_t kFloatBytes = 4;

class Buffers {
 public:
  Buffers(const ModuleGraph& graph, int64_t block, const RowCounts& rows)
      : layout_(graph.layout()), shapes_(graph.shapes(block)), rows_(rows) {}

  void AddValue(BufferUse use, int64_t value, int64_t first, int64_t last) {
    const ValueShape& shape = shapes_.values[value];
    const ElementType element = shape.wide ? layout_.wide_element : layout_.element;
    Add(BufferKey(use, value), rows_.Of(shape.rows) * shape.columns * ElementBytes(element), first,
        last);
  }
  void AddHeads(int64_t key, const HeadColumns& heads, int64_t step) {
    const RowKind rows = shapes_.values[heads.value].rows;
    Add(key, rows_.Of(rows) * heads.columns() * ElementBytes(layout_.element), step, step);
  }
  void AddRowNumbers(int64_t key, int64_t count, int64_t first, int64_t last) {  // of x's rows
    Add(key, rows_.input * count * kFloatBytes, first, last);
  }
  std::vector<ArenaBuffer> Take() { return std::move(buffers_); }

 private:
  void Add(int64_t key, int64_t bytes, int64_t first, int64_t last) {
    buffers_.push_back({.bytes = bytes, .first = first, .last = last, .key = key});
  }
  const ModuleLayout& layout_;
  const BlockShapes& shapes_;
  const RowCounts rows_;
  std::vector<ArenaBuffer> buffers_;
};

// q and k after norm and rotary, which no value holds.
struct TurnedKeys {
  int64_t q, k;
};
void AddTurned(const AttentionOp& op, const TurnedKeys& keys, int64_t step, Buffers& buffers) {
  if (op.rotary.has_value() || op.q_norm.has_value()) buffers.AddHeads(keys.q, op.q, step);
  if (op.rotary.has_value() || op.k_norm.has_value()) buffers.AddHeads(keys.k, op.k, step);
}
TurnedKeys ForwardKeys(int64_t op) {
  return {BufferKey(BufferUse::kTurnedQuery, op), BufferKey(BufferUse::kTurnedKey, op)};
}

// The gradients of q, k and v as attention gives them, and the rows' delta.
void AddAttentionGradients(const AttentionOp& op, int64_t number, int64_t step, Buffers& buffers) {
  const auto key = [&](BufferUse use) { return BufferKey(use, number); };
  AddTurned(op, {key(BufferUse::kBackwardQuery), key(BufferUse::kBackwardKey)}, step, buffers);
  buffers.AddHeads(key(BufferUse::kQueryGradient), op.q, step);
  buffers.AddHeads(key(BufferUse::kKeyGradient), op.k, step);
  buffers.AddHeads(key(BufferUse::kValueGradient), op.v, step);
  buffers.AddRowNumbers(key(BufferUse::kDelta), op.q.heads, step, step);
}

// The last step of backward that reads each value itself, −1 where none does.
std::vector<int64_t> BackwardReads(const ModuleGraph& graph, int64_t block) {
  const std::vector<ModuleOp>& ops = graph.layout().blocks[block].ops;
  const OpOrder order = OrderOf(graph, block);
  std::vector<int64_t> last(ops.size() + kFirstOpValue, -1);
  for (int64_t n : std::vector<int64_t>(order.ops.rbegin(), order.ops.rend())) {
    const int64_t step = order.BackwardStepOf(n);
    for (const ValueUse& use : ValuesOf(ops[n])) last[use.value] = step;
    if (std::holds_alternative<AttentionOp>(ops[n].kind)) {
      last[n + kFirstOpValue] = std::max(last[n + kFirstOpValue], step);
    }
  }
  return last;
}

void AddRecomputed(const ModuleGraph& graph, int64_t block, Recompute recompute, Buffers& buffers) {
  const std::vector<ModuleOp>& ops = graph.layout().blocks[block].ops;
  const std::vector<bool> again = RecomputedValues(graph, block, recompute);
  const std::vector<bool> needed = NeededValues(graph, block);
  const std::vector<int64_t> reads = BackwardReads(graph, block);
  const OpOrder order = OrderOf(graph, block);
  std::vector<int64_t> last(ops.size() + kFirstOpValue, -1);
  for (int64_t n : order.ops) {
    if (!again[n + kFirstOpValue]) continue;
    for (const ValueUse& use : ValuesOf(ops[n])) last[use.value] = order.StepOf(n);
  }
  for (int64_t n : order.ops) {
    const int64_t value = n + kFirstOpValue, step = order.StepOf(n);
    if (!again[value]) continue;
    buffers.AddValue(BufferUse::kValue, value, step,
                     needed[value] ? reads[value] : std::max(last[value], step));
    if (const auto* op = std::get_if<AttentionOp>(&ops[n].kind)) {
      AddTurned(*op, ForwardKeys(n), step, buffers);
      buffers.AddRowNumbers(BufferKey(BufferUse::kLogSumExp, n), op->q.heads, step,
                            order.BackwardStepOf(n));
    }
  }
}

}  // namespace

std::vector<int64_t> GradientHolders(const ModuleGraph& graph, int64_t block) {
  const std::vector<ModuleOp>& ops = graph.layout().blocks[block].ops;
  const std::vector<ValueShape>& values = graph.shapes(block).values;
  const std::vector<int64_t> last = graph.LastUses(block);
  std::vector<int64_t> holders(values.size());
  std::iota(holders.begin(), holders.end(), 0);
  for (int64_t n = static_cast<int64_t>(ops.size()) - 1; n >= 0; --n) {
    const auto* sum = std::get_if<BinaryOp>(&ops[n].kind);
    if (sum == nullptr || sum->kind != BinaryKind::kAdd || sum->a == sum->b) continue;
    const auto may_hold = [&](int64_t value) {
      return value >= kFirstOpValue && last[value] == n &&
             values[value].wide == values[n + kFirstOpValue].wide;
    };
    if (may_hold(sum->a)) {
      holders[sum->a] = holders[n + kFirstOpValue];
    } else if (sum->b_scale == 1 && may_hold(sum->b)) {
      holders[sum->b] = holders[n + kFirstOpValue];
    }
  }
  return holders;
}

std::vector<bool> RecomputedValues(const ModuleGraph& graph, int64_t block, Recompute recompute) {
  const std::vector<ModuleOp>& ops = graph.layout().blocks[block].ops;
  const std::vector<bool> kept = KeptValues(graph, block, recompute);
  std::vector<bool> wanted = NeededValues(graph, block);
  std::vector<bool> again(wanted.size());
  for (int64_t n = static_cast<int64_t>(ops.size()) - 1; n >= 0; --n) {
    const int64_t value = n + kFirstOpValue;
    again[value] = wanted[value] && !kept[value];
    if (!again[value]) continue;
    for (const ValueUse& use : ValuesOf(ops[n])) wanted[use.value] = true;
  }
  return again;
}

std::vector<ArenaBuffer> ForwardBuffers(const ModuleGraph& graph, int64_t block,
                                        const RowCounts& rows) {
  const std::vector<ModuleOp>& ops = graph.layout().blocks[block].ops;
  const std::vector<int64_t> last = graph.LastUses(block);
  const OpOrder order = OrderOf(graph, block);
  Buffers buffers(graph, block, rows);
  for (int64_t n : order.ops) {
    const int64_t value = n + kFirstOpValue, step = order.StepOf(n);
    if (value != static_cast<int64_t>(ops.size()) - 1 + kFirstOpValue) {
      buffers.AddValue(BufferUse::kValue, value, step, order.StepOf(last[value]));
    }
    if (const auto* op = std::get_if<AttentionOp>(&ops[n].kind)) {
      AddTurned(*op, ForwardKeys(n), step, buffers);
    }
  }
  return buffers.Take();
}

std::vector<ArenaBuffer> BackwardBuffers(const ModuleGraph& graph, int64_t block,
                                         Recompute recompute, const RowCounts& rows) {
  const std::vector<ModuleOp>& ops = graph.layout().blocks[block].ops;
  const std::vector<int64_t> last = graph.LastUses(block);
  const OpOrder order = OrderOf(graph, block);
  Buffers buffers(graph, block, rows);
  AddRecomputed(graph, block, recompute, buffers);
  const std::vector<int64_t> holders = GradientHolders(graph, block);
  std::vector<int64_t> ends(holders.size(), -1);  // of each buffer: its last step
  for (int64_t n : order.ops) {
    // Gradients of weights may be made of it at the layer's end, all together.
    const bool is_linear = std::holds_alternative<LinearOp>(ops[n].kind);
    int64_t& end = ends[holders[n + kFirstOpValue]];
    end = std::max(end, is_linear ? 2 * order.step_count - 1 : order.BackwardStepOf(n));
  }
  for (int64_t n : order.ops) {
    const int64_t value = n + kFirstOpValue;
    const bool is_output = n + 1 == static_cast<int64_t>(ops.size());
    if (!is_output && holders[value] == value) {
      buffers.AddValue(BufferUse::kGradient, value, order.BackwardStepOf(last[value]), ends[value]);
    }
    if (const auto* op = std::get_if<AttentionOp>(&ops[n].kind)) {
      AddAttentionGradients(*op, n, order.BackwardStepOf(n), buffers);
    }
  }
  return buffers.Take();
}

RowCounts KeptBytesPerRow(const ModuleGraph& graph, int64_t layer, Recompute recompute) {
  const int64_t block = graph.layout().layers[layer].block;
  const std::vector<bool> kept = KeptValues(graph, block, recompute);
  RowCounts bytes;
  for (size_t value = 0; value < kept.size(); ++value) {
    if (!kept[value]) continue;
    const ValueShape& shape = graph.shapes(block).values[value];
    const int64_t of_row = shape.columns * ElementBytes(graph.ElementOf(layer, value));
    (shape.rows == RowKind::kInput ? bytes.input : bytes.memory) += of_row;
  }
  if (recompute == Recompute::kLayers) return bytes;
  for (int64_t op : graph.shapes(block).attention_ops) {
    const auto& attention = std::get<AttentionOp>(graph.layout().blocks[block].ops[op].kind);
    bytes.input += attention.q.heads * kFloatBytes;
  }
  return bytes;
}

}  // namespace attnd
