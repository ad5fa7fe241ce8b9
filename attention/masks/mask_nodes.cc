#include "attention/masks/mask_nodes.h"

namespace attnd {
namespace {

template <class... Lists>
int64_t BytesOfLists(const Lists&... lists) {
  return (static_cast<int64_t>(lists.size() * sizeof(lists[0])) + ...);
}

int64_t BytesOf(const MaskExpr& node) {
  int64_t bytes = sizeof(MaskExpr);
  if (auto* e = std::get_if<BlockWindow>(&node.op)) bytes += BytesOfLists(e->shift);
  if (auto* e = std::get_if<Global>(&node.op)) bytes += BytesOfLists(e->start, e->end);
  if (auto* e = std::get_if<Prefix>(&node.op)) bytes += BytesOfLists(e->len);
  if (auto* e = std::get_if<Segment>(&node.op)) bytes += BytesOfLists(e->cu);
  if (auto* e = std::get_if<Groups>(&node.op)) bytes += BytesOfLists(e->row, e->key);
  return bytes;
}

int64_t BytesOf(const MaskPattern& pattern) {
  int64_t bytes = sizeof(MaskPattern);
  if (auto* e = std::get_if<BlockList>(&pattern)) {
    bytes += BytesOfLists(e->indptr, e->indices, e->kind, e->bitmaps, e->bitmap_of);
  }
  if (auto* e = std::get_if<ColRuns>(&pattern)) bytes += BytesOfLists(e->start, e->end);
  if (auto* e = std::get_if<RowRuns>(&pattern)) {
    bytes += BytesOfLists(e->first, e->stride, e->count);
  }
  if (auto* e = std::get_if<RowIntervals>(&pattern)) bytes += BytesOfLists(e->begin, e->end);
  if (auto* e = std::get_if<Rectangles>(&pattern)) bytes += BytesOfLists(e->of);
  if (auto* e = std::get_if<MaskBitmap>(&pattern)) bytes += BytesOfLists(e->data);
  if (auto* expr = ExprOf(pattern)) {
    VisitNodes(*expr, [&](const MaskExpr& node) { bytes += BytesOf(node); });
  }
  return bytes;
}

}  // namespace

int64_t BytesOf(const MaskSpec& spec) {
  int64_t bytes = static_cast<int64_t>(sizeof(MaskSpec)) + BytesOfLists(spec.pattern_of);
  for (const MaskPattern& pattern : spec.pattern) bytes += BytesOf(pattern);
  return bytes;
}

bool CountsQueries(const MaskExpr& node) {
  if (auto* e = std::get_if<Global>(&node.op)) return e->direction != GlobalDirection::kColumns;
  return std::holds_alternative<RelativeWindow>(node.op) ||
         std::holds_alternative<Dilated>(node.op) || std::holds_alternative<StrideRel>(node.op) ||
         std::holds_alternative<BlockWindow>(node.op) || std::holds_alternative<Segment>(node.op) ||
         std::holds_alternative<RandomBlocks>(node.op);
}

bool CountsBatch(const MaskExpr& node) {
  if (auto* e = std::get_if<Prefix>(&node.op)) return e->len.size() > 1;
  if (auto* e = std::get_if<BlockWindow>(&node.op)) return e->shift.size() > 1;
  auto* groups = std::get_if<Groups>(&node.op);
  return groups != nullptr && groups->per_batch;
}

}  // namespace attnd
