// The kernels of float32: a file of its own, since each costs the compiler seconds.
#include "kernels/sm70/emulated_kernels.h"
#include "kernels/sm70/forward.h"

namespace attnd::sm70 {
namespace {

template <Tile kTile, class Rule>
EmulatedKernel Scoring(const KernelRow& row) {
  return row.dropout ? EmulatedEntry<ForwardKernel<SplitAccumulate, kTile, Rule, PhiloxDropout>>()
                     : EmulatedEntry<ForwardKernel<SplitAccumulate, kTile, Rule, NoDropout>>();
}
template <int kRows, int kHeadDim>
EmulatedKernel Forward(const KernelRow& row) {
  static constexpr Tile kTile = {kRows, 32, kHeadDim, 1};
  if (row.general) return Scoring<kTile, GeneralScores>(row);
  return row.listed ? Scoring<kTile, ListedScores>(row) : Scoring<kTile, LinearScores>(row);
}

}  // namespace

EmulatedKernel FindEmulatedFloatKernel(const KernelRow& row) {
  if (row.kind != KernelKind::kForward) return {};
  return row.head_dim == 64 ? Forward<128, 64>(row) : Forward<64, 128>(row);
}

}  // namespace attnd::sm70
