#include "kernels/cuda/selection.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace attnd::cuda {
namespace {

bool HasOwn(absl::Span<const KernelRow> rows, ElementType element,
            KernelKind kind = KernelKind::kForward) {
  return std::any_of(rows.begin(), rows.end(),
                     [&](const KernelRow& r) { return r.kind == kind && r.element == element; });
}

absl::Status CheckElement(absl::Span<const KernelRow> rows, const Problem& p, KernelKind kind,
                          absl::string_view work) {
  if (p.element != ElementType::kFloat32 || HasOwn(rows, p.element, kind)) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("element: before sm_80 the cuda engine has no ", work,
                   " of float32; send float32 tensors "
                   "with precision=\"f16\" or \"bf16\", or use the cpu engine"));
}

bool HasMask(const Problem& p) { return p.bool_mask.has_value() || p.mask != nullptr; }

int64_t HeadDim(const Problem& p) { return std::max(p.qk_head_dim, p.v_head_dim); }

// The narrowest row of the newest architecture that can; in float16 accumulation only if asked for
// and built.
template <class Fits>
std::optional<KernelRow> Narrowest(absl::Span<const KernelRow> rows, const Problem& p,
                                   const Fits& fits) {
  std::optional<KernelRow> best;
  const bool wants_half = p.accumulate == AccumulateType::kFloat16;
  for (const KernelRow& row : rows) {
    if (row.head_dim < HeadDim(p) || !fits(row)) continue;
    if (row.half_accumulate && !wants_half) continue;
    const auto rank = [](const KernelRow& r) {
      return std::tuple(-static_cast<int>(r.architecture), r.head_dim, !r.half_accumulate);
    };
    if (!best || rank(row) < rank(*best)) best = row;
  }
  return best;
}

std::optional<KernelRow> Find(absl::Span<const KernelRow> rows, KernelKind kind,
                              ElementType element = ElementType::kFloat16, int head_dim = 0,
                              bool ordered = true) {
  auto found = std::find_if(rows.begin(), rows.end(), [&](const KernelRow& r) {
    return r.kind == kind && r.element == element && r.head_dim == head_dim && r.ordered == ordered;
  });
  return found == rows.end() ? std::nullopt : std::optional<KernelRow>(*found);
}

absl::Status NoKernel(const Problem& p, absl::string_view direction) {
  return absl::UnimplementedError(absl::StrCat(
      "qk_head_dim, v_head_dim: no ", direction, " kernel is built for head dimensions ",
      p.qk_head_dim, " and ", p.v_head_dim, p.element == ElementType::kFloat32 ? " of float32" : "",
      NeedsGeneralScores(p) ? " with softcap, bias, ALiBi or this scale"
      : HasMask(p)          ? " with a mask"
                            : "",
      p.dropout.threshold != 0 ? " with dropout" : "", "; use the cpu engine"));
}

absl::Status NoSmallKernel(const Problem& p) {
  return absl::UnimplementedError(
      absl::StrCat("problem.mask: no kernel of small tiles is built for head dimensions ",
                   p.qk_head_dim, " and ", p.v_head_dim, " with these options on this GPU"));
}

// bfloat16 goes through kernels of its own where there are some.
ElementType ElementOf(absl::Span<const KernelRow> rows, const Problem& p) {
  return HasOwn(rows, p.element) ? p.element : ElementType::kFloat16;
}

// Whether lines of a mask may be cut into runs: what they leave stands where a whole entry's rows
// would, and runs of a row see no other's keys, which a rest counts.
bool MayCut(const Problem& p, ElementType element) {
  return p.mask != nullptr && !IsPacked(p.layout) && element != ElementType::kFloat32;
}

bool FitsScores(const KernelRow& row, const Problem& p, MaskTiles tiles) {
  const bool general = NeedsGeneralScores(p);
  return row.general == general && (general || row.listed == HasMask(p)) &&
         row.small == (tiles == MaskTiles::kSmall) && row.dropout == (p.dropout.threshold != 0);
}

// Whether rows can tell by o which of them need dQ's second integer: not where a sink or a rest
// may take most of their sum.
bool MayChooseRests(const Problem& p) { return p.denominator == DenominatorKind::kSoftmax; }

}  // namespace

bool NeedsGeneralScores(const Problem& p) {
  const float scale = p.ResolvedScale();
  return !(scale > 0) || !std::isnormal(scale) || p.softcap != 0 || p.bias ||
         !p.alibi_slopes.empty();
}

bool NeedsDqRest(const Problem& p) {
  return p.dropout.threshold != 0 || p.softcap != 0 || p.denominator != DenominatorKind::kSoftmax ||
         p.accumulate == AccumulateType::kFloat16 || p.element == ElementType::kFloat32;
}

absl::StatusOr<ForwardKernels> SelectForward(absl::Span<const KernelRow> rows, const Problem& p,
                                             MaskTiles tiles) {
  RETURN_IF_ERROR(CheckElement(rows, p, KernelKind::kForward, "forward"));
  const ElementType element = ElementOf(rows, p);
  std::optional<KernelRow> row = Narrowest(rows, p, [&](const KernelRow& r) {
    return r.kind == KernelKind::kForward && r.element == element && FitsScores(r, p, tiles);
  });
  // It adds up in float32 alone: what asks for less, and has it, stays with larger tiles.
  if (tiles == MaskTiles::kSmall && (!row || p.accumulate == AccumulateType::kFloat16)) {
    return NoSmallKernel(p);
  }
  const std::optional<KernelRow> mask_tiles = Find(rows, KernelKind::kMaskTiles);
  if (!row || !mask_tiles) return NoKernel(p, "forward");
  ForwardKernels kernels = {
      .forward = *row, .mask_tiles = *mask_tiles, .keep_rows = Find(rows, KernelKind::kKeepRows)};
  if (MayCut(p, element) && p.denominator != DenominatorKind::kZeroRest) {
    kernels.merge = Find(rows, KernelKind::kMergeOutputs, element);
  }
  if (row->dropout_ahead) {
    kernels.dropout_bits =
        Find(rows, KernelKind::kForwardDropoutBits, ElementType::kFloat16, row->head_dim);
    if (!kernels.dropout_bits) return NoKernel(p, "forward");
  }
  return kernels;
}

absl::StatusOr<BackwardKernels> SelectBackward(absl::Span<const KernelRow> rows, const Problem& p,
                                               MaskTiles tiles) {
  RETURN_IF_ERROR(CheckElement(rows, p, KernelKind::kBackward, "backward"));
  const ElementType element = ElementOf(rows, p);
  auto backward_with = [&](bool ordered) {
    return Narrowest(rows, p, [&](const KernelRow& r) {
      return r.kind == KernelKind::kBackward && r.element == element && r.ordered == ordered &&
             FitsScores(r, p, tiles) && (!r.rests_by_row || !ordered || MayChooseRests(p));
    });
  };
  std::optional<KernelRow> backward = backward_with(!p.allow_nondeterministic);
  if (!backward) backward = backward_with(true);
  if (!backward && tiles == MaskTiles::kSmall) return NoSmallKernel(p);
  if (!backward) return NoKernel(p, "backward");
  BackwardKernels kernels;
  kernels.backward = *backward;
  const std::optional<KernelRow> mask_tiles = Find(rows, KernelKind::kMaskTiles);
  const std::optional<KernelRow> key_bounds = Find(rows, KernelKind::kKeyBounds, element);
  const std::optional<KernelRow> delta = Find(rows, KernelKind::kDelta, element);
  const std::optional<KernelRow> query_gradient =
      Find(rows, KernelKind::kQueryGradient, element, backward->head_dim, backward->ordered);
  if (!mask_tiles || !key_bounds || !delta || !query_gradient) return NoKernel(p, "backward");
  kernels.mask_tiles = *mask_tiles;
  kernels.key_bounds = *key_bounds;
  kernels.delta = *delta;
  kernels.query_gradient = *query_gradient;
  if (backward->dropout_ahead) {
    kernels.dropout_bits = Find(rows, KernelKind::kDropoutBits);
    if (!kernels.dropout_bits) return NoKernel(p, "backward");
  }
  if (MayCut(p, element)) kernels.merge = Find(rows, KernelKind::kMergeKeyGradients);
  if (p.denominator == DenominatorKind::kSink) {
    kernels.sink_gradient = Find(rows, KernelKind::kSinkGradient);
    if (!kernels.sink_gradient) return NoKernel(p, "sink gradient");
  }
  if (p.bias && p.bias->want_gradient) {
    kernels.bias_gradient = Find(rows, KernelKind::kBiasGradient, element);
    if (!kernels.bias_gradient) return NoKernel(p, "bias gradient");
  }
  return kernels;
}

absl::StatusOr<CaptureKernels> SelectCapture(absl::Span<const KernelRow> rows, const Problem& p) {
  RETURN_IF_ERROR(CheckElement(rows, p, KernelKind::kCaptureScores, "captured maps"));
  const std::optional<KernelRow> mask_tiles = Find(rows, KernelKind::kMaskTiles);
  const std::optional<KernelRow> scores =
      Find(rows, KernelKind::kCaptureScores, ElementOf(rows, p));
  const std::optional<KernelRow> sums = Find(rows, KernelKind::kCaptureSums);
  if (!mask_tiles || !scores || !sums) return NoKernel(p, "capture");
  return CaptureKernels{*mask_tiles, *scores, *sums};
}

}  // namespace attnd::cuda
