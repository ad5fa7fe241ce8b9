// Problem: one multi-head attention problem, forward and backward alike, after every default has
// been resolved. It holds the sizes and the options, never tensor data. docs/NUMERICS.md states the
// mathematics; proto/attnd/v1 the wire.
//
//     S = scale·QKᵀ → softcap·tanh(S/softcap) → + bias + ALiBi → not visible = excluded
//     P = softmax(S) over visible keys     lse = ln Σ exp(S)
//     O = (P ∘ Z) V                        Z = the scaled dropout mask
//
// Shapes: dense layouts hold Q [batch, q_heads, q_len, qk_head_dim] (or [batch, q_len, q_heads,
// qk_head_dim]); packed layouts hold `batch` sequences end to end, Q [q_len, q_heads, qk_head_dim]
// (or heads first), where q_len and kv_len are the totals and cu_seqlens say where each sequence
// starts. Rows and columns (i, j) count inside a sequence. A Problem is a value; once validated it
// is not changed. Any thread may read it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "attention/element.h"
#include "attention/masks/mask_spec.h"

namespace attnd {

enum class Layout : uint8_t {
  kBhld = 1,       // [batch, heads, length, dim]
  kBlhd = 2,       // [batch, length, heads, dim]
  kPackedThd = 3,  // [total length, heads, dim]
  kPackedHtd = 4,  // [heads, total length, dim]
};

constexpr bool IsPacked(Layout layout) {
  return layout == Layout::kPackedThd || layout == Layout::kPackedHtd;
}

enum class Direction : uint8_t { kForward, kBackward };

// Where the diagonal lies: row i is aligned with key i + offset.
enum class Alignment : uint8_t {
  kUnspecified,  // only where q_len == kv_len in every sequence, or nothing depends on the diagonal
  kTopLeft,      // offset 0
  kBottomRight,  // offset kv_len − q_len of that sequence
  kOffsets,      // Problem::offsets
};

enum class DenominatorKind : uint8_t {
  kSoftmax,
  kZeroRest,  // each key of the sequence that is not visible counts as logit 0 (SPION, SAT)
  kSink,      // one extra logit per query head that has no value
};

enum class AccumulateType : uint8_t { kFloat32, kFloat16 };

// Limits of one call; docs of the wire repeat them.
// Of q_len and kv_len, in one sequence or in total.
inline constexpr int64_t kMaxLength = int64_t{1} << 20;
inline constexpr int64_t kMaxHeads = int64_t{1} << 16;
inline constexpr int64_t kMaxBatch = int64_t{1} << 20;
inline constexpr int64_t kMaxHeadDim = 256;
inline constexpr int64_t kMaxElements = int64_t{1} << 40;  // of one tensor

// [batch, q_heads, q_len, kv_len], each dimension full or 1 (broadcast). Packed layouts: q_len and
// kv_len here are the longest sequence's, and (i, j) count inside a sequence.
struct BroadcastShape {
  int64_t batch = 1, heads = 1, rows = 1, columns = 1;
  int64_t elements() const { return batch * heads * rows * columns; }
  friend bool operator==(const BroadcastShape&, const BroadcastShape&) = default;
};

// A bool mask sent as bits: rows of ceil(columns / 8) bytes, bit j & 7 of byte j >> 3 is key j, 1 =
// attend.
struct BoolMask {
  BroadcastShape shape;
  int64_t row_bytes() const { return (shape.columns + 7) / 8; }
  int64_t bytes() const { return shape.batch * shape.heads * shape.rows * row_bytes(); }
  friend bool operator==(const BoolMask&, const BoolMask&) = default;
};

// A tensor added to S; −infinity masks. Its gradient, if wanted, is float32 of the same shape,
// summed over broadcast dimensions: over keys, rows, then heads, then batch entries, each in
// ascending order.
struct Bias {
  ElementType element = ElementType::kFloat32;
  BroadcastShape shape;
  bool want_gradient = false;
  friend bool operator==(const Bias&, const Bias&) = default;
};

class MaskDescription;  // the visible keys by a rule

struct Dropout {
  uint32_t threshold = 0;  // p·256, 0..255; 0 = none
  uint64_t seed = 0;
  uint64_t offset = 0;
  friend bool operator==(const Dropout&, const Dropout&) = default;
};

// This problem's place in the caller's whole tensors. Only dropout depends on it.
struct Shard {
  int64_t batch_offset = 0;
  int64_t q_head_offset = 0;
  int64_t total_q_heads = 0;  // 0: q_head_offset + q_heads
  friend bool operator==(const Shard&, const Shard&) = default;
};

// One batch entry, or one packed sequence.
struct Sequence {
  int64_t q_begin;  // first row of its Q within the entry's rows; 0 in dense layouts
  int64_t q_len;
  int64_t kv_begin;
  int64_t kv_len;  // keys that exist: key padding is already cut off
  int64_t offset;  // the diagonal: row i is aligned with key i + offset
};

// The keys of row i that causal and window leave: [begin, end), inside [0, kv_len).
struct KeyRange {
  int64_t begin, end;
};

struct Problem {
  int64_t batch = 0;
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  int64_t q_len = 0;
  int64_t kv_len = 0;
  int64_t qk_head_dim = 0;
  int64_t v_head_dim = 0;
  ElementType element = ElementType::kFloat32;
  Layout layout = Layout::kBhld;

  std::optional<float> scale;  // absent: 1/sqrt(qk_head_dim)
  float softcap = 0;           // 0: none
  Alignment alignment = Alignment::kUnspecified;
  std::vector<int32_t> offsets;     // for kOffsets: one, or one per batch entry
  bool causal = false;              // row i sees j ≤ i + offset
  int64_t window_left = -1;         // row i sees j ≥ i + offset − left; −1 unbounded
  int64_t window_right = -1;        // row i sees j ≤ i + offset + right; −1 unbounded
  std::vector<int32_t> kv_lengths;  // dense: [batch] or empty
  std::vector<int32_t> cu_seqlens_q,
      cu_seqlens_k;  // packed: [batch + 1], starting at 0, ending at the total
  std::optional<BoolMask> bool_mask;
  // Null: none. Equal masks mostly share one object: equality compares pointers.
  std::shared_ptr<const MaskDescription> mask;
  MaskOrigin mask_origin;  // where this problem lies in it
  // About the share of all scores that an engine visits because of it: what a call costs.
  double mask_share = 1;
  std::optional<Bias> bias;
  std::vector<float>
      alibi_slopes;  // empty, [q_heads] or [batch·q_heads]: bias −slope·|i + offset − j|
  Dropout dropout;
  DenominatorKind denominator = DenominatorKind::kSoftmax;
  std::vector<float> sink_logits;  // for kSink: [q_heads]
  AccumulateType accumulate = AccumulateType::kFloat32;
  bool allow_nondeterministic = false;
  Shard shard;

  float ResolvedScale() const;
  int64_t group_size() const { return q_heads / kv_heads; }
  int64_t KvHead(int64_t q_head) const { return q_head / group_size(); }
  bool IsBounded() const { return causal || window_left >= 0 || window_right >= 0; }

  Sequence SequenceAt(int64_t batch_index) const;
  // Keys of `row` that the diagonal rules leave; begin == end when none.
  KeyRange VisibleRange(const Sequence& sequence, int64_t row) const;
  // The longest sequence's lengths; q_len and kv_len in dense layouts (kv_lengths not counted).
  int64_t MaxQueryLength() const;
  int64_t MaxKeyLength() const;

  float AlibiSlope(int64_t batch_index, int64_t q_head) const;  // 0 when there are none
  int64_t TotalQueryHeads() const;                              // of the caller's whole tensors
  // b·total_q_heads + h in the caller's whole tensors, for the dropout generator.
  uint32_t DropoutHeadIndex(int64_t batch_index, int64_t q_head) const;

  // Numbers of elements of the tensors, and where lse of (b, h, i) stands: [batch, q_heads, q_len]
  // in dense layouts, [q_heads, total rows] in packed ones.
  int64_t QueryElements() const;
  int64_t KeyElements() const;
  int64_t ValueElements() const;
  int64_t OutputElements() const;
  int64_t LseElements() const;
  int64_t LseIndex(int64_t batch_index, int64_t q_head, const Sequence& sequence,
                   int64_t row) const;

  friend bool operator==(const Problem&, const Problem&) = default;
};

// OK, or InvalidArgument "field: expected ..., got ..." naming the wire's field. Checks every
// number and the overflow of products, and allocates nothing.
absl::Status Validate(const Problem& problem);

// Tells a mask by description about a valid problem: its sizes, those of the longest sequence in
// packed layouts, and the diagonal of each batch entry, once where they are equal. Key lengths cut
// at run time and do not count, but where the diagonal is bottom_right they move it.
MaskCall MaskCallOf(const Problem& problem);

// Whether forward gives the same for both: all fields but bias.want_gradient agree, and masks have
// the same id.
bool SameForward(const Problem& a, const Problem& b);

}  // namespace attnd
