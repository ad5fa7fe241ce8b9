#include "kernels/tiles.h"

namespace attnd {
namespace {

const char* KindName(KernelKind kind) {
  switch (kind) {
    case KernelKind::kForward:
      return "forward";
    case KernelKind::kDelta:
      return "delta";
    case KernelKind::kBackward:
      return "backward";
    case KernelKind::kQueryGradient:
      return "query_gradient";
  }
  return "unknown";
}

std::vector<KernelRow> MakeRows() {
  std::vector<KernelRow> rows;
  for (int head_dim : {64, 128}) {
    for (bool general : {false, true}) {
      for (bool dropout : {false, true}) {
        rows.push_back({.kind = KernelKind::kForward,
                        .head_dim = head_dim,
                        .general = general,
                        .dropout = dropout,
                        .tile = {128, 32, head_dim, head_dim == 64 ? 2 : 1}});
      }
    }
  }
  return rows;
}

}  // namespace

std::string NameOf(const KernelRow& row) {
  std::string name = KindName(row.kind);
  name += "_d" + std::to_string(row.head_dim);
  if (row.kind == KernelKind::kDelta || row.kind == KernelKind::kQueryGradient) return name;
  name += row.half_accumulate ? "_f16" : "_f32";
  name += row.general ? "_general" : "_linear";
  if (row.dropout) name += "_dropout";
  if (!row.ordered) name += "_atomic";
  return name;
}

const std::vector<KernelRow>& KernelRows() {
  static const std::vector<KernelRow>& rows = *new std::vector<KernelRow>(MakeRows());
  return rows;
}

}  // namespace attnd
