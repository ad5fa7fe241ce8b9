#include "attention/shard.h"

#include <algorithm>

namespace attnd {
namespace {

using Loop = StridedRuns::Loop;

struct Rows {
  int64_t begin, count;
};

// The rows that the range's entries hold within one batch entry's extent: all of them in dense
// layouts, the sequences' in packed ones; or those that it is cut to.
Rows RowsOf(const Problem& p, const ShardRange& r, const std::vector<int32_t>& cu, int64_t length,
            const Rows& cut) {
  Rows rows = {0, length};
  if (IsPacked(p.layout)) {
    rows = {cu[r.batch_begin], cu[r.batch_begin + r.batch_count] - cu[r.batch_begin]};
  }
  return r.cut == Cut::kNone ? rows : Rows{rows.begin + cut.begin, cut.count};
}
Rows QueryRows(const Problem& p, const ShardRange& r) {
  return RowsOf(p, r, p.cu_seqlens_q, p.q_len, {r.row_begin, r.row_count});
}
Rows KeyRows(const Problem& p, const ShardRange& r) {
  return RowsOf(p, r, p.cu_seqlens_k, p.kv_len, {r.key_begin, r.key_count});
}

template <class T>
std::vector<T> Slice(const std::vector<T>& values, int64_t begin, int64_t count) {
  return std::vector<T>(values.begin() + begin, values.begin() + begin + count);
}

std::vector<int32_t> SliceCuSeqlens(const std::vector<int32_t>& cu, const ShardRange& r) {
  std::vector<int32_t> slice = Slice(cu, r.batch_begin, r.batch_count + 1);
  for (int32_t& value : slice) value -= cu[r.batch_begin];
  return slice;
}

// Per-head values, or values per batch entry and head.
std::vector<float> SliceSlopes(const Problem& whole, const Problem& sub, const ShardRange& r) {
  const std::vector<float>& all = whole.alibi_slopes;
  int64_t head_begin = r.kv_head_begin * whole.group_size();
  if (all.empty()) return {};
  if (static_cast<int64_t>(all.size()) == whole.q_heads) {
    return Slice(all, head_begin, sub.q_heads);
  }
  std::vector<float> slice;
  for (int64_t b = r.batch_begin; b < r.batch_begin + r.batch_count; ++b) {
    auto first = all.begin() + b * whole.q_heads + head_begin;
    slice.insert(slice.end(), first, first + sub.q_heads);
  }
  return slice;
}

// Broadcast dimensions stay broadcast; full ones become the shard's.
BroadcastShape SubShape(const BroadcastShape& whole, const Problem& sub) {
  BroadcastShape shape = whole;
  if (whole.batch != 1) shape.batch = sub.batch;
  if (whole.heads != 1) shape.heads = sub.q_heads;
  if (whole.rows != 1) shape.rows = sub.MaxQueryLength();
  if (whole.columns != 1) shape.columns = sub.MaxKeyLength();
  return shape;
}

void SliceMaskAndBias(const Problem& whole, const ShardRange& r, Problem& sub) {
  if (whole.bool_mask) sub.bool_mask->shape = SubShape(whole.bool_mask->shape, sub);
  if (!whole.bias) return;
  sub.bias->shape = SubShape(whole.bias->shape, sub);
  if (r.expand_bias_batch) sub.bias->shape.batch = sub.batch;
  if (r.expand_bias_heads) sub.bias->shape.heads = sub.q_heads;
}

// Rows and keys count from the cut; the diagonal moves with them.
void CutLengths(const Problem& whole, const ShardRange& r, Problem& sub) {
  const Sequence sequence = whole.SequenceAt(r.batch_begin);
  sub.q_len = r.row_count;
  sub.kv_len = r.key_count;
  if (IsPacked(whole.layout)) {
    sub.cu_seqlens_q = {0, static_cast<int32_t>(r.row_count)};
    sub.cu_seqlens_k = {0, static_cast<int32_t>(r.key_count)};
  } else if (!whole.kv_lengths.empty()) {
    int64_t exist = std::clamp<int64_t>(sequence.kv_len - r.key_begin, 0, r.key_count);
    sub.kv_lengths = {static_cast<int32_t>(exist)};
  }
  sub.alignment = Alignment::kOffsets;
  sub.offsets = {static_cast<int32_t>(sequence.offset + r.row_begin - r.key_begin)};
}

void SliceLengths(const Problem& whole, const ShardRange& r, Problem& sub) {
  if (r.cut != Cut::kNone) return CutLengths(whole, r, sub);
  if (IsPacked(whole.layout)) {
    sub.cu_seqlens_q = SliceCuSeqlens(whole.cu_seqlens_q, r);
    sub.cu_seqlens_k = SliceCuSeqlens(whole.cu_seqlens_k, r);
    sub.q_len = sub.cu_seqlens_q.back();
    sub.kv_len = sub.cu_seqlens_k.back();
  }
  if (!whole.kv_lengths.empty()) {
    sub.kv_lengths = Slice(whole.kv_lengths, r.batch_begin, r.batch_count);
  }
  sub.offsets =
      whole.offsets.size() > 1 ? Slice(whole.offsets, r.batch_begin, r.batch_count) : whole.offsets;
}

// r's rows and keys are 0 unless it is cut.
MaskOrigin OriginOf(const Problem& whole, const ShardRange& r, int64_t head_begin) {
  MaskOrigin origin = whole.mask_origin;
  origin.row_begin += r.row_begin;
  origin.key_begin += r.key_begin;
  origin.batch_begin += r.batch_begin;
  origin.head_begin += head_begin;
  return origin;
}

// The range's part of a [batch, heads, length, dim] tensor.
StridedRuns TensorRuns(const Problem& whole, const ShardRange& r, int64_t heads, Rows heads_range,
                       Rows rows, int64_t length, int64_t row_bytes) {
  int64_t h0 = heads_range.begin, nh = heads_range.count;
  const Loop entries{r.batch_count, heads * length * row_bytes};
  const Loop all_heads{nh, length * row_bytes}, all_rows{rows.count, heads * row_bytes};
  switch (whole.layout) {
    case Layout::kBhld:
      return StridedRuns::Make(((r.batch_begin * heads + h0) * length + rows.begin) * row_bytes,
                               {Loop{}, entries, all_heads}, rows.count * row_bytes);
    case Layout::kBlhd:
      return StridedRuns::Make(((r.batch_begin * length + rows.begin) * heads + h0) * row_bytes,
                               {Loop{}, entries, all_rows}, nh * row_bytes);
    case Layout::kPackedThd:
      return StridedRuns::Make((rows.begin * heads + h0) * row_bytes, {Loop{}, Loop{}, all_rows},
                               nh * row_bytes);
    case Layout::kPackedHtd:
      return StridedRuns::Make((h0 * length + rows.begin) * row_bytes, {Loop{}, Loop{}, all_heads},
                               rows.count * row_bytes);
  }
  return {};
}

StridedRuns LseRuns(const Problem& whole, const ShardRange& r, Rows heads, Rows rows) {
  constexpr int64_t kBytes = sizeof(float);
  const bool packed = IsPacked(whole.layout);
  const int64_t entry = packed ? 0 : r.batch_begin, entries = packed ? 1 : r.batch_count;
  return StridedRuns::Make(
      ((entry * whole.q_heads + heads.begin) * whole.q_len + rows.begin) * kBytes,
      {Loop{}, Loop{entries, whole.q_heads * whole.q_len * kBytes},
       Loop{heads.count, whole.q_len * kBytes}},
      rows.count * kBytes);
}

// How a broadcast tensor stores a row, and where in its rows the range begins.
struct BroadcastRow {
  int64_t bytes, sub_bytes;  // of the whole tensor, of the shard's
  int64_t begin;             // bytes
};

// A broadcast tensor's part; rows and columns shrink to the shard's longest sequence.
StridedRuns BroadcastRuns(const BroadcastShape& whole, const BroadcastShape& sub,
                          const ShardRange& r, int64_t head_begin, const BroadcastRow& row) {
  int64_t plane = whole.rows * row.bytes;
  int64_t b = whole.batch == 1 ? 0 : r.batch_begin, h = whole.heads == 1 ? 0 : head_begin;
  int64_t first_row = whole.rows == 1 ? 0 : r.row_begin;
  return StridedRuns::Make(
      (b * whole.heads + h) * plane + first_row * row.bytes + (whole.columns == 1 ? 0 : row.begin),
      {Loop{sub.batch, whole.batch == 1 ? 0 : whole.heads * plane},
       Loop{sub.heads, whole.heads == 1 ? 0 : plane}, Loop{sub.rows, row.bytes}},
      row.sub_bytes);
}

// Copies the fields that no range changes: everything but the lists, which may be long.
Problem WithoutLists(const Problem& p) {
  Problem copy;
  copy.q_len = p.q_len;
  copy.kv_len = p.kv_len;
  copy.qk_head_dim = p.qk_head_dim;
  copy.v_head_dim = p.v_head_dim;
  copy.element = p.element;
  copy.layout = p.layout;
  copy.scale = p.scale;
  copy.softcap = p.softcap;
  copy.alignment = p.alignment;
  copy.causal = p.causal;
  copy.window_left = p.window_left;
  copy.window_right = p.window_right;
  copy.bool_mask = p.bool_mask;
  copy.mask = p.mask;
  copy.mask_share = p.mask_share;
  copy.bias = p.bias;
  copy.dropout = p.dropout;
  copy.denominator = p.denominator;
  copy.accumulate = p.accumulate;
  copy.allow_nondeterministic = p.allow_nondeterministic;
  return copy;
}

}  // namespace

bool IsPartial(const ShardRange& range, Direction direction) {
  return range.cut == Cut::kKeys || (range.cut == Cut::kRows && direction == Direction::kBackward);
}

Problem SubProblem(const Problem& whole, const ShardRange& r) {
  Problem sub = WithoutLists(whole);
  int64_t head_begin = r.kv_head_begin * whole.group_size();
  sub.batch = r.batch_count;
  sub.kv_heads = r.kv_head_count;
  sub.q_heads = r.kv_head_count * whole.group_size();
  SliceLengths(whole, r, sub);
  sub.alibi_slopes = SliceSlopes(whole, sub, r);
  if (r.cut == Cut::kKeys) sub.denominator = DenominatorKind::kSoftmax;
  if (sub.denominator == DenominatorKind::kSink) {
    sub.sink_logits = Slice(whole.sink_logits, head_begin, sub.q_heads);
  }
  SliceMaskAndBias(whole, r, sub);
  if (whole.mask != nullptr) sub.mask_origin = OriginOf(whole, r, head_begin);
  sub.shard.batch_offset = whole.shard.batch_offset + r.batch_begin;
  sub.shard.q_head_offset = whole.shard.q_head_offset + head_begin;
  sub.shard.total_q_heads = whole.shard.total_q_heads != 0
                                ? whole.shard.total_q_heads
                                : whole.shard.q_head_offset + whole.q_heads;
  return sub;
}

bool IsTrivial(const Problem& whole, const ShardRange& r) {
  return QueryRows(whole, r).count == 0 || KeyRows(whole, r).count == 0;
}

ShardRuns ShardRunsOf(const Problem& whole, const ShardRange& r) {
  Problem sub = SubProblem(whole, r);
  Rows q_rows = QueryRows(whole, r), kv_rows = KeyRows(whole, r);
  Rows kv_heads{r.kv_head_begin, r.kv_head_count};
  Rows q_heads{r.kv_head_begin * whole.group_size(), sub.q_heads};
  int64_t element = ElementBytes(whole.element);
  int64_t qk_bytes = whole.qk_head_dim * element, v_bytes = whole.v_head_dim * element;
  ShardRuns runs;
  runs.q = TensorRuns(whole, r, whole.q_heads, q_heads, q_rows, whole.q_len, qk_bytes);
  runs.k = TensorRuns(whole, r, whole.kv_heads, kv_heads, kv_rows, whole.kv_len, qk_bytes);
  runs.v = TensorRuns(whole, r, whole.kv_heads, kv_heads, kv_rows, whole.kv_len, v_bytes);
  runs.o = TensorRuns(whole, r, whole.q_heads, q_heads, q_rows, whole.q_len, v_bytes);
  runs.lse = LseRuns(whole, r, q_heads, q_rows);
  if (whole.bool_mask) {
    runs.mask_bits =
        BroadcastRuns(whole.bool_mask->shape, sub.bool_mask->shape, r, q_heads.begin,
                      {whole.bool_mask->row_bytes(), sub.bool_mask->row_bytes(), r.key_begin / 8});
  }
  if (whole.bias) {
    const BroadcastShape &from = whole.bias->shape, &to = sub.bias->shape;
    auto runs_of = [&](int64_t bytes) {
      return BroadcastRuns(from, to, r, q_heads.begin,
                           {from.columns * bytes, to.columns * bytes, r.key_begin * bytes});
    };
    runs.bias = runs_of(ElementBytes(whole.bias->element));
    runs.d_bias = runs_of(int64_t{sizeof(float)});
  }
  runs.d_sink = StridedRuns::Make(
      (r.batch_begin * whole.q_heads + q_heads.begin) * int64_t{sizeof(float)},
      {Loop{}, Loop{}, Loop{r.batch_count, whole.q_heads * int64_t{sizeof(float)}}},
      q_heads.count * int64_t{sizeof(float)});
  return runs;
}

}  // namespace attnd
