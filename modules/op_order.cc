#include "modules/op_order.h"

#include <algorithm>
#include <numeric>

#include "modules/kept_values.h"
#include "modules/op_uses.h"

namespace attnd {
namespace {

bool Reads(const ModuleOp& op, int64_t value) {
  const std::vector<ValueUse> uses = ValuesOf(op);
  return std::any_of(uses.begin(), uses.end(),
                     [value](const ValueUse& use) { return use.value == value; });
}

bool ShareAValue(const ModuleOp& a, const ModuleOp& b) {
  const std::vector<ValueUse> uses = ValuesOf(a);
  return std::any_of(uses.begin(), uses.end(),
                     [&b](const ValueUse& use) { return Reads(b, use.value); });
}

}  // namespace

OpOrder OrderOf(const ModuleGraph& graph, int64_t block) {
  const std::vector<ModuleOp>& ops = graph.layout().blocks[block].ops;
  const auto count = static_cast<int64_t>(ops.size());
  OpOrder order{.ops = std::vector<int64_t>(ops.size()), .steps = std::vector<int64_t>(ops.size())};
  std::iota(order.ops.begin(), order.ops.end(), 0);
  for (int64_t place = count - 1; place >= 0; --place) {
    const int64_t op = order.ops[place];
    // Parameters' gradients too are added in the order of the ops.
    if (!IsPointwise(ops[op]) || !ParametersOf(ops[op]).empty()) continue;
    const auto begin = order.ops.begin() + place;
    const auto reader = std::find_if(begin + 1, order.ops.end(),
                                     [&](int64_t n) { return Reads(ops[n], op + kFirstOpValue); });
    if (reader == order.ops.end() || !IsPointwise(ops[*reader])) continue;
    if (std::all_of(begin, reader, [&](int64_t n) { return IsPointwise(ops[n]); })) continue;
    if (std::any_of(begin + 1, reader, [&](int64_t n) { return ShareAValue(ops[op], ops[n]); })) {
      continue;
    }
    std::rotate(begin, begin + 1, reader);
  }
  for (int64_t place = 0; place < count; ++place) {
    const bool goes_on =
        place > 0 && IsPointwise(ops[order.ops[place - 1]]) && IsPointwise(ops[order.ops[place]]);
    if (!goes_on) ++order.step_count;
    order.steps[order.ops[place]] = order.step_count - 1;
  }
  return order;
}

}  // namespace attnd
