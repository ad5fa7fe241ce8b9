#include "kernels/cuda/library/kernel_sample.h"

#include <algorithm>

namespace attnd {
namespace {

// Whether the architecture has no wider row of this kind and element.
bool IsWidest(const KernelRow& row) {
  return std::none_of(KernelRows().begin(), KernelRows().end(), [&](const KernelRow& other) {
    return other.architecture == row.architecture && other.kind == row.kind &&
           other.element == row.element && other.head_dim > row.head_dim;
  });
}

}  // namespace

bool IsSampled(const KernelRow& row, int compute_capability) {
  if (InfoOf(row.architecture).compute_capability != compute_capability) return false;
  if (row.head_dim == 0 || row.head_dim == 64) return true;
  return !row.general && !row.listed && !row.dropout && IsWidest(row);
}

}  // namespace attnd
