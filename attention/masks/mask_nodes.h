// The nodes of a mask's expressions, and what each depends on. Pure functions; any thread.
#pragma once

#include <cstdint>

#include "attention/masks/mask_spec.h"

namespace attnd {

// A pattern's expression, partial_expr or base; null: none.
template <class Pattern>
auto* ExprOf(Pattern& pattern) {
  if (auto* expr = std::get_if<MaskExpr>(&pattern)) return expr;
  auto* blocks = std::get_if<BlockList>(&pattern);
  if (blocks != nullptr && blocks->partial_expr) return &*blocks->partial_expr;
  auto* runs = std::get_if<ColRuns>(&pattern);
  return runs != nullptr && runs->base ? &*runs->base : nullptr;
}

// Calls visit for the node and all below it.
template <class Expr, class Visit>
void VisitNodes(Expr& expr, const Visit& visit) {
  visit(expr);
  for (auto& operand : expr.of) VisitNodes(operand, visit);
}

// Whether this node, without those below it, counts query positions; takes a value by batch entry.
bool CountsQueries(const MaskExpr& node);
bool CountsBatch(const MaskExpr& node);

// Counts the bytes that a spec takes in memory: for quotas.
int64_t BytesOf(const MaskSpec& spec);

}  // namespace attnd
