#include "kernels/cuda/visit_cycles.h"

namespace attnd::cuda {
namespace {

struct Measured {
  Architecture architecture;
  KernelKind kind;
  int head_dim;
  VisitCycles listed, small;
};
constexpr Architecture kSm70 = Architecture::kSm70, kSm80 = Architecture::kSm80,
                       kSm90 = Architecture::kSm90;
constexpr KernelKind kForward = KernelKind::kForward, kBackward = KernelKind::kBackward;

// sm_90 has sm_80's small tiles.
constexpr Measured kMeasured[] = {
    {kSm70, kForward, 32, {929, 1079, 3560}, {254, 288, 885}},
    {kSm70, kForward, 64, {1454, 1619, 4860}, {518, 515, 1290}},
    {kSm70, kForward, 128, {2960, 3478, 11000}, {964, 1049, 3000}},
    {kSm70, kBackward, 32, {6513, 7553, 13500}, {812, 898, 1950}},
    {kSm70, kBackward, 64, {8651, 9264, 15200}, {1624, 1667, 3850}},
    {kSm70, kBackward, 128, {9574, 9904, 15500}, {2829, 3128, 7880}},
    {kSm80, kForward, 32, {1205, 1587, 3680}, {179, 251, 620}},
    {kSm80, kForward, 64, {1582, 2085, 4760}, {237, 370, 1040}},
    {kSm80, kForward, 128, {2473, 3222, 7680}, {392, 692, 2400}},
    {kSm80, kBackward, 32, {4254, 4861, 9480}, {690, 737, 2250}},
    {kSm80, kBackward, 64, {5457, 6099, 11700}, {891, 923, 2220}},
    {kSm80, kBackward, 128, {8059, 8510, 17100}, {1608, 1658, 4690}},
    {kSm90, kForward, 64, {2390, 3306, 6100}, {}},
    {kSm90, kForward, 128, {2545, 3873, 7720}, {}},
    {kSm90, kBackward, 64, {2674, 3248, 13000}, {}},
    {kSm90, kBackward, 128, {3670, 4296, 19300}, {}},
};

}  // namespace

VisitCycles CyclesOf(const KernelRow& row) {
  if (!row.listed || row.element == ElementType::kFloat32) return {};
  for (const Measured& of : kMeasured) {
    if (of.architecture == row.architecture && of.kind == row.kind && of.head_dim == row.head_dim) {
      return row.small ? of.small : of.listed;
    }
  }
  return {};
}

}  // namespace attnd::cuda
