#include "attention/problem.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/masks/mask_description.h"
#include "base/status_macros.h"

namespace attnd {
namespace {

template <class Expected, class Got>
absl::Status Wrong(absl::string_view field, const Expected& expected, const Got& got) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": expected ", expected, ", got ", got));
}

absl::Status InRange(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return Wrong(field, absl::StrCat(low, "..", high), value);
}

absl::Status Finite(absl::string_view field, float value) {
  if (std::isfinite(value)) return absl::OkStatus();
  return Wrong(field, "a finite number", value);
}

// The same for one entry of a list. The name is only built for a wrong entry: lists may have
// millions of entries.
absl::Status InRangeAt(absl::string_view list, int64_t index, int64_t value, int64_t low,
                       int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return InRange(absl::StrCat(list, "[", index, "]"), value, low, high);
}

absl::Status AllFinite(absl::string_view list, const std::vector<float>& values) {
  for (size_t n = 0; n < values.size(); ++n) {
    if (!std::isfinite(values[n])) return Finite(absl::StrCat(list, "[", n, "]"), values[n]);
  }
  return absl::OkStatus();
}

absl::Status ValidateSizes(const Problem& p) {
  RETURN_IF_ERROR(InRange("problem.batch", p.batch, 1, kMaxBatch));
  RETURN_IF_ERROR(InRange("problem.q_heads", p.q_heads, 1, kMaxHeads));
  RETURN_IF_ERROR(InRange("problem.kv_heads", p.kv_heads, 1, kMaxHeads));
  RETURN_IF_ERROR(InRange("problem.q_len", p.q_len, 1, kMaxLength));
  RETURN_IF_ERROR(InRange("problem.kv_len", p.kv_len, 1, kMaxLength));
  RETURN_IF_ERROR(InRange("problem.qk_head_dim", p.qk_head_dim, 1, kMaxHeadDim));
  RETURN_IF_ERROR(InRange("problem.v_head_dim", p.v_head_dim, 1, kMaxHeadDim));
  if (p.q_heads % p.kv_heads != 0) {
    return Wrong("problem.kv_heads", absl::StrCat("a divisor of q_heads = ", p.q_heads),
                 p.kv_heads);
  }
  return absl::OkStatus();
}

// Products of at most 2^20·2^16·2^20·2^8 do not fit 64 bits: multiply with a check at each step.
absl::Status ElementsInRange(absl::string_view field, std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product) || product > kMaxElements) {
      return Wrong(field, absl::StrCat("at most ", kMaxElements, " elements"), "more");
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateElementCounts(const Problem& p) {
  int64_t entries = IsPacked(p.layout) ? 1 : p.batch;
  RETURN_IF_ERROR(ElementsInRange("q", {entries, p.q_heads, p.q_len, p.qk_head_dim}));
  RETURN_IF_ERROR(ElementsInRange("k", {entries, p.kv_heads, p.kv_len, p.qk_head_dim}));
  RETURN_IF_ERROR(ElementsInRange("v", {entries, p.kv_heads, p.kv_len, p.v_head_dim}));
  return ElementsInRange("o", {entries, p.q_heads, p.q_len, p.v_head_dim});
}

absl::Status ValidateEnums(const Problem& p) {
  RETURN_IF_ERROR(InRange("problem.element", static_cast<int64_t>(p.element), 1, 3));
  RETURN_IF_ERROR(InRange("problem.layout", static_cast<int64_t>(p.layout), 1, 4));
  return absl::OkStatus();
}

absl::Status ValidateScores(const Problem& p) {
  if (p.scale.has_value()) RETURN_IF_ERROR(Finite("problem.scale", *p.scale));
  RETURN_IF_ERROR(Finite("problem.softcap", p.softcap));
  if (p.softcap < 0) return Wrong("problem.softcap", "0 or above", p.softcap);
  RETURN_IF_ERROR(InRange("problem.window.left", p.window_left, -1, INT32_MAX));
  return InRange("problem.window.right", p.window_right, -1, INT32_MAX);
}

absl::Status ValidateCuSeqlens(absl::string_view field, const std::vector<int32_t>& cu,
                               int64_t batch, int64_t total) {
  if (static_cast<int64_t>(cu.size()) != batch + 1) {
    return Wrong(field, absl::StrCat("batch + 1 = ", batch + 1, " entries"), cu.size());
  }
  if (cu.front() != 0) return Wrong(absl::StrCat(field, "[0]"), 0, cu.front());
  for (int64_t b = 0; b < batch; ++b) {
    if (cu[b + 1] < cu[b]) {
      return Wrong(absl::StrCat(field, "[", b + 1, "]"), absl::StrCat("at least ", cu[b]),
                   cu[b + 1]);
    }
  }
  if (cu.back() != total) {
    return Wrong(absl::StrCat(field, "[", batch, "]"), absl::StrCat("the total length ", total),
                 cu.back());
  }
  return absl::OkStatus();
}

absl::Status ValidateKvLengths(const Problem& p) {
  if (p.kv_lengths.empty()) return absl::OkStatus();
  if (static_cast<int64_t>(p.kv_lengths.size()) != p.batch) {
    return Wrong("problem.lengths.kv_len", absl::StrCat("batch = ", p.batch, " entries"),
                 p.kv_lengths.size());
  }
  for (int64_t b = 0; b < p.batch; ++b) {
    RETURN_IF_ERROR(InRangeAt("problem.lengths.kv_len", b, p.kv_lengths[b], 0, p.kv_len));
  }
  return absl::OkStatus();
}

absl::Status ValidateLengths(const Problem& p) {
  if (IsPacked(p.layout)) {
    if (!p.kv_lengths.empty()) {
      return Wrong("problem.lengths.kv_len", "none in a packed layout", p.kv_lengths.size());
    }
    RETURN_IF_ERROR(
        ValidateCuSeqlens("problem.lengths.cu_seqlens_q", p.cu_seqlens_q, p.batch, p.q_len));
    return ValidateCuSeqlens("problem.lengths.cu_seqlens_k", p.cu_seqlens_k, p.batch, p.kv_len);
  }
  for (const auto& [field, cu] : {std::pair("problem.lengths.cu_seqlens_q", &p.cu_seqlens_q),
                                  std::pair("problem.lengths.cu_seqlens_k", &p.cu_seqlens_k)}) {
    if (!cu->empty()) return Wrong(field, "none in a dense layout", cu->size());
  }
  return ValidateKvLengths(p);
}

bool LengthsDiffer(const Problem& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    Sequence s = p.SequenceAt(b);
    if (s.q_len != s.kv_len) return true;
  }
  return false;
}

absl::Status ValidateAlignment(const Problem& p) {
  int64_t count = static_cast<int64_t>(p.offsets.size());
  if (p.alignment == Alignment::kOffsets) {
    if (count != 1 && count != p.batch) {
      return Wrong("problem.alignment.offsets.offset",
                   absl::StrCat("1 or batch = ", p.batch, " entries"), count);
    }
    for (int64_t n = 0; n < count; ++n) {
      RETURN_IF_ERROR(
          InRangeAt("problem.alignment.offsets.offset", n, p.offsets[n], -kMaxLength, kMaxLength));
    }
    return absl::OkStatus();
  }
  if (count != 0) return Wrong("problem.alignment.offsets", "none beside another alignment", count);
  bool needs_diagonal = p.IsBounded() || !p.alibi_slopes.empty();
  if (p.alignment == Alignment::kUnspecified && needs_diagonal && LengthsDiffer(p)) {
    return Wrong(
        "problem.alignment",
        "top_left, bottom_right or offsets, since causal, window or ALiBi depend on it and the "
        "lengths of queries and keys differ",
        "none");
  }
  return absl::OkStatus();
}

absl::Status ValidateShape(absl::string_view field, const BroadcastShape& shape, const Problem& p) {
  struct Dimension {
    int64_t got, full;
  } dimensions[] = {{shape.batch, p.batch},
                    {shape.heads, p.q_heads},
                    {shape.rows, p.MaxQueryLength()},
                    {shape.columns, p.MaxKeyLength()}};
  for (int n = 0; n < 4; ++n) {
    if (dimensions[n].got != 1 && dimensions[n].got != dimensions[n].full) {
      return Wrong(absl::StrCat(field, "[", n, "]"), absl::StrCat("1 or ", dimensions[n].full),
                   dimensions[n].got);
    }
  }
  return ElementsInRange(field, {shape.batch, shape.heads, shape.rows, shape.columns});
}

absl::Status ValidateMask(const Problem& p) {
  if (p.mask == nullptr) return absl::OkStatus();
  if (p.bool_mask.has_value()) return Wrong("problem.mask", "none beside bool_mask", "both");
  if (p.alignment == Alignment::kUnspecified && p.mask->depends_on_diagonal() && LengthsDiffer(p)) {
    return Wrong("problem.alignment",
                 "top_left, bottom_right or offsets, since the mask depends on it and the lengths "
                 "of queries and keys differ",
                 "none");
  }
  return ValidatePlace(p.mask->spec(), p.mask_origin, MaskCallOf(p));
}

absl::Status ValidateMaskAndBias(const Problem& p) {
  RETURN_IF_ERROR(ValidateMask(p));
  if (p.bool_mask.has_value()) {
    RETURN_IF_ERROR(ValidateShape("problem.bool_mask.shape", p.bool_mask->shape, p));
  }
  if (p.bias.has_value()) {
    RETURN_IF_ERROR(InRange("problem.bias.element", static_cast<int64_t>(p.bias->element), 1, 3));
    RETURN_IF_ERROR(ValidateShape("problem.bias.shape", p.bias->shape, p));
  }
  int64_t slopes = static_cast<int64_t>(p.alibi_slopes.size());
  if (slopes != 0 && slopes != p.q_heads && slopes != p.batch * p.q_heads) {
    return Wrong("problem.alibi.slope",
                 absl::StrCat("q_heads = ", p.q_heads, " or batch·q_heads = ", p.batch * p.q_heads,
                              " entries"),
                 slopes);
  }
  return AllFinite("problem.alibi.slope", p.alibi_slopes);
}

absl::Status ValidateDenominator(const Problem& p) {
  int64_t count = static_cast<int64_t>(p.sink_logits.size());
  if (p.denominator != DenominatorKind::kSink) {
    return count == 0 ? absl::OkStatus() : Wrong("problem.denominator.sink", "none", count);
  }
  if (count != p.q_heads) {
    return Wrong("problem.denominator.sink.logit",
                 absl::StrCat("q_heads = ", p.q_heads, " entries"), count);
  }
  return AllFinite("problem.denominator.sink.logit", p.sink_logits);
}

absl::Status ValidateDropoutAndShard(const Problem& p) {
  RETURN_IF_ERROR(InRange("problem.dropout.p · 256", p.dropout.threshold, 0, 255));
  RETURN_IF_ERROR(InRange("problem.shard.batch_offset", p.shard.batch_offset, 0, kMaxBatch));
  RETURN_IF_ERROR(InRange("problem.shard.q_head_offset", p.shard.q_head_offset, 0, kMaxHeads));
  if (p.shard.total_q_heads != 0) {
    RETURN_IF_ERROR(InRange("problem.shard.total_q_heads", p.shard.total_q_heads,
                            p.shard.q_head_offset + p.q_heads, 2 * kMaxHeads));
  }
  // Beyond it two heads of the whole tensors would silently drop the same scores.
  int64_t heads = (p.shard.batch_offset + p.batch) * p.TotalQueryHeads();
  if (p.dropout.threshold > 0 && heads > int64_t{1} << 32) {
    return Wrong("problem.dropout", "at most 4294967296 heads over the whole batch", heads);
  }
  return absl::OkStatus();
}

}  // namespace

float Problem::ResolvedScale() const {
  return scale.has_value() ? *scale
                           : static_cast<float>(1.0 / std::sqrt(static_cast<double>(qk_head_dim)));
}

Sequence Problem::SequenceAt(int64_t b) const {
  Sequence s{0, q_len, 0, kv_len, 0};
  if (IsPacked(layout)) {
    s = {cu_seqlens_q[b], cu_seqlens_q[b + 1] - cu_seqlens_q[b], cu_seqlens_k[b],
         cu_seqlens_k[b + 1] - cu_seqlens_k[b], 0};
  } else if (!kv_lengths.empty()) {
    s.kv_len = kv_lengths[b];
  }
  if (alignment == Alignment::kBottomRight) s.offset = s.kv_len - s.q_len;
  if (alignment == Alignment::kOffsets) s.offset = offsets.size() == 1 ? offsets[0] : offsets[b];
  return s;
}

KeyRange Problem::VisibleRange(const Sequence& s, int64_t row) const {
  int64_t diagonal = row + s.offset;
  int64_t begin = window_left < 0 ? 0 : std::max<int64_t>(0, diagonal - window_left);
  int64_t right =
      causal ? (window_right < 0 ? 0 : std::min<int64_t>(0, window_right)) : window_right;
  bool bounded_right = causal || window_right >= 0;
  int64_t end = bounded_right ? std::min(s.kv_len, diagonal + right + 1) : s.kv_len;
  return begin < end ? KeyRange{begin, end} : KeyRange{0, 0};
}

int64_t Problem::MaxQueryLength() const {
  if (!IsPacked(layout)) return q_len;
  int64_t longest = 0;
  for (int64_t b = 0; b < batch; ++b) longest = std::max(longest, SequenceAt(b).q_len);
  return longest;
}

int64_t Problem::MaxKeyLength() const {
  if (!IsPacked(layout)) return kv_len;
  int64_t longest = 0;
  for (int64_t b = 0; b < batch; ++b) longest = std::max(longest, SequenceAt(b).kv_len);
  return longest;
}

float Problem::AlibiSlope(int64_t b, int64_t h) const {
  if (alibi_slopes.empty()) return 0;
  bool per_batch = static_cast<int64_t>(alibi_slopes.size()) != q_heads;
  return alibi_slopes[per_batch ? b * q_heads + h : h];
}

int64_t Problem::TotalQueryHeads() const {
  return shard.total_q_heads != 0 ? shard.total_q_heads : shard.q_head_offset + q_heads;
}

uint32_t Problem::DropoutHeadIndex(int64_t b, int64_t h) const {
  return static_cast<uint32_t>((b + shard.batch_offset) * TotalQueryHeads() + h +
                               shard.q_head_offset);
}

namespace {
int64_t Entries(const Problem& p) { return IsPacked(p.layout) ? 1 : p.batch; }
}  // namespace

int64_t Problem::QueryElements() const { return Entries(*this) * q_heads * q_len * qk_head_dim; }
int64_t Problem::KeyElements() const { return Entries(*this) * kv_heads * kv_len * qk_head_dim; }
int64_t Problem::ValueElements() const { return Entries(*this) * kv_heads * kv_len * v_head_dim; }
int64_t Problem::OutputElements() const { return Entries(*this) * q_heads * q_len * v_head_dim; }
int64_t Problem::LseElements() const { return Entries(*this) * q_heads * q_len; }

int64_t Problem::LseIndex(int64_t b, int64_t h, const Sequence& s, int64_t row) const {
  if (IsPacked(layout)) return h * q_len + s.q_begin + row;
  return (b * q_heads + h) * q_len + row;
}

absl::Status Validate(const Problem& p) {
  RETURN_IF_ERROR(ValidateEnums(p));
  RETURN_IF_ERROR(ValidateSizes(p));
  RETURN_IF_ERROR(ValidateElementCounts(p));
  RETURN_IF_ERROR(ValidateScores(p));
  RETURN_IF_ERROR(ValidateLengths(p));
  RETURN_IF_ERROR(ValidateAlignment(p));
  RETURN_IF_ERROR(ValidateMaskAndBias(p));
  RETURN_IF_ERROR(ValidateDenominator(p));
  return ValidateDropoutAndShard(p);
}

static_assert(kMaxMaskLength == kMaxLength && kMaxMaskBatch == kMaxBatch &&
              kMaxMaskHeads == kMaxHeads);

MaskCall MaskCallOf(const Problem& problem) {
  MaskCall call = {
      problem.batch, problem.q_heads, problem.MaxQueryLength(), problem.MaxKeyLength(), {}};
  for (int64_t b = 0; b < problem.batch; ++b) call.offsets.push_back(problem.SequenceAt(b).offset);
  const auto differs = [&](int64_t offset) { return offset != call.offsets[0]; };
  if (std::none_of(call.offsets.begin(), call.offsets.end(), differs)) call.offsets.resize(1);
  return call;
}

bool SameForward(const Problem& a, const Problem& b) {
  if (a == b) return true;
  const bool same_mask = a.mask != nullptr && b.mask != nullptr && a.mask->id() == b.mask->id();
  Problem same = a;
  if (same_mask) {
    same.mask = b.mask;
    same.mask_share = b.mask_share;
  }
  if (a.bias && b.bias) same.bias->want_gradient = b.bias->want_gradient;
  return same == b;
}

}  // namespace attnd
