#include "kernels/cuda/library/kernel_source.h"

#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

std::string TileExpression(const Tile& tile) {
  return absl::StrCat("attnd::Tile{", tile.q_rows, ", ", tile.kv_rows, ", ", tile.head_dim, ", ",
                      tile.blocks_per_sm, "}");
}

const char* SumsOf(const KernelRow& row) { return row.ordered ? "FixedPointSums" : "FloatSums"; }

const char* RuleOf(const KernelRow& row) {
  return row.general  ? "attnd::GeneralScores"
         : row.listed ? "attnd::ListedScores"
                      : "attnd::LinearScores";
}
const char* ForwardDropoutOf(const KernelRow& row) {
  return row.dropout_ahead ? "AheadDropout" : row.dropout ? "PhiloxDropout" : "NoDropout";
}
const char* BackwardDropoutOf(const KernelRow& row) {
  return row.dropout ? "ReplayDropout" : "KeepAll";
}

// Returns the arguments that say how A and B lie: whether by depth.
std::string ProductLayoutOf(const KernelRow& row) {
  return absl::StrCat(row.kind == KernelKind::kProductDepthDepth ? "true" : "false", ", ",
                      row.kind == KernelKind::kProductRowsRows ? "false" : "true");
}

std::string Sm70Expression(const KernelRow& row) {
  const bool splits = row.element == ElementType::kFloat32;
  const char* math = row.half_accumulate ? "Float16Accumulate"
                     : splits            ? "SplitAccumulate"
                                         : "Float32Accumulate";
  const std::string tile = TileExpression(row.tile);
  switch (row.kind) {
    case KernelKind::kForward:
      return absl::StrCat("ForwardKernel<", math, ", ", tile, ", ", RuleOf(row), ", ",
                          ForwardDropoutOf(row), ">");
    case KernelKind::kBackward:
      if (splits) {
        return absl::StrCat("SplitBackwardKernel<", tile, ", ", RuleOf(row), ", ",
                            BackwardDropoutOf(row), ">");
      }
      return absl::StrCat("BackwardKernel<", tile, ", ", RuleOf(row), ", ", BackwardDropoutOf(row),
                          ", ", SumsOf(row), ">");
    case KernelKind::kKeyBounds:
      return splits ? "attnd::KeyBoundsKernel<SplitFloat32>" : "KeyBoundsKernel";
    case KernelKind::kDelta:
      return splits ? "attnd::DeltaKernel<SplitFloat32, SplitP>" : "DeltaKernel";
    case KernelKind::kBiasGradient:
      return absl::StrCat("attnd::BiasGradientKernel<", splits ? "SplitFloat32" : "attnd::Float16",
                          ">");
    case KernelKind::kQueryGradient:
      if (splits) return absl::StrCat("SplitDqKernel<", row.head_dim, ">");
      return absl::StrCat("DqKernel<", row.head_dim, ", ", SumsOf(row), ">");
    case KernelKind::kKeepRows:
      return "KeepRowsKernel";
    case KernelKind::kCaptureScores:
      return "attnd::CaptureScoresKernel<CaptureProducts>";
    case KernelKind::kDenseNormSums:
      return "NormSumsKernel";
    case KernelKind::kDenseStretchSums:
      return "StretchSumsKernel";
    case KernelKind::kProductRowsRows:
    case KernelKind::kProductRowsDepth:
    case KernelKind::kProductDepthDepth:
      return absl::StrCat("ProductKernel<", ProductLayoutOf(row), ">");
    default:
      return "";
  }
}

const char* MathOf(const KernelRow& row) {
  switch (row.element) {
    case ElementType::kFloat16:
      return "HalfMath";
    case ElementType::kBFloat16:
      return "BFloat16Math";
    case ElementType::kFloat32:
      return "FloatMath";
  }
  return "";
}
const char* ElementOf(const KernelRow& row) {
  switch (row.element) {
    case ElementType::kFloat16:
      return "attnd::Float16";
    case ElementType::kBFloat16:
      return "attnd::BFloat16";
    case ElementType::kFloat32:
      return "attnd::Float32";
  }
  return "";
}

// Names the kernels of sm80 and later.
std::string Sm80Expression(const KernelRow& row) {
  const std::string tile = TileExpression(row.tile);
  const char* math = MathOf(row);
  switch (row.kind) {
    case KernelKind::kForward:
      return absl::StrCat("ForwardKernel<", math, ", ", tile, ", ", RuleOf(row), ", ",
                          ForwardDropoutOf(row), ">");
    case KernelKind::kBackward:
      return absl::StrCat("BackwardKernel<", math, ", ", tile, ", ", RuleOf(row), ", ",
                          BackwardDropoutOf(row), ", ", SumsOf(row), ">");
    case KernelKind::kKeyBounds:
      return absl::StrCat("KeyBoundsKernel<", math, ">");
    case KernelKind::kDelta:
      return absl::StrCat("DeltaKernel<", math, ">");
    case KernelKind::kBiasGradient:
      return absl::StrCat("attnd::BiasGradientKernel<", ElementOf(row), ">");
    case KernelKind::kQueryGradient:
      return absl::StrCat("DqKernel<", math, ", ", row.head_dim, ", ", SumsOf(row), ">");
    case KernelKind::kCaptureScores:
      return absl::StrCat("attnd::CaptureScoresKernel<CaptureProducts<", math, ">>");
    case KernelKind::kProductRowsRows:
    case KernelKind::kProductRowsDepth:
    case KernelKind::kProductDepthDepth:
      if (row.wide) {
        if (row.kind == KernelKind::kProductDepthDepth) {
          return absl::StrCat("GradientProductKernel<", math, ">");
        }
        return absl::StrCat("WideProductKernel<", math, ", ",
                            row.kind == KernelKind::kProductRowsDepth ? "true" : "false",
                            row.small ? ", attnd::kShortProductRows>" : ">");
      }
      return absl::StrCat("ProductKernel<", math,
                          ", attnd::", row.small ? "kSmallProductTile" : "kProductTile", ", ",
                          ProductLayoutOf(row), ">");
    default:
      return "";
  }
}

std::string KernelExpression(const KernelRow& row) {
  switch (row.kind) {
    case KernelKind::kMaskTiles:
      return "attnd::MaskTilesKernel";
    case KernelKind::kMergeOutputs:
      return absl::StrCat("attnd::MergeOutputsKernel<", ElementOf(row), ">");
    case KernelKind::kMergeKeyGradients:
      return "attnd::MergeKeyGradientsKernel";
    case KernelKind::kSinkGradient:
      return "attnd::SinkGradientKernel";
    case KernelKind::kCaptureSums:
      return "attnd::CaptureSumsKernel";
    case KernelKind::kDropoutBits:
      return "DropoutBitsKernel";
    case KernelKind::kForwardDropoutBits:
      return absl::StrCat("ForwardDropoutBits<", row.tile.q_rows, ">");
    case KernelKind::kDenseNumbers:
      return "attnd::NumbersKernel";
    case KernelKind::kDenseChain:
      return "attnd::ChainKernel";
    case KernelKind::kDenseNorm:
      return "attnd::NormKernel";
    case KernelKind::kDenseAnyNorm:
      return "attnd::AnyNormKernel";
    case KernelKind::kDenseColumnSums:
      return "attnd::ColumnSumsKernel";
    case KernelKind::kDenseRotary:
      return "attnd::RotaryKernel";
    case KernelKind::kDenseSquares:
      return "attnd::SquaresKernel";
    case KernelKind::kDenseStep:
      return "attnd::StepKernel";
    case KernelKind::kDenseProduct:
      return "attnd::PlainProductKernel";
    default:
      return row.architecture == Architecture::kSm70 ? Sm70Expression(row) : Sm80Expression(row);
  }
}

// Tells an entry that GPUs of several generations run whether launches overlap there.
const char* OverlapOf(const KernelRow& row, const std::string& target) {
  if (row.architecture != Architecture::kSm80) return "";
  return std::atoi(target.c_str() + 3) >= kOverlappingLaunches ? ", true" : ", false";
}

}  // namespace

KernelSource SourceOf(const KernelRow& row, const std::string& target) {
  const char* name = InfoOf(row.architecture).name;
  KernelSource source;
  source.space = absl::StrCat("attnd::", name);
  source.kernel = KernelExpression(row);
  source.text = absl::StrCat("#include \"kernels/", name, "/entry.cuh\"\nnamespace ", source.space,
                             " {\nusing Chosen = ", source.kernel, ";\n__device__ int ",
                             kThreadsFact, " = Chosen::kThreads;\n__device__ int ", kSharedFact,
                             " = static_cast<int>(sizeof(Chosen::Shared));\n}\n");
  source.expression = absl::StrCat(source.space, "::Entry<", source.space, "::Chosen, ",
                                   row.tile.blocks_per_sm, OverlapOf(row, target), ">");
  return source;
}

std::vector<std::string> CompilerOptions(const std::string& target) {
  return {absl::StrCat("--gpu-architecture=", target), "--std=c++20", "-default-device",
          "--ptxas-options=-v"};
}

}  // namespace attnd
