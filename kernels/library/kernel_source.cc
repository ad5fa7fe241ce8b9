#include "kernels/library/kernel_source.h"

#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

std::string TileExpression(const Tile& tile) {
  return absl::StrCat("attnd::Tile{", tile.q_rows, ", ", tile.kv_rows, ", ", tile.head_dim, ", ",
                      tile.blocks_per_sm, "}");
}

const char* SumsOf(const KernelRow& row) { return row.ordered ? "FixedPointSums" : "FloatSums"; }

std::string KernelExpression(const KernelRow& row) {
  const char* math = row.half_accumulate ? "Float16Accumulate" : "Float32Accumulate";
  const char* rule = row.general  ? "attnd::GeneralScores"
                     : row.listed ? "attnd::ListedScores"
                                  : "attnd::LinearScores";
  const char* dropout = row.dropout ? "PhiloxDropout" : "NoDropout";
  std::string tile = TileExpression(row.tile);
  switch (row.kind) {
    case KernelKind::kForward:
      return absl::StrCat("ForwardKernel<", math, ", ", tile, ", ", rule, ", ", dropout, ">");
    case KernelKind::kBackward:
      return absl::StrCat("BackwardKernel<", tile, ", ", rule, ", ",
                          row.dropout ? "ReplayDropout" : "KeepAll", ", ", SumsOf(row), ">");
    case KernelKind::kMaskTiles:
      return "attnd::MaskTilesKernel";
    case KernelKind::kKeyBounds:
      return "KeyBoundsKernel";
    case KernelKind::kDelta:
      return "DeltaKernel";
    case KernelKind::kQueryGradient:
      return absl::StrCat("DqKernel<", row.head_dim, ", ", SumsOf(row), ">");
    case KernelKind::kSinkGradient:
      return "attnd::SinkGradientKernel";
    case KernelKind::kBiasGradient:
      return "attnd::BiasGradientKernel";
    case KernelKind::kKeepRows:
      return "KeepRowsKernel";
  }
  return "";
}

}  // namespace

KernelSource SourceOf(const KernelRow& row) {
  const char* name = InfoOf(row.architecture).name;
  KernelSource source;
  source.space = absl::StrCat("attnd::", name);
  source.text = absl::StrCat("#include \"kernels/", name, "/entry.cuh\"\nnamespace ", source.space,
                             " {\nusing Chosen = ", KernelExpression(row), ";\n__device__ int ",
                             kThreadsFact, " = Chosen::kThreads;\n__device__ int ", kSharedFact,
                             " = static_cast<int>(sizeof(Chosen::Shared));\n}\n");
  source.expression = absl::StrCat(source.space, "::Entry<", source.space, "::Chosen, ",
                                   row.tile.blocks_per_sm, ">");
  return source;
}

std::vector<std::string> CompilerOptions(const std::string& target) {
  return {absl::StrCat("--gpu-architecture=", target), "--std=c++20", "-default-device",
          "--ptxas-options=-v"};
}

}  // namespace attnd
