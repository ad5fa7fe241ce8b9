#include "kernels/layers/executor/sequence_parts.h"

#include <algorithm>
#include <numeric>
#include <variant>

#include "base/round_up.h"
#include "kernels/layers/executor/module_device.h"

namespace attnd {
namespace {

// Few, so that kernels of one part fill a GPU.
constexpr int64_t kMostParts = 4;

bool HasMask(const ModuleGraph& graph, LayerRange layers) {
  for (int64_t layer = layers.first; layer < layers.end; ++layer) {
    for (int64_t op : graph.ShapesOf(layer).attention_ops) {
      if (std::get<AttentionOp>(graph.BlockOf(layer).ops[op].kind).mask.has_value()) return true;
    }
  }
  return false;
}

}  // namespace

// Parts begin where tensors may, whatever their width.
std::vector<InstanceCall> PartsOf(const ModuleGraph& graph, const InstanceCall& call,
                                  LayerRange layers, int64_t part_bytes) {
  const CallRows& rows = call.rows;
  const ModuleLayout& layout = graph.layout();
  const int64_t bytes = rows.rows() * layout.width * ElementBytes(layout.element);
  const int64_t most = part_bytes == 0 ? 1 : bytes / part_bytes;
  // Masks depend on a sequence's place in the call; what comes beside x is in no such parts.
  const bool is_alone =
      !rows.is_packed() && !rows.bool_mask.has_value() && call.memory.data == nullptr;
  // y may lie where x does: rows of a part must not reach into the next one's before those are
  // here.
  const bool leaves_others =
      layers.size() > 1 || graph.BorderElement(layers.first) == graph.BorderElement(layers.end);
  if (most < 2 || !is_alone || !leaves_others || HasMask(graph, layers)) return {};
  const int64_t together = kTensorAlignment / std::gcd(rows.length, kTensorAlignment);
  const int64_t count = RoundUp(DivideUp(rows.batch, std::min(most, kMostParts)), together);
  std::vector<InstanceCall> parts;
  for (int64_t first = 0; first < rows.batch; first += count) {
    InstanceCall& part = parts.emplace_back(call);
    part.rows = rows.Sequences(first, std::min(count, rows.batch - first));
    part.positions = part.rows.ResolvedPositions();
  }
  return parts;
}

}  // namespace attnd
