#include "kernels/cuda/layout/launch_layout.h"

#include <algorithm>
#include <utility>

#include "base/round_up.h"

namespace attnd::cuda {
int64_t ArenaLayout::Add(std::string name, int64_t bytes, RegionUse use) {
  int64_t offset = bytes_;
  bytes_ += RoundUp(bytes, kRegionAlignment);
  regions_.push_back({std::move(name), offset, bytes, use});
  return offset;
}

int64_t ClassCount(const Problem& p, const std::optional<ResidueClasses>& classes) {
  return classes ? std::max<int64_t>(1, std::min(classes->p, p.MaxQueryLength())) : 1;
}

RowShape QueryRows(const Problem& p) {
  return {p.layout, p.batch, p.q_heads, p.q_len, p.qk_head_dim * UnitsOf(p.element)};
}
RowShape KeyRows(const Problem& p) {
  return {p.layout, p.batch, p.kv_heads, p.kv_len, p.qk_head_dim * UnitsOf(p.element)};
}
RowShape ValueRows(const Problem& p) {
  return {p.layout, p.batch, p.kv_heads, p.kv_len, p.v_head_dim * UnitsOf(p.element)};
}
RowShape OutputRows(const Problem& p) {
  return {p.layout, p.batch, p.q_heads, p.q_len, p.v_head_dim * UnitsOf(p.element)};
}

namespace {

void LayOutMaskAndBias(const Problem& p, CallLayout& at, ArenaLayout& arena) {
  if (p.bool_mask) at.mask = arena.Add("mask", p.bool_mask->bytes(), RegionUse::kInput);
  if (p.bias) {
    at.bias = arena.Add("bias", p.bias->shape.elements() * ElementBytes(p.bias->element),
                        RegionUse::kInput);
  }
}

CallLayout LayOut(const Problem& p, RegionUse values, RegionUse results, ArenaLayout& arena) {
  CallLayout at;
  at.problem = &p;
  LayOutMaskAndBias(p, at, arena);
  at.k = arena.Add("k", KeyRows(p).padded_bytes(), RegionUse::kInput);
  at.v = arena.Add("v", ValueRows(p).padded_bytes(), values);
  at.q = arena.Add("q", QueryRows(p).padded_bytes(), RegionUse::kInput);
  at.lse = arena.Add("lse", p.LseElements() * 4, results);
  at.o = arena.Add("o", OutputRows(p).padded_bytes(), results);
  return at;
}

}  // namespace

CallLayout LayOutTensors(const Problem& p, RegionUse results, ArenaLayout& arena, Travel travel) {
  CallLayout at = LayOut(p, RegionUse::kInput, results, arena);
  at.travel = travel;
  return at;
}

CallLayout LayOutKeptTensors(const Problem& p, ArenaLayout& kept, ArenaLayout& arena,
                             Travel travel) {
  if (p.element != ElementType::kBFloat16 || !IsConverted(p.element, travel)) {
    return LayOutTensors(p, RegionUse::kOutput, kept, travel);
  }
  CallLayout at = LayOut(p, /*values=*/RegionUse::kOutput, RegionUse::kOutput, kept);
  at.travel = travel;
  at.keeps_rows = true;
  at.kept_v = at.v;
  at.kept_o = at.o;
  at.v = arena.Add("v", ValueRows(p).padded_bytes(), RegionUse::kInput);
  at.o = arena.Add("o", OutputRows(p).padded_bytes(), RegionUse::kOutput);
  return at;
}

CallLayout LayOutElsewhere(const Problem& p, ArenaLayout& arena, Travel travel) {
  CallLayout at;
  at.problem = &p;
  at.travel = travel;
  at.is_elsewhere = true;
  LayOutMaskAndBias(p, at, arena);
  return at;
}

void PlaceTensors(CallLayout& at, const TensorAddresses& addresses, uint64_t arena) {
  const auto place = [arena](int64_t& offset, uint64_t address) {
    if (address != 0) offset = static_cast<int64_t>(address - arena);
  };
  place(at.q, addresses.q);
  place(at.k, addresses.k);
  place(at.v, addresses.v);
  place(at.o, addresses.o);
  place(at.lse, addresses.lse);
  place(at.d_o, addresses.d_o);
  place(at.d_q, addresses.d_q);
  place(at.d_k, addresses.d_k);
  place(at.d_v, addresses.d_v);
  at.d_lse = -1;  // zero
  at.strides = addresses.strides;
  at.d_strides = addresses.d_strides;
}

CallLayout LayOutScores(const Problem& p, ArenaLayout& arena, Travel travel) {
  CallLayout at;
  at.problem = &p;
  at.travel = travel;
  LayOutMaskAndBias(p, at, arena);
  at.k = arena.Add("k", KeyRows(p).padded_bytes(), RegionUse::kInput);
  at.q = arena.Add("q", QueryRows(p).padded_bytes(), RegionUse::kInput);
  at.lse = arena.Add("lse", p.LseElements() * 4, RegionUse::kInput);
  return at;
}

void PlaceOutside(CallLayout& at, int64_t shift) {
  int64_t& v = at.keeps_rows ? at.kept_v : at.v;
  int64_t& o = at.keeps_rows ? at.kept_o : at.o;
  for (int64_t* offset : {&at.mask, &at.bias, &at.k, &v, &at.q, &at.lse, &o}) {
    if (*offset >= 0) *offset += shift;
  }
}

namespace {

void LayOutOwnGradients(const Problem& p, CallLayout& at, ArenaLayout& arena) {
  // Kernels do not visit keys beyond a key length, nor those of a residue that no row has: their
  // gradients are zero.
  const bool all_keys = p.kv_lengths.empty() && !at.classes;
  const RegionUse keys = all_keys ? RegionUse::kOutput : RegionUse::kZeroed;
  at.d_k = arena.Add("d_k", KeyRows(p).padded_bytes(), keys);
  at.d_v = arena.Add("d_v", ValueRows(p).padded_bytes(), keys);
  at.d_q = arena.Add("d_q", QueryRows(p).padded_bytes(), RegionUse::kOutput);
}

}  // namespace

void LayOutGradients(CallLayout& at, const DqSums& sums, ArenaLayout& arena) {
  const Problem& p = *at.problem;
  if (!at.is_elsewhere) at.d_o = arena.Add("d_o", OutputRows(p).padded_bytes(), RegionUse::kInput);
  at.d_lse = arena.Add("d_lse", p.LseElements() * 4, RegionUse::kInput);
  if (!at.is_elsewhere) LayOutOwnGradients(p, at, arena);
  if (p.bias && p.bias->want_gradient) {
    at.d_bias = arena.Add("d_bias", p.bias->shape.elements() * 4, RegionUse::kZeroed);
  }
  if (p.denominator == DenominatorKind::kSink) {
    at.d_sink = arena.Add("d_sink", p.batch * p.q_heads * 4, RegionUse::kZeroed);
  }
  const int64_t classes = ClassCount(p, at.classes);
  at.dq_head = DqSumFloats(DivideUp(p.MaxQueryLength(), classes), sums.tile_head_dim);
  at.non_finite_head = at.dq_head / 32;
  int64_t heads = p.batch * classes * p.q_heads;
  at.dq_block = DqSumFloats(1, sums.tile_head_dim);
  at.dq_is_integer = sums.are_integers;
  at.dq_sums = arena.Add("dq_sums", heads * at.dq_head * 4,
                         sums.are_zeroed ? RegionUse::kZeroed : RegionUse::kOutput);
  if (sums.rests != DqRests::kNone) {
    at.dq_rests_by_row = sums.rests == DqRests::kByRow;
    // By row, those that are used are cleared ahead (DeltaKernel).
    const RegionUse use = at.dq_rests_by_row ? RegionUse::kOutput : RegionUse::kZeroed;
    at.dq_rest = (arena.Add("dq_rests", heads * at.dq_head * 4, use) - at.dq_sums) / 4;
  }
  at.dq_non_finite = arena.Add("dq_non_finite", heads * at.non_finite_head * 4, RegionUse::kZeroed);
  at.gradient_bounds = arena.Add("gradient_bounds",
                                 p.batch * classes * p.kv_heads * int64_t{kGradientBoundWords} * 4,
                                 RegionUse::kZeroed);
  at.gains_head = DqBlocks(DivideUp(p.MaxQueryLength(), classes));
  at.gains = arena.Add("gains", heads * at.gains_head * 4, RegionUse::kOutput);
  at.most_keys = DivideUp(DivideUp(p.MaxKeyLength(), classes), int64_t{kKeyGroup}) * kKeyGroup;
  at.key_sizes =
      arena.Add("key_sizes", p.batch * classes * p.kv_heads * KeySizeWords(at.most_keys) * 4,
                RegionUse::kOutput);
  at.delta = arena.Add("delta", p.LseElements() * 4, RegionUse::kOutput);
  at.stabilizer = arena.Add("stabilizer", p.LseElements() * 4, RegionUse::kOutput);
  at.dq_factor = arena.Add("dq_factor", p.LseElements() * 4, RegionUse::kOutput);
}

void LayOutTileLists(CallLayout& at, const MaskTiling& tiling, const CallMask* mask,
                     ArenaLayout& arena) {
  const Problem& p = *at.problem;
  if (p.bool_mask) {
    at.mask_lists = LayOutBoolMask(p.bool_mask->shape, tiling);
    at.tile_lists = arena.Add("tile_lists", at.mask_lists.bytes, RegionUse::kOutput);
  } else if (mask != nullptr && mask->compiled != nullptr) {
    at.mask_lists = mask->layout;
    if (mask->held != nullptr) return;
    at.tile_lists = arena.Add("tile_lists", at.mask_lists.bytes, RegionUse::kInput);
  }
}

void PlaceMask(CallLayout& at, int64_t offset) { at.tile_lists = offset; }

void LayOutConstants(CallLayout& at, ArenaLayout& arena) {
  const Problem& p = *at.problem;
  if (!p.alibi_slopes.empty()) {
    at.alibi =
        arena.Add("alibi", static_cast<int64_t>(p.alibi_slopes.size()) * 4, RegionUse::kInput);
  }
  if (p.denominator == DenominatorKind::kSink) {
    at.sink = arena.Add("sink", p.q_heads * 4, RegionUse::kInput);
  }
  at.sequences = arena.Add(
      "sequences", p.batch * ClassCount(p, at.classes) * static_cast<int64_t>(sizeof(SequenceDesc)),
      RegionUse::kInput);
}

}  // namespace attnd::cuda
