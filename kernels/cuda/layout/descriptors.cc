#include "kernels/cuda/layout/descriptors.h"

#include <algorithm>
#include <cmath>

#include "attention/dropout.h"
#include "attention/tensor_view.h"
#include "kernels/cuda/layout/class_order.h"

namespace attnd::cuda {
namespace {

int32_t Clamp(int64_t keys) {
  return static_cast<int32_t>(std::clamp<int64_t>(keys, -kUnboundedKeys, kUnboundedKeys));
}

BroadcastTensor Broadcast(const BroadcastShape& s, int64_t row_units) {
  BroadcastTensor t = {};
  t.row = s.rows == 1 ? 0 : row_units;
  t.head = s.heads == 1 ? 0 : s.rows * row_units;
  t.batch = s.batch == 1 ? 0 : s.heads * s.rows * row_units;
  t.column = s.columns == 1 ? 0 : 1;
  return t;
}

// A device address plus elements, as the pointer that a descriptor holds.
template <class T>
T* At(uint64_t arena, int64_t offset, int64_t elements = 0) {
  return reinterpret_cast<T*>(arena + static_cast<uint64_t>(offset) +
                              static_cast<uint64_t>(elements) * sizeof(T));
}

// The first row of head `head` of a part, in the padded tensor at `offset`. `stride`: from row to
// row, where these are columns of wider ones, else 0.
RowTensor Rows(const RowShape& shape, uint64_t arena, int64_t offset, int64_t batch, int64_t head,
               int64_t stride = 0) {
  TensorStrides strides = shape.PaddedStrides();
  if (stride != 0) {
    strides.batch = strides.batch / strides.row * stride;
    strides.row = stride;
  }
  return {At<uint16_t>(arena, offset, strides.Row(batch, head, 0)), strides.batch, strides.head,
          strides.row};
}

int32_t DenominatorCodeOf(DenominatorKind kind) {
  switch (kind) {
    case DenominatorKind::kSoftmax:
      return kDenominatorSoftmax;
    case DenominatorKind::kZeroRest:
      return kDenominatorZeroRest;
    case DenominatorKind::kSink:
      return kDenominatorSink;
  }
  return kDenominatorSoftmax;
}

// Whether the call's parts are its (batch entry, KV head) pairs.
bool IsCut(const Problem& p, Travel travel) {
  if (!IsConverted(p.element, travel)) return false;
  if (!p.bias || !p.bias->want_gradient) return true;
  return p.bias->shape.batch == p.batch && p.bias->shape.heads == p.q_heads;
}

int64_t LseBatchStride(const Problem& p) { return IsPacked(p.layout) ? 0 : p.q_heads * p.q_len; }

// Where a part begins in the call's tensors.
struct Origin {
  int64_t batch;  // of the dense tensors' batch stride; 0 in packed layouts
  int64_t entry;  // batch entry or sequence
  int64_t q_head, kv_head;
  int64_t block = 0;         // `entry`, or the class's number in the call
  int64_t row = 0, key = 0;  // the first of each,
  int64_t step = 1;          // from one to the next
  int64_t lse_row = 0;       // where its rows stand in what has lse's shape
};
Origin OriginOf(const Problem& p, const Part& part) {
  Origin from = {IsPacked(p.layout) ? 0 : part.batch_begin, part.batch_begin,
                 part.kv_head_begin * p.group_size(), part.kv_head_begin, part.batch_begin};
  if (!part.classes) return from;
  const Sequence whole = p.SequenceAt(part.batch_begin);
  const Sequence own = part.classes->ClassAt(whole, part.residue);
  from.block = part.batch_begin * ClassCount(p, part.classes) + part.residue;
  from.row = own.q_len > 0 ? own.q_begin : 0;
  from.key = own.kv_len > 0 ? own.kv_begin : 0;
  from.step = part.classes->p;
  from.lse_row = whole.q_begin + RowsBefore(whole.q_len, part.classes->p, part.residue);
  return from;
}

// The same tensor from its row `first` on, every `step`-th.
RowTensor Every(RowTensor rows, int64_t first, int64_t step) {
  rows.data = static_cast<uint16_t*>(rows.data) + first * rows.row_stride;
  rows.row_stride *= step;
  return rows;
}

void DescribeScores(const CallLayout& at, const Origin& from, uint64_t arena, ProblemDesc& desc) {
  const Problem& p = *at.problem;
  desc.softcap = p.softcap;
  if (at.mask_lists.bytes > 0) {
    desc.tile_lists = ListsAt(at.mask_lists, arena + static_cast<uint64_t>(at.tile_lists),
                              from.entry, from.q_head);
  }
  if (p.bool_mask.has_value()) {
    const BroadcastShape& shape = p.bool_mask->shape;
    const BroadcastTensor mask = Broadcast(shape, p.bool_mask->row_bytes());
    desc.mask = {nullptr,
                 mask.batch,
                 mask.head,
                 mask.row,
                 static_cast<int32_t>(shape.rows),
                 static_cast<int32_t>(shape.columns)};
    desc.mask.data = At<uint8_t>(arena, at.mask, from.entry * mask.batch + from.q_head * mask.head);
  }
  if (p.bias.has_value()) {
    desc.bias = Broadcast(p.bias->shape, p.bias->shape.columns);
    int64_t first = from.entry * desc.bias.batch + from.q_head * desc.bias.head;
    desc.bias.data = At<uint8_t>(arena, at.bias, first * ElementBytes(p.bias->element));
    desc.bias.element = BiasCode(p.bias->element);
    desc.bias.has_pairs = ElementBytes(p.bias->element) == 2 && p.bias->shape.columns % 2 == 0;
    if (at.d_bias >= 0) desc.d_bias = At<float>(arena, at.d_bias, first);
  }
  if (!p.alibi_slopes.empty()) {
    desc.alibi_batch = static_cast<int64_t>(p.alibi_slopes.size()) == p.q_heads ? 0 : p.q_heads;
    desc.alibi_slopes = At<float>(arena, at.alibi, from.entry * desc.alibi_batch + from.q_head);
  }
  if (p.bias.has_value()) {
    desc.bias_rows = p.bias->shape.rows;
    desc.bias_columns = p.bias->shape.columns;
  }
  desc.denominator = DenominatorCodeOf(p.denominator);
  if (at.sink >= 0) desc.sink_logits = At<float>(arena, at.sink, from.q_head);
  if (at.d_sink >= 0) {
    desc.d_sink = At<float>(arena, at.d_sink, from.entry * p.q_heads + from.q_head);
  }
}

void DescribeDropout(const Problem& p, const Origin& from, ProblemDesc& desc) {
  DropoutStream stream = MakeDropoutStream(p.dropout.seed, p.dropout.offset, 0);
  desc.dropout_threshold = p.dropout.threshold;
  desc.dropout_scale = DropoutScale(p.dropout.threshold);
  desc.dropout_key_lo = stream.key_lo;
  desc.dropout_key_hi = stream.key_hi;
  desc.dropout_offset_lo = stream.offset_lo;
  desc.dropout_head = p.DropoutHeadIndex(from.entry, from.q_head);
  desc.dropout_batch = p.DropoutHeadIndex(1, 0) - p.DropoutHeadIndex(0, 0);
}

void DescribeGradients(const CallLayout& at, const Origin& from, uint64_t arena,
                       ProblemDesc& desc) {
  const Problem& p = *at.problem;
  int64_t lse = from.batch * desc.lse_batch + from.q_head * desc.lse_head + from.lse_row;
  desc.d_o =
      Every(Rows(OutputRows(p), arena, at.d_o, from.batch, from.q_head), from.row, from.step);
  const RowStrides& strides = at.d_strides;
  desc.d_q = Every(Rows(QueryRows(p), arena, at.d_q, from.batch, from.q_head, strides.q), from.row,
                   from.step);
  desc.d_k = Every(Rows(KeyRows(p), arena, at.d_k, from.batch, from.kv_head, strides.k), from.key,
                   from.step);
  desc.d_v = Every(Rows(ValueRows(p), arena, at.d_v, from.batch, from.kv_head, strides.v), from.key,
                   from.step);
  desc.delta = At<float>(arena, at.delta, lse);
  if (at.d_lse >= 0) desc.d_lse = At<float>(arena, at.d_lse, lse);
  int64_t head = from.block * p.q_heads + from.q_head;
  desc.dq_sums = At<float>(arena, at.dq_sums, head * at.dq_head);
  desc.dq_head = at.dq_head;
  desc.dq_block = at.dq_block;
  desc.dq_rest = at.dq_rest;
  desc.dq_rests_by_row = at.dq_rests_by_row;
  desc.dq_bits = !at.dq_is_integer ? 0 : p.accumulate == AccumulateType::kFloat16 ? 28 : 30;
  desc.dq_non_finite = At<uint32_t>(arena, at.dq_non_finite, head * at.non_finite_head);
  desc.non_finite_head = at.non_finite_head;
  desc.stabilizer = At<float>(arena, at.stabilizer, lse);
  desc.dq_factor = At<float>(arena, at.dq_factor, lse);
  desc.gradient_bounds =
      At<uint32_t>(arena, at.gradient_bounds,
                   (from.block * p.kv_heads + from.kv_head) * int64_t{kGradientBoundWords});
  desc.gains = At<int32_t>(arena, at.gains, head * at.gains_head);
  desc.gains_head = at.gains_head;
  desc.key_sizes = At<uint32_t>(
      arena, at.key_sizes, (from.block * p.kv_heads + from.kv_head) * KeySizeWords(at.most_keys));
  desc.most_keys = at.most_keys;
}

// Gradients of the scaled problem times these are those of the call: with L' = L·2^−(d_o + v),
// dX = dX'·2^(d_o + v − x) and dV = dV'·2^d_o.
void DescribeGradientElement(const Problem& p, const Exponents& exponents, ProblemDesc& desc) {
  desc.bfloat16_gradients = p.element == ElementType::kBFloat16;
  desc.d_q_exponent = exponents.d_o + exponents.v - exponents.q;
  desc.d_k_exponent = exponents.d_o + exponents.v - exponents.k;
  desc.d_v_exponent = exponents.d_o;
}

void DescribeKeptRows(const CallLayout& at, const Part& part, const Origin& from, uint64_t arena,
                      ProblemDesc& desc) {
  const Problem& p = *at.problem;
  desc.kept_v =
      Every(Rows(ValueRows(p), arena, at.kept_v, from.batch, from.kv_head), from.key, from.step);
  desc.kept_o =
      Every(Rows(OutputRows(p), arena, at.kept_o, from.batch, from.q_head), from.row, from.step);
  desc.v_exponent = part.exponents.v;
  desc.kept_v_exponent = part.exponents.kept_v;
}

}  // namespace

int32_t BiasCode(ElementType element) {
  switch (element) {
    case ElementType::kFloat16:
      return kBiasFloat16;
    case ElementType::kBFloat16:
      return kBiasBFloat16;
    case ElementType::kFloat32:
      return kBiasFloat32;
  }
  return kBiasNone;
}

SequenceDesc DescribeSequence(const Problem& p, const Part& part, int64_t entry) {
  const int64_t batch_index = part.batch_begin + entry;
  Sequence s = p.SequenceAt(batch_index);
  if (part.classes) {
    s = part.classes->ClassAt(s, part.residue);
    s.q_begin = s.kv_begin = 0;  // where the part's tensors begin
  }
  int64_t low = p.window_left < 0 ? -kUnboundedKeys : s.offset - p.window_left;
  int64_t high = p.window_right < 0 ? kUnboundedKeys : s.offset + p.window_right;
  if (p.causal) high = std::min(high, s.offset);
  SequenceDesc desc;
  desc.q_begin = static_cast<int32_t>(s.q_begin);
  desc.q_len = static_cast<int32_t>(s.q_len);
  desc.kv_begin = static_cast<int32_t>(s.kv_begin);
  desc.kv_len = static_cast<int32_t>(s.kv_len);
  desc.low = Clamp(low);
  desc.high = Clamp(high);
  desc.diagonal = Clamp(s.offset);
  const bool alone = IsPacked(p.layout) || part.classes;
  desc.batch = alone ? 0 : static_cast<int32_t>(batch_index);
  return desc;
}

std::vector<Part> PartsOf(const Problem& p, int call, Travel travel,
                          const std::optional<ResidueClasses>& classes) {
  const bool is_cut = IsCut(p, travel);
  if (!is_cut && !classes) return {{call, 0, p.batch, 0, p.kv_heads, {}}};
  const int64_t heads = is_cut ? 1 : p.kv_heads;
  std::vector<Part> parts;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.kv_heads; h += heads) {
      for (int64_t residue = 0; residue < ClassCount(p, classes); ++residue) {
        parts.push_back({call, b, 1, h, heads, {}, classes, residue});
      }
    }
  }
  return parts;
}

std::vector<SequenceDesc> SequencesOf(const Problem& p, Travel travel,
                                      const std::optional<ResidueClasses>& classes) {
  std::vector<SequenceDesc> sequences;
  Part part = {.classes = classes};
  for (; part.batch_begin < p.batch; ++part.batch_begin) {
    for (part.residue = 0; part.residue < ClassCount(p, classes); ++part.residue) {
      sequences.push_back(DescribeSequence(p, part, 0));
      if (IsCut(p, travel)) sequences.back().batch = 0;  // parts of one entry
    }
  }
  return sequences;
}

RowsBox BoxOf(const Problem& p, const Part& part, const ProblemDesc& desc, int map, int box_rows) {
  const bool is_q = map == kMapOfQ || map == kMapOfDo;
  const RowTensor& t = map == kMapOfQ   ? desc.q
                       : map == kMapOfK ? desc.k
                       : map == kMapOfV ? desc.v
                                        : desc.d_o;
  const int bytes = 2;  // of an element
  int64_t rows = is_q ? p.q_len : p.kv_len;
  if (part.classes) {
    const SequenceDesc own = DescribeSequence(p, part, 0);
    rows = std::max(1, is_q ? own.q_len : own.kv_len);  // of none, no tile loads any
  }
  return {.address = reinterpret_cast<uint64_t>(t.data),
          .columns = (map == kMapOfV || map == kMapOfDo ? desc.v_chunks : desc.qk_chunks) * kChunk,
          .rows = rows,
          .heads = is_q ? desc.q_heads : desc.kv_heads,
          .entries = IsPacked(p.layout) || part.classes ? 1 : desc.batch_count,
          .row_bytes = t.row_stride * bytes,
          .head_bytes = t.head * bytes,
          .entry_bytes = t.batch * bytes,
          .box_rows = box_rows};
}

namespace {

// Returns the scale of scores whose operands were divided by powers of two. A number that float32
// cannot hold is no score: 2^±126 keep what is hidden from becoming NaN.
double ScaleOf(const Problem& p, const Exponents& exponents) {
  const double own = double{p.ResolvedScale()};
  if (exponents.q + exponents.k == 0 || own == 0) return own;
  const double scale = std::ldexp(own, exponents.q + exponents.k);
  return std::copysign(std::clamp(std::fabs(scale), 0x1p-126, 0x1p126), scale);
}

}  // namespace

ProblemDesc Describe(const CallLayout& at, const Part& part, uint64_t arena) {
  const Problem& p = *at.problem;
  const Origin from = OriginOf(p, part);
  ProblemDesc desc = {};
  desc.q = Every(Rows(QueryRows(p), arena, at.q, from.batch, from.q_head, at.strides.q), from.row,
                 from.step);
  desc.k = Every(Rows(KeyRows(p), arena, at.k, from.batch, from.kv_head, at.strides.k), from.key,
                 from.step);
  desc.v = Every(Rows(ValueRows(p), arena, at.v, from.batch, from.kv_head, at.strides.v), from.key,
                 from.step);
  desc.o = Every(Rows(OutputRows(p), arena, at.o, from.batch, from.q_head), from.row, from.step);
  desc.lse_batch = LseBatchStride(p);
  desc.lse_head = p.q_len;
  desc.lse = At<float>(arena, at.lse,
                       from.batch * desc.lse_batch + from.q_head * desc.lse_head + from.lse_row);
  desc.sequences = At<SequenceDesc>(arena, at.sequences, from.block);
  desc.batch_count = static_cast<int32_t>(part.batches);
  desc.kv_heads = static_cast<int32_t>(part.kv_heads);
  desc.group = static_cast<int32_t>(p.group_size());
  desc.q_heads = desc.kv_heads * desc.group;
  desc.qk_chunks = static_cast<int32_t>(PaddedDim(QueryRows(p).dim) / kChunk);
  desc.v_chunks = static_cast<int32_t>(PaddedDim(ValueRows(p).dim) / kChunk);
  const double scale = ScaleOf(p, part.exponents);
  desc.scale = static_cast<float>(scale);
  desc.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
  DescribeScores(at, from, arena, desc);
  DescribeDropout(p, from, desc);
  if (at.keeps_rows) DescribeKeptRows(at, part, from, arena, desc);
  if (p.element == ElementType::kFloat32) desc.v_exponent = part.exponents.v;
  if (at.delta >= 0) {
    DescribeGradients(at, from, arena, desc);
    DescribeGradientElement(p, part.exponents, desc);
  }
  return desc;
}

}  // namespace attnd::cuda
