#include "modules/attention_problem.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "attention/masks/mask_description.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

void SetSequences(const CallRows& rows, bool is_cross, Problem& p) {
  p.batch = rows.batch;
  if (rows.is_packed()) {
    p.layout = Layout::kPackedThd;
    p.q_len = rows.rows();
    p.kv_len = is_cross ? rows.memory_rows() : rows.rows();
    p.cu_seqlens_q = rows.cu_seqlens;
    p.cu_seqlens_k = is_cross ? rows.memory_cu_seqlens : rows.cu_seqlens;
    return;
  }
  p.layout = Layout::kBlhd;
  p.q_len = rows.length;
  p.kv_len = is_cross ? rows.memory_length : rows.length;
  p.kv_lengths = is_cross ? rows.memory_kv_lengths : rows.kv_lengths;
}

// Its place among the attention ops of the block.
int64_t AttentionIndex(const BlockShapes& shapes, int64_t op) {
  const auto& ops = shapes.attention_ops;
  return std::find(ops.begin(), ops.end(), op) - ops.begin();
}

}  // namespace

absl::StatusOr<Problem> ProblemOf(const ModuleGraph& graph, int64_t layer, int64_t op,
                                  const CallRows& rows, const CallDropout& dropout) {
  const auto& attention = std::get<AttentionOp>(graph.BlockOf(layer).ops[op].kind);
  const BlockShapes& shapes = graph.ShapesOf(layer);
  const bool is_cross = shapes.values[attention.k.value].rows == RowKind::kMemory;
  Problem p = attention.options;
  p.q_heads = attention.q.heads;
  p.kv_heads = attention.k.heads;
  p.qk_head_dim = attention.q.dim;
  p.v_head_dim = attention.v.dim;
  p.element = graph.layout().element;
  SetSequences(rows, is_cross, p);
  const std::vector<float>& scales = graph.layout().layers[layer].attention_scale;
  if (!scales.empty()) p.scale = scales[AttentionIndex(shapes, op)];
  if (!is_cross) p.bool_mask = rows.bool_mask;
  p.shard.batch_offset = rows.first_sequence;
  p.dropout.seed = dropout.seed;
  p.dropout.offset = SiteOffset(DropoutSite(graph.first_layer() + layer, op), dropout.offset);
  if (!dropout.is_training) p.dropout = {};
  RETURN_IF_ERROR(Validate(p));
  if (!attention.mask.has_value()) return p;
  ASSIGN_OR_RETURN(p.mask, MaskDescription::Make(*attention.mask, MaskCallOf(p)));
  RETURN_IF_ERROR(Validate(p));
  return p;
}

}  // namespace attnd
