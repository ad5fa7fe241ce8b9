#include "kernels/cuda/transfer.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/dropout.h"
#include "base/status_macros.h"

namespace attnd::cuda {
namespace {

// How far dropout's factor may enlarge a sum, in bits.
int DropoutBits(const Problem& p) {
  return static_cast<int>(std::ceil(std::log2(DropoutScale(p.dropout.threshold))));
}
// Forward brings V to 2^14..2^15, less dropout's factor: O stays inside float16's range, and what
// falls below its subnormal numbers is 2^39 times smaller than the largest V.
int ForwardValueBits(const Problem& p) { return 14 - DropoutBits(p); }
// Backward brings V to 1..2 and dO to 2^4..2^5, less dropout's factor, so that dP, dS and their
// sums stay inside float16's range for every head dimension: 2·256·2^5·2 ≤ 2^15.
int OutputGradientBits(const Problem& p) { return 4 - DropoutBits(p); }

bool IsBFloat16(const Problem& p) { return p.element == ElementType::kBFloat16; }

// The rows of a part in a tensor of its call, one block for each of its batch entries.
std::vector<RowBlock> BlocksOf(const Problem& p, const Part& part, bool is_query) {
  const bool packed = IsPacked(p.layout);
  const int64_t heads = is_query ? p.group_size() : 1;
  std::vector<RowBlock> blocks;
  for (int64_t b = part.batch_begin; b < part.batch_begin + part.batches; ++b) {
    Sequence s = p.SequenceAt(b);
    RowBlock block;
    block.batch = packed ? 0 : b;
    block.head_begin = part.kv_head_begin * heads;
    block.heads = part.kv_heads * heads;
    block.row_begin = packed ? (is_query ? s.q_begin : s.kv_begin) : 0;
    // Dense rows beyond a key length are never seen, but they are copied with the rest.
    block.rows = is_query ? s.q_len : (packed ? s.kv_len : p.kv_len);
    blocks.push_back(block);
  }
  return blocks;
}

template <class Pick>
std::vector<int> ExponentsOf(absl::Span<const Part> parts, const Pick& pick) {
  std::vector<int> exponents;
  for (const Part& part : parts) exponents.push_back(pick(part.exponents));
  return exponents;
}

// The largest of the part's numbers decides.
int ExponentIn(const Problem& p, const Part& part, const RowShape& shape, bool is_query,
               const void* data) {
  int largest = kNoExponent;
  for (const RowBlock& block : BlocksOf(p, part, is_query)) {
    largest = std::max(largest, LargestExponent(shape, static_cast<const uint16_t*>(data), block));
  }
  return largest == kNoExponent ? 0 : largest;
}

// Each part's rows of an array shaped like lse, times 2^−(d_o + v).
void ScaleLse(const Problem& p, absl::Span<const Part> parts, std::vector<float>& values) {
  for (const Part& part : parts) {
    const int exponent = -(part.exponents.d_o + part.exponents.v);
    if (exponent == 0) continue;
    for (int64_t b = part.batch_begin; b < part.batch_begin + part.batches; ++b) {
      Sequence s = p.SequenceAt(b);
      const int64_t first = part.kv_head_begin * p.group_size();
      for (int64_t h = first; h < first + part.kv_heads * p.group_size(); ++h) {
        for (int64_t i = 0; i < s.q_len; ++i) {
          float& value = values[p.LseIndex(b, h, s, i)];
          value = std::ldexp(value, exponent);
        }
      }
    }
  }
}

// A bias gradient's numbers times 2^(d_o + v): each part's own, or all of a call that is one part.
void ScaleBiasGradient(const Problem& p, absl::Span<const Part> parts, float* d_bias) {
  const BroadcastShape& shape = p.bias->shape;
  for (const Part& part : parts) {
    const int exponent = part.exponents.d_o + part.exponents.v;
    if (exponent == 0) continue;
    const int64_t slice = shape.rows * shape.columns;
    int64_t first = 0, count = shape.elements();
    if (parts.size() > 1) {
      first = (part.batch_begin * shape.heads + part.kv_head_begin * p.group_size()) * slice;
      count = part.kv_heads * p.group_size() * slice;
    }
    for (int64_t n = first; n < first + count; ++n) d_bias[n] = std::ldexp(d_bias[n], exponent);
  }
}

void ScaleSinkGradient(const Problem& p, absl::Span<const Part> parts, float* d_sink) {
  for (const Part& part : parts) {
    const int exponent = part.exponents.d_o + part.exponents.v;
    const int64_t heads = part.kv_heads * p.group_size();
    for (int64_t b = part.batch_begin; b < part.batch_begin + part.batches; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        float& value = d_sink[b * p.q_heads + part.kv_head_begin * p.group_size() + h];
        value = std::ldexp(value, exponent);
      }
    }
  }
}

}  // namespace

absl::Status Transfer::RowsIn(const RowShape& shape, bool is_query, const void* from,
                              int64_t offset, const Problem& p, absl::Span<const Part> parts,
                              absl::Span<const int> exponents) {
  if (shape.rows() == 0) return absl::OkStatus();
  const auto* data = static_cast<const uint16_t*>(from);
  if (!IsBFloat16(p) && shape.dim % kChunk == 0) {
    return device_.CopyIn(arena_ + offset, data, shape.padded_bytes());
  }
  scratch_.assign(shape.padded_bytes() / 2, 0);
  if (!IsBFloat16(p)) {
    PadRows(shape, data, scratch_.data());
  } else {
    for (size_t n = 0; n < parts.size(); ++n) {
      for (const RowBlock& block : BlocksOf(p, parts[n], is_query)) {
        HalvesFromBFloat16(shape, data, block, exponents[n], scratch_.data());
      }
    }
  }
  return device_.CopyIn(arena_ + offset, scratch_.data(), shape.padded_bytes());
}

absl::Status Transfer::RowsOut(const RowShape& shape, void* to, int64_t offset) {
  if (shape.rows() == 0) return absl::OkStatus();
  if (shape.dim % kChunk == 0) return device_.CopyOut(to, arena_ + offset, shape.padded_bytes());
  scratch_.resize(shape.padded_bytes() / 2);
  RETURN_IF_ERROR(device_.CopyOut(scratch_.data(), arena_ + offset, shape.padded_bytes()));
  UnpadRows(shape, scratch_.data(), static_cast<uint16_t*>(to));
  return absl::OkStatus();
}

absl::Status Transfer::OutputOut(const RowShape& shape, void* to, int64_t offset, const Problem& p,
                                 absl::Span<const Part> parts, absl::Span<const int> exponents) {
  if (!IsBFloat16(p)) return RowsOut(shape, to, offset);
  if (shape.rows() == 0) return absl::OkStatus();
  auto* data = static_cast<uint16_t*>(to);
  scratch_.resize(shape.padded_bytes() / 2);
  RETURN_IF_ERROR(device_.CopyOut(scratch_.data(), arena_ + offset, shape.padded_bytes()));
  for (size_t n = 0; n < parts.size(); ++n) {
    for (const RowBlock& block : BlocksOf(p, parts[n], true)) {
      BFloat16FromHalves(shape, scratch_.data(), block, exponents[n], data);
    }
  }
  return absl::OkStatus();
}

absl::Status Transfer::ScoreInputs(const CallLayout& at, const uint8_t* mask_bits,
                                   const void* bias) {
  const Problem& p = *at.problem;
  if (p.bool_mask) {
    RETURN_IF_ERROR(BytesIn(at.mask, mask_bits, p.bool_mask->bytes()));
  }
  if (p.bias) {
    RETURN_IF_ERROR(
        BytesIn(at.bias, bias, p.bias->shape.elements() * ElementBytes(p.bias->element)));
  }
  if (at.alibi >= 0) {
    RETURN_IF_ERROR(
        BytesIn(at.alibi, p.alibi_slopes.data(), static_cast<int64_t>(p.alibi_slopes.size()) * 4));
  }
  if (at.sink >= 0) RETURN_IF_ERROR(BytesIn(at.sink, p.sink_logits.data(), p.q_heads * 4));
  std::vector<SequenceDesc> sequences = SequencesOf(p);
  return BytesIn(at.sequences, sequences.data(),
                 static_cast<int64_t>(sequences.size() * sizeof(SequenceDesc)));
}

absl::Status Transfer::BytesIn(int64_t offset, const void* from, int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  return device_.CopyIn(arena_ + offset, from, bytes);
}

absl::Status Transfer::FloatsOut(float* to, int64_t offset, int64_t count) {
  if (count == 0) return absl::OkStatus();
  return device_.CopyOut(to, arena_ + offset, count * 4);
}

absl::Status Transfer::In(const CallLayout& at, const ForwardCall& call, absl::Span<Part> parts) {
  return InputsIn(at, call, ForwardValueBits(*at.problem), parts);
}

absl::Status Transfer::InputsIn(const CallLayout& at, const ForwardCall& call, int value_bits,
                                absl::Span<Part> parts) {
  const Problem& p = *at.problem;
  if (IsBFloat16(p)) {
    for (Part& part : parts) {
      part.exponents.q = ExponentIn(p, part, QueryRows(p), true, call.q);
      part.exponents.k = ExponentIn(p, part, KeyRows(p), false, call.k);
      part.exponents.v = ExponentIn(p, part, ValueRows(p), false, call.v) - value_bits;
    }
  }
  auto of = [&](int Exponents::*member) {
    return ExponentsOf(parts, [member](const Exponents& e) { return e.*member; });
  };
  RETURN_IF_ERROR(RowsIn(QueryRows(p), true, call.q, at.q, p, parts, of(&Exponents::q)));
  RETURN_IF_ERROR(RowsIn(KeyRows(p), false, call.k, at.k, p, parts, of(&Exponents::k)));
  RETURN_IF_ERROR(RowsIn(ValueRows(p), false, call.v, at.v, p, parts, of(&Exponents::v)));
  return ScoreInputs(at, call.mask_bits, call.bias);
}

absl::Status Transfer::Out(const CallLayout& at, const ForwardCall& call,
                           absl::Span<const Part> parts) {
  const Problem& p = *at.problem;
  std::vector<int> v = ExponentsOf(parts, [](const Exponents& e) { return e.v; });
  RETURN_IF_ERROR(OutputOut(OutputRows(p), call.o, at.o, p, parts, v));
  return FloatsOut(call.lse, at.lse, p.LseElements());
}

absl::Status Transfer::In(const CallLayout& at, const BackwardCall& call, absl::Span<Part> parts) {
  const Problem& p = *at.problem;
  ForwardCall inputs;
  inputs.q = call.q;
  inputs.k = call.k;
  inputs.v = call.v;
  inputs.mask_bits = call.mask_bits;
  inputs.bias = call.bias;
  RETURN_IF_ERROR(InputsIn(at, inputs, /*value_bits=*/0, parts));
  if (IsBFloat16(p)) {
    for (Part& part : parts) {
      part.exponents.d_o =
          ExponentIn(p, part, OutputRows(p), true, call.d_o) - OutputGradientBits(p);
    }
  }
  std::vector<int> v = ExponentsOf(parts, [](const Exponents& e) { return e.v; });
  std::vector<int> d_o = ExponentsOf(parts, [](const Exponents& e) { return e.d_o; });
  RETURN_IF_ERROR(RowsIn(OutputRows(p), true, call.o, at.o, p, parts, v));
  RETURN_IF_ERROR(RowsIn(OutputRows(p), true, call.d_o, at.d_o, p, parts, d_o));
  RETURN_IF_ERROR(BytesIn(at.lse, call.lse, p.LseElements() * 4));
  std::vector<float> d_lse(p.LseElements());
  if (call.d_lse != nullptr) d_lse.assign(call.d_lse, call.d_lse + p.LseElements());
  ScaleLse(p, parts, d_lse);
  return BytesIn(at.d_lse, d_lse.data(), p.LseElements() * 4);
}

absl::Status Transfer::Out(const CallLayout& at, const BackwardCall& call,
                           absl::Span<const Part> parts) {
  const Problem& p = *at.problem;
  RETURN_IF_ERROR(RowsOut(QueryRows(p), call.d_q, at.d_q));
  RETURN_IF_ERROR(RowsOut(KeyRows(p), call.d_k, at.d_k));
  RETURN_IF_ERROR(RowsOut(ValueRows(p), call.d_v, at.d_v));
  if (at.d_bias >= 0) {
    RETURN_IF_ERROR(FloatsOut(call.d_bias, at.d_bias, p.bias->shape.elements()));
    ScaleBiasGradient(p, parts, call.d_bias);
  }
  if (at.d_sink >= 0) {
    RETURN_IF_ERROR(FloatsOut(call.d_sink, at.d_sink, p.batch * p.q_heads));
    ScaleSinkGradient(p, parts, call.d_sink);
  }
  return absl::OkStatus();
}

}  // namespace attnd::cuda
