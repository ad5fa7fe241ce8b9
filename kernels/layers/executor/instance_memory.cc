#include "kernels/layers/executor/instance_memory.h"

#include <algorithm>

#include "base/round_up.h"

namespace attnd {
namespace {

// Calls, beyond those of max_rows, whose kept values may each be rounded up to kTensorAlignment;
// more of them are refused where that does not fit.
constexpr int64_t kSmallCalls = 16;
constexpr int64_t kStateBytes = 4;

// The larger of each part.
void TakeLargest(int64_t& most, int64_t bytes) {
  most = std::max(most, RoundUp(bytes, kTensorAlignment));
}

class AttentionSizes {
 public:
  AttentionSizes(const ModuleDescription& module, const ModuleLimits& limits,
                 const ModuleDevice& device)
      : graph_(module.graph),
        rows_{limits.max_rows, limits.max_memory_rows},
        trains_(limits.kept_rows > 0),
        device_(device) {}

  AttentionScratch Most() const {
    AttentionScratch most;
    for (size_t layer = 0; layer < graph_.layout().layers.size(); ++layer) {
      for (int64_t op : graph_.ShapesOf(layer).attention_ops) Count(layer, op, most);
    }
    return most;
  }

 private:
  int64_t HeadBytes(int64_t layer, const HeadColumns& heads) const {
    return rows_.Of(graph_.ShapesOf(layer).values[heads.value].rows) * heads.columns() *
           ElementBytes(graph_.layout().element);
  }
  int64_t GatheredBytes(int64_t layer, const HeadColumns& heads, bool has_norm) const {
    const ValueShape& shape = graph_.ShapesOf(layer).values[heads.value];
    const bool lies_so = heads.first_column == 0 && heads.columns() == shape.columns &&
                         heads.value != kMemoryValue &&
                         graph_.ElementOf(layer, heads.value) == graph_.layout().element;
    return lies_so && !has_norm ? 0 : HeadBytes(layer, heads);
  }

  void Count(int64_t layer, int64_t number, AttentionScratch& most) const {
    const auto& op = std::get<AttentionOp>(graph_.BlockOf(layer).ops[number].kind);
    const ModuleLayout& layout = graph_.layout();
    TakeLargest(most.q, GatheredBytes(layer, op.q, op.q_norm.has_value()));
    TakeLargest(most.k, GatheredBytes(layer, op.k, op.k_norm.has_value()));
    TakeLargest(most.v, GatheredBytes(layer, op.v, false));
    TakeLargest(most.lse, rows_.input * op.q.heads * kStateBytes);
    if (graph_.ElementOf(layer, number + kFirstOpValue) != layout.element) {
      const int64_t bytes = rows_.input * op.q.heads * op.v.dim * ElementBytes(layout.element);
      TakeLargest(most.o, bytes);
      if (trains_) TakeLargest(most.d_o, bytes);
    }
    TakeLargest(most.workspace, WorkspaceBytes(layer, op));
  }

  int64_t WorkspaceBytes(int64_t layer, const AttentionOp& op) const {
    const bool is_cross = graph_.ShapesOf(layer).values[op.k.value].rows == RowKind::kMemory;
    Problem p = op.options;
    p.q_heads = op.q.heads;
    p.kv_heads = op.k.heads;
    p.qk_head_dim = op.q.dim;
    p.v_head_dim = op.v.dim;
    p.element = graph_.layout().element;
    p.layout = Layout::kBlhd;
    p.batch = 1;
    p.q_len = rows_.input;
    p.kv_len = is_cross ? rows_.memory : rows_.input;
    const int64_t bytes = device_.AttentionBytes(p, Direction::kForward);
    return trains_ ? bytes + device_.AttentionBytes(p, Direction::kBackward) : bytes;
  }

  const ModuleGraph& graph_;
  const RowCounts rows_;
  const bool trains_;
  const ModuleDevice& device_;
};

// Norm statistics of one op: a pair for each vector.
int64_t StatisticsBytes(const ModuleGraph& graph, const RowCounts& rows) {
  int64_t vectors = 0;
  for (size_t block = 0; block < graph.layout().blocks.size(); ++block) {
    const auto rows_of = [&](int64_t value) {
      return rows.Of(graph.shapes(block).values[value].rows);
    };
    for (const ModuleOp& op : graph.layout().blocks[block].ops) {
      if (const auto* norm = std::get_if<NormOp>(&op.kind)) {
        vectors = std::max(vectors, rows_of(norm->input));
      }
      const auto* attention = std::get_if<AttentionOp>(&op.kind);
      if (attention == nullptr) continue;
      for (const HeadColumns* heads : {&attention->q, &attention->k}) {
        vectors = std::max(vectors, rows_of(heads->value) * heads->heads);
      }
    }
  }
  return vectors * static_cast<int64_t>(sizeof(NormStatistics));
}

// Counts the bytes of a layer's buffers, in any direction that the plan runs.
int64_t LayerBytes(const ModuleGraph& graph, const ModulePlan& plan, const ModuleLimits& limits) {
  const RowCounts rows = {limits.max_rows, limits.max_memory_rows};
  int64_t most = 0;
  for (size_t layer = 0; layer < plan.recompute.size(); ++layer) {
    const int64_t block = graph.layout().layers[layer].block;
    most = std::max(most, BufferPlaces(ForwardBuffers(graph, block, rows)).bytes());
    if (limits.kept_rows == 0) continue;
    most = std::max(
        most, BufferPlaces(BackwardBuffers(graph, block, plan.recompute[layer], rows)).bytes());
  }
  return most;
}

int64_t ActivationSlack(const ModuleGraph& graph, const ModuleLimits& limits) {
  if (limits.kept_rows == 0) return 0;
  int64_t tensors = 1;
  for (size_t n = 0; n < graph.layout().layers.size(); ++n) {
    tensors += static_cast<int64_t>(graph.BlockOf(n).ops.size()) + kFirstOpValue +
               static_cast<int64_t>(graph.ShapesOf(n).attention_ops.size());
  }
  const int64_t calls = kSmallCalls + limits.kept_rows / limits.max_rows;
  return calls * tensors * kTensorAlignment;
}

}  // namespace

WeightMatrix MatrixOf(const ModuleDescription& module, const WeightEntry& entry) {
  const ModuleLayout& layout = module.graph.layout();
  return {.weight = {nullptr, layout.parameter_element},
          .rows = entry.shape[0],
          .columns = entry.shape[1],
          .operand = layout.element};
}

InstanceLayout::InstanceLayout(const ModuleDescription& module, const ModuleLimits& limits,
                               const ModulePlan& plan, const ModuleDevice& device) {
  const ModuleLayout& layout = module.graph.layout();
  const auto take = [this](int64_t size) {
    const int64_t at = bytes;
    bytes += RoundUp(size, kArenaAlignment);
    return at;
  };
  weights_at = take(module.table.elements() * ElementBytes(layout.parameter_element));
  int64_t packed_bytes = 0;
  for (const WeightEntry& entry : module.table.entries()) {
    packed.push_back(packed_bytes);
    if (!entry.is_matrix()) continue;
    packed_bytes += RoundUp(device.PackedBytes(MatrixOf(module, entry)), kTensorAlignment);
  }
  packed_at = take(packed_bytes);
  if (limits.kept_rows > 0) {
    const int64_t trained = module.table.trained_elements() * kStateBytes;
    gradients_at = take(trained);
    for (int64_t n = 0; n < module.optimizer.MomentCount(); ++n) moments_at[n] = take(trained);
    activation_bytes =
        RoundUp(plan.activation_bytes + ActivationSlack(module.graph, limits), kTensorAlignment);
  }
  activations_at = take(activation_bytes);
  const int64_t widest = std::max(ElementBytes(layout.element), ElementBytes(layout.wide_element));
  boundary_bytes = RoundUp(limits.max_rows * layout.width * widest, kArenaAlignment);
  boundaries_at = take(2 * boundary_bytes);
  const int64_t memory_bytes =
      limits.max_memory_rows * layout.memory_width * ElementBytes(layout.element);
  memory_at = take(memory_bytes);
  d_memory_at = take(limits.kept_rows > 0 ? memory_bytes : 0);
  layer_at = take(LayerBytes(module.graph, plan, limits));
  if (limits.kept_rows > 0) {
    statistics_at = take(StatisticsBytes(module.graph, {limits.max_rows, limits.max_memory_rows}));
  }
  attention = AttentionSizes(module, limits, device).Most();
  const AttentionScratch& a = attention;
  attention_at = take(a.q + a.k + a.v + a.o + a.d_o + a.lse + a.workspace);
  bytes += RoundUp(device.OwnBytes(), kArenaAlignment);
}

BufferPlaces::BufferPlaces(std::vector<ArenaBuffer> buffers) : bytes_(PlaceBuffers(buffers)) {
  for (const ArenaBuffer& buffer : buffers) places_.emplace_back(buffer.key, buffer.offset);
  std::sort(places_.begin(), places_.end());
}

int64_t BufferPlaces::At(BufferUse use, int64_t number) const {
  const int64_t key = BufferKey(use, number);
  const auto found = std::lower_bound(places_.begin(), places_.end(), std::pair{key, int64_t{-1}});
  return found == places_.end() || found->first != key ? -1 : found->second;
}

KeptPlaces::KeptPlaces(const ModuleGraph& graph, const std::vector<Recompute>& recompute,
                       const RowCounts& rows, LayerRange range)
    : layers(recompute.size()) {
  const auto take = [this](int64_t size) {
    const int64_t at = bytes;
    bytes += RoundUp(size, kTensorAlignment);
    return at;
  };
  const ModuleLayout& layout = graph.layout();
  memory_at = take(rows.memory * layout.memory_width * ElementBytes(layout.element));
  for (int64_t n = range.first; n < range.end; ++n) {
    const std::vector<bool> kept = KeptValues(graph, layout.layers[n].block, recompute[n]);
    Layer layer{.values = std::vector<int64_t>(kept.size(), -1),
                .lse = std::vector<int64_t>(kept.size() - kFirstOpValue, -1)};
    for (size_t value = 0; value < kept.size(); ++value) {
      if (!kept[value]) continue;
      const ValueShape& shape = graph.ShapesOf(n).values[value];
      layer.values[value] =
          take(rows.Of(shape.rows) * shape.columns * ElementBytes(graph.ElementOf(n, value)));
    }
    for (int64_t op : graph.ShapesOf(n).attention_ops) {
      if (!kept[op + kFirstOpValue]) continue;
      const auto& attention = std::get<AttentionOp>(graph.BlockOf(n).ops[op].kind);
      layer.lse[op] = take(rows.input * attention.q.heads * kStateBytes);
    }
    layers[n] = std::move(layer);
  }
}

}  // namespace attnd
