#include "attention/problem_text.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "attention/masks/mask_description.h"

namespace attnd {
namespace {

std::string ShapeText(const BroadcastShape& s) {
  return absl::StrCat("[", s.batch, ",", s.heads, ",", s.rows, ",", s.columns, "]");
}

std::string SizesText(const Problem& p) {
  std::string text =
      absl::StrCat(ElementName(p.element), " ", LayoutName(p.layout), " b", p.batch, " h",
                   p.q_heads, "/", p.kv_heads, " q", p.q_len, " k", p.kv_len, " d", p.qk_head_dim);
  if (p.v_head_dim != p.qk_head_dim) absl::StrAppend(&text, "/", p.v_head_dim);
  return text;
}

std::string DiagonalText(const Problem& p) {
  std::string text;
  if (p.causal) text += " causal";
  if (p.window_left >= 0 || p.window_right >= 0) {
    absl::StrAppend(&text, " window=(", p.window_left, ",", p.window_right, ")");
  }
  if (p.alignment == Alignment::kTopLeft) text += " top_left";
  if (p.alignment == Alignment::kBottomRight) text += " bottom_right";
  if (p.alignment == Alignment::kOffsets) {
    absl::StrAppend(&text, " offsets=", absl::StrJoin(p.offsets, ","));
  }
  return text;
}

std::string LengthsText(const Problem& p) {
  std::string text;
  if (!p.kv_lengths.empty()) {
    absl::StrAppend(&text, " kv_lengths=", absl::StrJoin(p.kv_lengths, ","));
  }
  if (IsPacked(p.layout)) {
    absl::StrAppend(&text, " cu_q=", absl::StrJoin(p.cu_seqlens_q, ","),
                    " cu_k=", absl::StrJoin(p.cu_seqlens_k, ","));
  }
  return text;
}

std::string ScoreText(const Problem& p) {
  std::string text;
  if (p.scale.has_value()) absl::StrAppend(&text, " scale=", *p.scale);
  if (p.softcap > 0) absl::StrAppend(&text, " softcap=", p.softcap);
  if (p.bool_mask) absl::StrAppend(&text, " mask", ShapeText(p.bool_mask->shape));
  if (p.mask != nullptr) {
    const MaskId& id = p.mask->id();
    absl::StrAppend(
        &text, " mask=", absl::BytesToHexString({reinterpret_cast<const char*>(id.data()), 4}));
  }
  if (p.bias) {
    absl::StrAppend(&text, " bias:", ElementName(p.bias->element), ShapeText(p.bias->shape),
                    p.bias->want_gradient ? "+gradient" : "");
  }
  if (!p.alibi_slopes.empty()) absl::StrAppend(&text, " alibi[", p.alibi_slopes.size(), "]");
  return text;
}

std::string SoftmaxText(const Problem& p) {
  std::string text;
  if (p.denominator == DenominatorKind::kZeroRest) text += " zero_rest";
  if (p.denominator == DenominatorKind::kSink) text += " sink";
  if (p.dropout.threshold > 0) {
    absl::StrAppend(&text, " dropout=", p.dropout.threshold, "/256,seed=", p.dropout.seed,
                    ",offset=", p.dropout.offset);
  }
  if (p.shard.batch_offset != 0 || p.shard.q_head_offset != 0 || p.shard.total_q_heads != 0) {
    absl::StrAppend(&text, " shard=(", p.shard.batch_offset, ",", p.shard.q_head_offset, "/",
                    p.shard.total_q_heads, ")");
  }
  if (p.accumulate == AccumulateType::kFloat16) text += " accumulate_f16";
  if (p.allow_nondeterministic) text += " nondeterministic";
  return text;
}

}  // namespace

absl::string_view LayoutName(Layout layout) {
  switch (layout) {
    case Layout::kBhld:
      return "bhld";
    case Layout::kBlhd:
      return "blhd";
    case Layout::kPackedThd:
      return "packed_thd";
    case Layout::kPackedHtd:
      return "packed_htd";
  }
  return "unknown";
}

std::string ProblemText(const Problem& p) {
  return absl::StrCat(SizesText(p), DiagonalText(p), LengthsText(p), ScoreText(p), SoftmaxText(p));
}

}  // namespace attnd
