#include "kernels/engine/layout/launch_layout.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "attention/dropout.h"
#include "attention/score_rule.h"
#include "attention/tensor_view.h"
#include "base/round_up.h"

namespace attnd::cuda {
namespace {

int64_t Tiles(int64_t length, int64_t rows) { return (length + rows - 1) / rows; }

// Lines and tiles of one (batch entry, head) of a mask; one where its dimension is broadcast.
struct ListShape {
  int64_t lines, tiles;
  ListShape(const BroadcastShape& mask, const MaskTiling& tiling)
      : lines(Tiles(mask.rows, tiling.rows)), tiles(Tiles(mask.columns, tiling.keys)) {
    if (tiling.by_keys) std::swap(lines, tiles);
  }
  int64_t line_numbers() const { return 2 * tiles + 1; }
};

int32_t Clamp(int64_t keys) {
  return static_cast<int32_t>(std::clamp<int64_t>(keys, -kUnboundedKeys, kUnboundedKeys));
}

SequenceDesc DescribeSequence(const Problem& p, int64_t batch_index) {
  Sequence s = p.SequenceAt(batch_index);
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
  desc.batch = IsPacked(p.layout) ? 0 : static_cast<int32_t>(batch_index);
  return desc;
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

// The first row of head `head` of a part, in the padded tensor at `offset`.
RowTensor Rows(const RowShape& shape, uint64_t arena, int64_t offset, int64_t batch, int64_t head) {
  TensorStrides strides = shape.PaddedStrides();
  return {At<uint16_t>(arena, offset, strides.Row(batch, head, 0)), strides.batch, strides.head,
          strides.row};
}

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
bool IsCut(const Problem& p) {
  if (p.element != ElementType::kBFloat16) return false;
  if (!p.bias || !p.bias->want_gradient) return true;
  return p.bias->shape.batch == p.batch && p.bias->shape.heads == p.q_heads;
}

int64_t LseBatchStride(const Problem& p) { return IsPacked(p.layout) ? 0 : p.q_heads * p.q_len; }

// Where a part begins in the call's tensors.
struct Origin {
  int64_t batch;  // of the dense tensors' batch stride; 0 in packed layouts
  int64_t entry;  // batch entry or sequence
  int64_t q_head, kv_head;
};
Origin OriginOf(const Problem& p, const Part& part) {
  return {IsPacked(p.layout) ? 0 : part.batch_begin, part.batch_begin,
          part.kv_head_begin * p.group_size(), part.kv_head_begin};
}

void DescribeScores(const CallLayout& at, const Origin& from, uint64_t arena, ProblemDesc& desc) {
  const Problem& p = *at.problem;
  desc.softcap = p.softcap;
  if (at.tile_lists >= 0) {
    desc.tile_lists = at.lists;
    desc.tile_lists.data = At<uint16_t>(arena, at.tile_lists,
                                        from.entry * at.lists.batch + from.q_head * at.lists.head);
  }
  if (p.bool_mask.has_value()) {
    desc.mask = Broadcast(p.bool_mask->shape, p.bool_mask->row_bytes());
    desc.mask.data =
        At<uint8_t>(arena, at.mask, from.entry * desc.mask.batch + from.q_head * desc.mask.head);
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
  int64_t lse = from.batch * desc.lse_batch + from.q_head * desc.lse_head;
  desc.d_o = Rows(OutputRows(p), arena, at.d_o, from.batch, from.q_head);
  desc.d_q = Rows(QueryRows(p), arena, at.d_q, from.batch, from.q_head);
  desc.d_k = Rows(KeyRows(p), arena, at.d_k, from.batch, from.kv_head);
  desc.d_v = Rows(ValueRows(p), arena, at.d_v, from.batch, from.kv_head);
  desc.delta = At<float>(arena, at.delta, lse);
  if (at.d_lse >= 0) desc.d_lse = At<float>(arena, at.d_lse, lse);
  int64_t head = from.entry * p.q_heads + from.q_head;
  desc.dq_sums = At<float>(arena, at.dq_sums, head * at.dq_head);
  desc.dq_head = at.dq_head;
  desc.dq_rest = at.dq_rest;
  desc.dq_non_finite = At<uint32_t>(arena, at.dq_non_finite, head * at.non_finite_head);
  desc.non_finite_head = at.non_finite_head;
  desc.stabilizer = At<float>(arena, at.stabilizer, lse);
  desc.dq_factor = At<float>(arena, at.dq_factor, lse);
  desc.gradient_bounds =
      At<uint32_t>(arena, at.gradient_bounds,
                   (from.entry * p.kv_heads + from.kv_head) * int64_t{kGradientBoundWords});
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
  desc.kept_v = Rows(ValueRows(p), arena, at.kept_v, from.batch, from.kv_head);
  desc.kept_o = Rows(OutputRows(p), arena, at.kept_o, from.batch, from.q_head);
  desc.v_exponent = part.exponents.v;
  desc.kept_v_exponent = part.exponents.kept_v;
}

std::vector<TileWork> MostWorkFirst(std::vector<std::pair<int64_t, TileWork>> tiles) {
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<TileWork> ordered;
  ordered.reserve(tiles.size());
  for (const auto& [keys, tile] : tiles) ordered.push_back(tile);
  return ordered;
}

// Calls visit(part index, entry within the part, query head within the part, its sequence).
template <class Visit>
void ForEachQueryHead(absl::Span<const Problem* const> problems, absl::Span<const Part> parts,
                      const Visit& visit) {
  for (size_t n = 0; n < parts.size(); ++n) {
    const Problem& p = *problems[parts[n].call];
    for (int64_t b = 0; b < parts[n].batches; ++b) {
      SequenceDesc sequence = DescribeSequence(p, parts[n].batch_begin + b);
      for (int64_t h = 0; h < parts[n].kv_heads * p.group_size(); ++h) {
        visit(static_cast<int32_t>(n), static_cast<int32_t>(b), static_cast<int32_t>(h), sequence);
      }
    }
  }
}

}  // namespace

int64_t ArenaLayout::Add(std::string name, int64_t bytes, RegionUse use) {
  int64_t offset = bytes_;
  bytes_ += RoundUp(bytes, kRegionAlignment);
  regions_.push_back({std::move(name), offset, bytes, use});
  return offset;
}

RowShape QueryRows(const Problem& p) {
  return {p.layout, p.batch, p.q_heads, p.q_len, p.qk_head_dim};
}
RowShape KeyRows(const Problem& p) {
  return {p.layout, p.batch, p.kv_heads, p.kv_len, p.qk_head_dim};
}
RowShape ValueRows(const Problem& p) {
  return {p.layout, p.batch, p.kv_heads, p.kv_len, p.v_head_dim};
}
RowShape OutputRows(const Problem& p) {
  return {p.layout, p.batch, p.q_heads, p.q_len, p.v_head_dim};
}

namespace {

CallLayout LayOutTensors(const Problem& p, RegionUse values, RegionUse results,
                         ArenaLayout& arena) {
  CallLayout at;
  at.problem = &p;
  if (p.bool_mask) at.mask = arena.Add("mask", p.bool_mask->bytes(), RegionUse::kInput);
  if (p.bias) {
    at.bias = arena.Add("bias", p.bias->shape.elements() * ElementBytes(p.bias->element),
                        RegionUse::kInput);
  }
  at.k = arena.Add("k", KeyRows(p).padded_bytes(), RegionUse::kInput);
  at.v = arena.Add("v", ValueRows(p).padded_bytes(), values);
  at.q = arena.Add("q", QueryRows(p).padded_bytes(), RegionUse::kInput);
  at.lse = arena.Add("lse", p.LseElements() * 4, results);
  at.o = arena.Add("o", OutputRows(p).padded_bytes(), results);
  return at;
}

}  // namespace

CallLayout LayOutTensors(const Problem& p, RegionUse results, ArenaLayout& arena) {
  return LayOutTensors(p, RegionUse::kInput, results, arena);
}

CallLayout LayOutKeptTensors(const Problem& p, ArenaLayout& kept, ArenaLayout& arena) {
  if (p.element != ElementType::kBFloat16) return LayOutTensors(p, RegionUse::kOutput, kept);
  CallLayout at = LayOutTensors(p, /*values=*/RegionUse::kOutput, RegionUse::kOutput, kept);
  at.keeps_rows = true;
  at.kept_v = at.v;
  at.kept_o = at.o;
  at.v = arena.Add("v", ValueRows(p).padded_bytes(), RegionUse::kInput);
  at.o = arena.Add("o", OutputRows(p).padded_bytes(), RegionUse::kOutput);
  return at;
}

void PlaceOutside(CallLayout& at, int64_t shift) {
  int64_t& v = at.keeps_rows ? at.kept_v : at.v;
  int64_t& o = at.keeps_rows ? at.kept_o : at.o;
  for (int64_t* offset : {&at.mask, &at.bias, &at.k, &v, &at.q, &at.lse, &o}) {
    if (*offset >= 0) *offset += shift;
  }
}

void LayOutGradients(CallLayout& at, int tile_head_dim, bool dq_rest, ArenaLayout& arena) {
  const Problem& p = *at.problem;
  at.d_o = arena.Add("d_o", OutputRows(p).padded_bytes(), RegionUse::kInput);
  at.d_lse = arena.Add("d_lse", p.LseElements() * 4, RegionUse::kInput);
  // Kernels do not visit keys beyond a key length: their gradients are zero.
  const RegionUse keys = p.kv_lengths.empty() ? RegionUse::kOutput : RegionUse::kZeroed;
  at.d_k = arena.Add("d_k", KeyRows(p).padded_bytes(), keys);
  at.d_v = arena.Add("d_v", ValueRows(p).padded_bytes(), keys);
  at.d_q = arena.Add("d_q", QueryRows(p).padded_bytes(), RegionUse::kOutput);
  if (p.bias && p.bias->want_gradient) {
    at.d_bias = arena.Add("d_bias", p.bias->shape.elements() * 4, RegionUse::kZeroed);
  }
  if (p.denominator == DenominatorKind::kSink) {
    at.d_sink = arena.Add("d_sink", p.batch * p.q_heads * 4, RegionUse::kZeroed);
  }
  at.dq_head = DqSumFloats(p.MaxQueryLength(), tile_head_dim);
  at.non_finite_head = at.dq_head / 32;
  int64_t heads = p.batch * p.q_heads;
  if (dq_rest) at.dq_rest = heads * at.dq_head;
  at.dq_sums = arena.Add("dq_sums", (heads * at.dq_head + at.dq_rest) * 4, RegionUse::kZeroed);
  at.dq_non_finite = arena.Add("dq_non_finite", heads * at.non_finite_head * 4, RegionUse::kZeroed);
  at.gradient_bounds =
      arena.Add("gradient_bounds", p.batch * p.kv_heads * int64_t{kGradientBoundWords} * 4,
                RegionUse::kZeroed);
  at.delta = arena.Add("delta", p.LseElements() * 4, RegionUse::kOutput);
  at.stabilizer = arena.Add("stabilizer", p.LseElements() * 4, RegionUse::kOutput);
  at.dq_factor = arena.Add("dq_factor", p.LseElements() * 4, RegionUse::kOutput);
}

void LayOutTileLists(CallLayout& at, const MaskTiling& tiling, ArenaLayout& arena) {
  if (!at.problem->bool_mask) return;
  const BroadcastShape& mask = at.problem->bool_mask->shape;
  const ListShape shape(mask, tiling);
  const int64_t head = shape.lines * shape.line_numbers();
  at.lists.line = shape.lines == 1 ? 0 : shape.line_numbers();
  at.lists.head = mask.heads == 1 ? 0 : head;
  at.lists.batch = mask.batch == 1 ? 0 : mask.heads * head;
  at.lists.tiles = static_cast<int32_t>(shape.tiles);
  at.lists.tile_rows = tiling.rows;
  at.lists.tile_keys = tiling.keys;
  at.lists.mask_rows = static_cast<int32_t>(mask.rows);
  at.lists.mask_columns = static_cast<int32_t>(mask.columns);
  // Zeroed, since a list's first tile may be read where there is none.
  at.tile_lists = arena.Add(
      "tile_lists", mask.batch * mask.heads * head * int64_t{sizeof(uint16_t)}, RegionUse::kZeroed);
}

void LayOutConstants(CallLayout& at, ArenaLayout& arena) {
  const Problem& p = *at.problem;
  if (!p.alibi_slopes.empty()) {
    at.alibi =
        arena.Add("alibi", static_cast<int64_t>(p.alibi_slopes.size()) * 4, RegionUse::kInput);
  }
  if (p.denominator == DenominatorKind::kSink) {
    at.sink = arena.Add("sink", p.q_heads * 4, RegionUse::kInput);
  }
  at.sequences = arena.Add("sequences", p.batch * static_cast<int64_t>(sizeof(SequenceDesc)),
                           RegionUse::kInput);
}

std::vector<Part> PartsOf(const Problem& p, int call) {
  if (!IsCut(p)) return {{call, 0, p.batch, 0, p.kv_heads, {}}};
  std::vector<Part> parts;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.kv_heads; ++h) parts.push_back({call, b, 1, h, 1, {}});
  }
  return parts;
}

std::vector<SequenceDesc> SequencesOf(const Problem& p) {
  std::vector<SequenceDesc> sequences;
  for (int64_t b = 0; b < p.batch; ++b) {
    sequences.push_back(DescribeSequence(p, b));
    if (IsCut(p)) sequences.back().batch = 0;  // parts of one entry
  }
  return sequences;
}

ProblemDesc Describe(const CallLayout& at, const Part& part, uint64_t arena) {
  const Problem& p = *at.problem;
  const Origin from = OriginOf(p, part);
  ProblemDesc desc = {};
  desc.q = Rows(QueryRows(p), arena, at.q, from.batch, from.q_head);
  desc.k = Rows(KeyRows(p), arena, at.k, from.batch, from.kv_head);
  desc.v = Rows(ValueRows(p), arena, at.v, from.batch, from.kv_head);
  desc.o = Rows(OutputRows(p), arena, at.o, from.batch, from.q_head);
  desc.lse_batch = LseBatchStride(p);
  desc.lse_head = p.q_len;
  desc.lse = At<float>(arena, at.lse, from.batch * desc.lse_batch + from.q_head * desc.lse_head);
  desc.sequences = At<SequenceDesc>(arena, at.sequences, part.batch_begin);
  desc.batch_count = static_cast<int32_t>(part.batches);
  desc.kv_heads = static_cast<int32_t>(part.kv_heads);
  desc.group = static_cast<int32_t>(p.group_size());
  desc.q_heads = desc.kv_heads * desc.group;
  desc.qk_chunks = static_cast<int32_t>(PaddedDim(p.qk_head_dim) / kChunk);
  desc.v_chunks = static_cast<int32_t>(PaddedDim(p.v_head_dim) / kChunk);
  double scale = std::ldexp(double{p.ResolvedScale()}, part.exponents.q + part.exponents.k);
  desc.scale = static_cast<float>(scale);
  desc.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
  DescribeScores(at, from, arena, desc);
  DescribeDropout(p, from, desc);
  if (at.keeps_rows) DescribeKeptRows(at, part, from, arena, desc);
  if (at.d_o >= 0) {
    DescribeGradients(at, from, arena, desc);
    DescribeGradientElement(p, part.exponents, desc);
  }
  return desc;
}

std::vector<TileWork> ForwardTiles(absl::Span<const Problem* const> problems,
                                   absl::Span<const Part> parts, int q_rows) {
  std::vector<std::pair<int64_t, TileWork>> tiles;  // keys to visit, tile
  ForEachQueryHead(problems, parts, [&](int32_t n, int32_t b, int32_t h, const SequenceDesc& s) {
    Visibility visibility = {s.q_len, s.kv_len, s.low, s.high};
    for (int32_t tile = 0; tile < Tiles(s.q_len, q_rows); ++tile) {
      int begin = tile * q_rows, end = std::min(begin + q_rows, s.q_len);
      Range keys = VisibleKeys(visibility, begin, end);
      tiles.push_back({std::max(0, keys.end - keys.begin), {n, b, h, tile}});
    }
  });
  return MostWorkFirst(std::move(tiles));
}

std::vector<TileWork> BackwardTiles(absl::Span<const Problem* const> problems,
                                    absl::Span<const Part> parts, int kv_rows) {
  std::vector<std::pair<int64_t, TileWork>> tiles;  // rows to visit, tile
  for (size_t n = 0; n < parts.size(); ++n) {
    const Problem& p = *problems[parts[n].call];
    for (int64_t b = 0; b < parts[n].batches; ++b) {
      SequenceDesc s = DescribeSequence(p, parts[n].batch_begin + b);
      Visibility visibility = {s.q_len, s.kv_len, s.low, s.high};
      for (int64_t h = 0; h < parts[n].kv_heads; ++h) {
        for (int32_t at = 0; at < Tiles(s.kv_len, kv_rows); ++at) {
          int begin = at * kv_rows;
          int end = std::min(begin + kv_rows, s.kv_len);
          Range rows = RowsThatSee(visibility, begin, end);
          tiles.push_back(
              {std::max(0, rows.end - rows.begin) * p.group_size(),
               {static_cast<int32_t>(n), static_cast<int32_t>(b), static_cast<int32_t>(h), at}});
        }
      }
    }
  }
  return MostWorkFirst(std::move(tiles));
}

std::vector<TileWork> HeadTiles(absl::Span<const Problem* const> problems,
                                absl::Span<const Part> parts) {
  std::vector<TileWork> tiles;
  ForEachQueryHead(problems, parts, [&](int32_t n, int32_t b, int32_t h, const SequenceDesc&) {
    tiles.push_back({n, b, h, 0});
  });
  return tiles;
}

std::vector<TileWork> BiasTiles(absl::Span<const Problem* const> problems,
                                absl::Span<const Part> parts) {
  constexpr int64_t kEdge = 16;
  std::vector<TileWork> tiles;
  for (size_t n = 0; n < parts.size(); ++n) {
    const Problem& p = *problems[parts[n].call];
    if (!p.bias || !p.bias->want_gradient) continue;
    const BroadcastShape& shape = p.bias->shape;
    const int64_t batches = shape.batch == 1 ? 1 : parts[n].batches;
    const int64_t heads = shape.heads == 1 ? 1 : parts[n].kv_heads * p.group_size();
    const int64_t count = Tiles(shape.rows, kEdge) * Tiles(shape.columns, kEdge);
    for (int64_t b = 0; b < batches; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t tile = 0; tile < count; ++tile) {
          tiles.push_back({static_cast<int32_t>(n), static_cast<int32_t>(b),
                           static_cast<int32_t>(h), static_cast<int32_t>(tile)});
        }
      }
    }
  }
  return tiles;
}

std::vector<TileWork> KeepRowsTiles(absl::Span<const CallLayout> layouts,
                                    absl::Span<const Part> parts) {
  std::vector<TileWork> tiles;
  for (size_t n = 0; n < parts.size(); ++n) {
    const CallLayout& at = layouts[parts[n].call];
    if (!at.keeps_rows) continue;
    const int64_t q_heads = parts[n].kv_heads * at.problem->group_size();
    for (int64_t b = 0; b < parts[n].batches; ++b) {
      const SequenceDesc s = DescribeSequence(*at.problem, parts[n].batch_begin + b);
      for (int64_t h = 0; h < q_heads + parts[n].kv_heads; ++h) {
        for (int32_t tile = 0; tile < DqBlocks(h < q_heads ? s.q_len : s.kv_len); ++tile) {
          tiles.push_back(
              {static_cast<int32_t>(n), static_cast<int32_t>(b), static_cast<int32_t>(h), tile});
        }
      }
    }
  }
  return tiles;
}

std::vector<TileWork> MaskLineTiles(absl::Span<const Problem* const> problems,
                                    absl::Span<const Part> parts, const MaskTiling& tiling) {
  std::vector<TileWork> tiles;
  for (size_t n = 0; n < parts.size(); ++n) {
    const Part& part = parts[n];
    const Problem& p = *problems[part.call];
    if (!p.bool_mask) continue;
    const BroadcastShape& mask = p.bool_mask->shape;
    // What is shared belongs to the first part.
    const bool is_first_entry = part.batch_begin == 0, is_first_head = part.kv_head_begin == 0;
    if ((mask.batch == 1 && !is_first_entry) || (mask.heads == 1 && !is_first_head)) continue;
    const int64_t batches = mask.batch == 1 ? 1 : part.batches;
    const int64_t heads = mask.heads == 1 ? 1 : part.kv_heads * p.group_size();
    const int64_t lines = ListShape(mask, tiling).lines;
    for (int64_t b = 0; b < batches; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t line = 0; line < lines; ++line) {
          tiles.push_back({static_cast<int32_t>(n), static_cast<int32_t>(b),
                           static_cast<int32_t>(h), static_cast<int32_t>(line)});
        }
      }
    }
  }
  return tiles;
}

int64_t MaskLineCount(const Problem& p, const MaskTiling& tiling) {
  if (!p.bool_mask) return 0;
  const BroadcastShape& mask = p.bool_mask->shape;
  return mask.batch * mask.heads * ListShape(mask, tiling).lines;
}

std::vector<TileWork> RowBlockTiles(absl::Span<const Problem* const> problems,
                                    absl::Span<const Part> parts) {
  std::vector<TileWork> tiles;
  ForEachQueryHead(problems, parts, [&](int32_t n, int32_t b, int32_t h, const SequenceDesc& s) {
    for (int32_t tile = 0; tile < DqBlocks(s.q_len); ++tile) tiles.push_back({n, b, h, tile});
  });
  return tiles;
}

}  // namespace attnd::cuda
