#include "kernels/layers/cuda/padded_attention.h"

#include <algorithm>

#include "base/round_up.h"
#include "kernels/cuda/layout/launch_layout.h"
#include "modules/arena.h"

namespace attnd {
namespace {

// Rows of dQ's sums.
constexpr int64_t kGroupRows = kDqBlockRows;
// A sequence and head take at most so much besides: tiles that are not full, the sequence itself.
constexpr int64_t kSequenceHeadBytes = 256;

bool IsWhole(const cuda::RowShape& shape) { return shape.dim % cuda::kChunk == 0; }

int64_t CopyBytes(const cuda::RowShape& shape) {
  return IsWhole(shape) ? 0 : RoundUp(shape.padded_bytes(), kArenaAlignment);
}

cuda::RowShape ShapeOf(const Problem& p, PaddedRows::Kind kind) {
  switch (kind) {
    case PaddedRows::kQuery:
      return cuda::QueryRows(p);
    case PaddedRows::kKey:
      return cuda::KeyRows(p);
    case PaddedRows::kValue:
      return cuda::ValueRows(p);
    case PaddedRows::kOutput:
      return cuda::OutputRows(p);
  }
  return {};
}

// Sixteen bits at a time.
ConstTensor Units(const void* data) { return {data, ElementType::kFloat16}; }
Tensor Units(void* data) { return {data, ElementType::kFloat16}; }

// The place of a group's first sequence.
struct Origin {
  int64_t entries = 0, rows = 0, keys = 0;
};
Origin OriginOf(const Problem& whole, const ShardRange& group) {
  const int64_t first = group.batch_begin;
  if (IsPacked(whole.layout)) return {first, whole.cu_seqlens_q[first], whole.cu_seqlens_k[first]};
  return {first, first * whole.q_len, first * whole.kv_len};
}

const uint8_t* MaskOf(const Problem& whole, const uint8_t* bits, int64_t entries) {
  if (!whole.bool_mask || whole.bool_mask->shape.batch == 1) return bits;
  return bits + entries * (whole.bool_mask->bytes() / whole.bool_mask->shape.batch);
}

// Returns the group's rows of a [rows, heads, dim] tensor, which kernels read padded, or of one
// with this stride from row to row.
template <class T>
T* RowsFrom(T* tensor, const Problem& whole, PaddedRows::Kind kind, const Origin& at,
            int64_t stride = 0) {
  const cuda::RowShape shape = ShapeOf(whole, kind);
  const bool is_query = kind == PaddedRows::kQuery || kind == PaddedRows::kOutput;
  if (stride == 0) stride = shape.heads * cuda::PaddedDim(shape.dim);
  const int64_t units = (is_query ? at.rows : at.keys) * stride;
  using Bytes = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return static_cast<Bytes*>(tensor) + units * 2;
}

}  // namespace

int64_t PaddedBytes(const Problem& p, Direction direction) {
  const int64_t q = CopyBytes(cuda::QueryRows(p)), k = CopyBytes(cuda::KeyRows(p));
  const int64_t v = CopyBytes(cuda::ValueRows(p)), o = CopyBytes(cuda::OutputRows(p));
  return (direction == Direction::kForward ? 1 : 2) * (q + k + v + o);
}

int64_t GroupBytes(const cuda::CudaBackend& engine, const Problem& one, Direction direction) {
  Problem p = one;
  p.q_len = RoundUp(std::max<int64_t>(p.q_len, 1), kGroupRows);
  p.kv_len = RoundUp(std::max<int64_t>(p.kv_len, 1), kGroupRows);
  const int64_t sequences = p.q_len / kGroupRows + 1;
  return RoundUp(engine.ArenaBytesInPlace(p, direction) +
                     sequences * (p.q_heads + p.kv_heads) * kSequenceHeadBytes,
                 kArenaAlignment);
}

std::vector<ShardRange> GroupsOf(const Problem& p) {
  // The columns of packed sequences' masks are the longest one's of all.
  const bool is_one = IsPacked(p.layout) && p.bool_mask.has_value();
  int64_t all_rows = 0;
  for (int64_t b = 0; b < p.batch; ++b) all_rows += p.SequenceAt(b).q_len;
  const int64_t budget = RoundUp(std::max<int64_t>(all_rows, 1), kGroupRows);
  std::vector<ShardRange> groups;
  int64_t longest = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t rows = RoundUp(std::max<int64_t>(p.SequenceAt(b).q_len, 1), kGroupRows);
    const int64_t most = std::max(longest, rows);
    if (groups.empty() || (!is_one && (groups.back().batch_count + 1) * most > budget)) {
      groups.push_back({.batch_begin = b, .kv_head_count = p.kv_heads});
      longest = 0;
    }
    ++groups.back().batch_count;
    longest = std::max(longest, rows);
  }
  return groups;
}

ForwardCall CallOfGroup(const ForwardCall& call, const Problem& part, const ShardRange& group) {
  const Problem& whole = *call.problem;
  const Origin at = OriginOf(whole, group);
  ForwardCall of = call;
  of.problem = &part;
  of.q = RowsFrom(call.q, whole, PaddedRows::kQuery, at, call.strides.q);
  of.k = RowsFrom(call.k, whole, PaddedRows::kKey, at, call.strides.k);
  of.v = RowsFrom(call.v, whole, PaddedRows::kValue, at, call.strides.v);
  of.o = RowsFrom(call.o, whole, PaddedRows::kOutput, at);
  of.lse = call.lse + at.rows * whole.q_heads;
  of.mask_bits = MaskOf(whole, call.mask_bits, at.entries);
  return of;
}

BackwardCall CallOfGroup(const BackwardCall& call, const Problem& part, const ShardRange& group) {
  const Problem& whole = *call.problem;
  const Origin at = OriginOf(whole, group);
  BackwardCall of = call;
  of.problem = &part;
  of.q = RowsFrom(call.q, whole, PaddedRows::kQuery, at, call.strides.q);
  of.k = RowsFrom(call.k, whole, PaddedRows::kKey, at, call.strides.k);
  of.v = RowsFrom(call.v, whole, PaddedRows::kValue, at, call.strides.v);
  of.o = RowsFrom(call.o, whole, PaddedRows::kOutput, at);
  of.lse = call.lse + at.rows * whole.q_heads;
  of.d_o = RowsFrom(call.d_o, whole, PaddedRows::kOutput, at);
  of.d_q = RowsFrom(call.d_q, whole, PaddedRows::kQuery, at, call.d_strides.q);
  of.d_k = RowsFrom(call.d_k, whole, PaddedRows::kKey, at, call.d_strides.k);
  of.d_v = RowsFrom(call.d_v, whole, PaddedRows::kValue, at, call.d_strides.v);
  of.mask_bits = MaskOf(whole, call.mask_bits, at.entries);
  return of;
}

std::byte* PaddedRows::Take(const cuda::RowShape& shape) {
  std::byte* place = next_;
  next_ += CopyBytes(shape);
  return place;
}

const void* PaddedRows::In(const void* tensor, Kind kind) {
  const cuda::RowShape shape = ShapeOf(problem_, kind);
  if (IsWhole(shape)) return tensor;
  std::byte* padded = Take(shape);
  device_.SetZero(padded, shape.padded_bytes());
  device_.CopyColumns(Units(tensor), {shape.dim, 0}, Units(static_cast<void*>(padded)),
                      {cuda::PaddedDim(shape.dim), 0}, false, shape.rows(), shape.dim);
  return padded;
}

void* PaddedRows::Out(void* tensor, Kind kind) {
  const cuda::RowShape shape = ShapeOf(problem_, kind);
  if (IsWhole(shape)) return tensor;
  outputs_.push_back({tensor, Take(shape), shape});
  return outputs_.back().padded;
}

void PaddedRows::Return() {
  for (const Copied& copied : outputs_) {
    device_.CopyColumns(Units(static_cast<const void*>(copied.padded)),
                        {cuda::PaddedDim(copied.shape.dim), 0}, Units(copied.tensor),
                        {copied.shape.dim, 0}, false, copied.shape.rows(), copied.shape.dim);
  }
}

}  // namespace attnd
