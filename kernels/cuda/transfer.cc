#include "kernels/cuda/transfer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "attention/dropout.h"
#include "base/status_macros.h"
#include "kernels/cuda/layout/class_order.h"
#include "kernels/cuda/seen_rows.h"

namespace attnd::cuda {
namespace {

// How far dropout's factor may enlarge a sum, in bits.
int DropoutBits(const Problem& p) {
  return static_cast<int>(std::ceil(std::log2(DropoutScale(p.dropout.threshold))));
}
// Forward brings V to 2^14..2^15, less dropout's factor: O stays inside float16's range, and what
// falls below its subnormal numbers is 2^39 times smaller than the largest V.
int ForwardValueBits(const Problem& p) { return 14 - DropoutBits(p); }
// Backward's float32 likewise, whose low parts need the room; other numbers stay at 1..2.
int BackwardValueBits(const Problem& p) {
  return p.element == ElementType::kFloat32 ? ForwardValueBits(p) : 0;
}
// Q, K and dO come to 2^14..2^15, so that next to one huge number the others keep their bits.
// Products are float32, and dS has a power of two of its own (kernels/rules/gradient_scale.h); only
// sums in float16 want scores of 1..2 a product.
constexpr int kWideBits = 14;
int ScoreBits(const Problem& p) { return p.accumulate == AccumulateType::kFloat16 ? 0 : kWideBits; }

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

// Classes of the same rows and heads share exponents: the first of them is asked.
bool IsFirstClass(const Part& part) { return part.residue == 0; }
template <class Set>
void SetExponents(absl::Span<Part> parts, const Set& set) {
  for (size_t n = 0; n < parts.size(); ++n) {
    if (IsFirstClass(parts[n])) {
      set(parts[n]);
    } else {
      parts[n].exponents = parts[n - 1].exponents;
    }
  }
}

template <class Pick>
std::vector<int> ExponentsOf(absl::Span<const Part> parts, const Pick& pick) {
  std::vector<int> exponents;
  for (const Part& part : parts) exponents.push_back(pick(part.exponents));
  return exponents;
}

int ExponentOf(const Problem& p, const RowShape& shape, const void* data, const RowBlock& block) {
  return p.element == ElementType::kFloat32
             ? LargestExponent(shape, static_cast<const float*>(data), block)
             : LargestExponent(shape, static_cast<const uint16_t*>(data), block);
}

// A row of a tensor: of Q and dO by the query, of K and V by the key.
struct RowAt {
  int64_t b, head, row;  // row of its sequence
  int exponent;          // of its largest number
};

// Whether a number of the row can reach a result.
bool Matters(const RowAt& at, bool is_query, const SeenRows& seen) {
  return is_query ? seen.SeesAny(at.b, at.head, at.row) : seen.IsKeySeen(at.b, at.head, at.row);
}

// The largest of the part's numbers that can reach a result decides.
int ExponentIn(const Problem& p, const Part& part, const RowShape& shape, bool is_query,
               const void* data, const SeenRows& seen) {
  std::vector<RowAt> rows;
  int64_t b = part.batch_begin;
  for (const RowBlock& block : BlocksOf(p, part, is_query)) {
    for (int64_t h = block.head_begin; h < block.head_begin + block.heads; ++h) {
      for (int64_t i = 0; i < block.rows; ++i) {
        const RowBlock row = {block.batch, h, 1, block.row_begin + i, 1};
        rows.push_back({b, h, i, ExponentOf(p, shape, data, row)});
      }
    }
    ++b;
  }
  // Mostly the first that is asked matters, and so the search ends with it.
  const auto smaller = [](const RowAt& a, const RowAt& b) { return a.exponent < b.exponent; };
  std::make_heap(rows.begin(), rows.end(), smaller);
  for (auto end = rows.end(); end != rows.begin(); --end) {
    if (rows.front().exponent == kNoExponent) return 0;
    if (Matters(rows.front(), is_query, seen)) return rows.front().exponent;
    std::pop_heap(rows.begin(), end, smaller);
  }
  return 0;
}

// Each part's rows of an array shaped like lse, times 2^−(d_o + v).
void ScaleLse(const Problem& p, absl::Span<const Part> parts, float* values) {
  for (const Part& part : parts) {
    const int exponent = -(part.exponents.d_o + part.exponents.v);
    if (exponent == 0 || !IsFirstClass(part)) continue;
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

// Whether the kernels can read (write) the caller's rows as they are.
bool FitsAsIs(const Problem& p, const RowShape& shape, Travel travel) {
  return !IsConverted(p.element, travel) && shape.dim % kChunk == 0;
}

constexpr int64_t kScratchAlignment = 64;
int64_t ScratchSize(int64_t bytes) {
  return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

}  // namespace

// V's least step in forward is 2^−(24 + bits) of its largest number, and backward's 2^−24, so that
// what forward rounds is nothing to backward from 8 bits on: below half a step.
bool CanKeep(const Problem& p, Travel travel) {
  if (!IsConverted(p.element, travel)) return true;
  return p.element == ElementType::kBFloat16 && ForwardValueBits(p) >= 8;
}

int64_t TransferScratchBytes(const Problem& p, Direction direction, Travel travel,
                             bool by_classes) {
  auto of = [&](const RowShape& shape) {
    return FitsAsIs(p, shape, travel) ? 0 : ScratchSize(shape.padded_bytes());
  };
  const int64_t inputs = of(QueryRows(p)) + of(KeyRows(p)) + of(ValueRows(p));
  const int64_t output = of(OutputRows(p));
  if (direction == Direction::kForward) return std::max(inputs, output);
  const int64_t lse = ScratchSize(p.LseElements() * 4);
  const int64_t d_lse = by_classes || IsConverted(p.element, travel) ? lse : 0;
  return inputs + 2 * output + d_lse +
         (by_classes ? lse : 0);  // gradients have the sizes of the inputs
}

std::byte* Transfer::TakeScratch(int64_t bytes) {
  std::byte* taken = scratch_;
  scratch_ += ScratchSize(bytes);
  return taken;
}

void Transfer::BeginCall(const CallLayout& at, std::byte* workspace) {
  travel_ = at.travel;
  scratch_ = workspace;
  ++call_;
}

int Transfer::AllocationOf(int64_t offset) const {
  return offset >= 0 && offset < arena_bytes_ ? 0 : call_;
}

absl::Status Transfer::BytesIn(int64_t offset, const void* from, int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  auto* host = const_cast<std::byte*>(static_cast<const std::byte*>(from));
  const std::optional<HostCopy> done =
      copies_.Add(launch_.arena() + offset, host, bytes, AllocationOf(offset));
  return done.has_value() ? launch_.Upload(*done) : absl::OkStatus();
}

absl::Status Transfer::FlushIn() {
  for (auto left = copies_.Next(); left.has_value(); left = copies_.Next()) {
    RETURN_IF_ERROR(launch_.Upload(*left));
  }
  return absl::OkStatus();
}

absl::Status Transfer::BytesOut(void* to, int64_t offset, int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  const std::optional<HostCopy> done = copies_.Add(
      launch_.arena() + offset, static_cast<std::byte*>(to), bytes, AllocationOf(offset));
  return done.has_value() ? launch_.Download(*done) : absl::OkStatus();
}

absl::Status Transfer::FlushOut() {
  for (auto left = copies_.Next(); left.has_value(); left = copies_.Next()) {
    RETURN_IF_ERROR(launch_.Download(*left));
  }
  return absl::OkStatus();
}

void Transfer::Convert() {
  for (const auto& convert : conversions_) convert();
  conversions_.clear();
}

absl::Status Transfer::RowsIn(const Rows& rows, const void* from, const Problem& p,
                              absl::Span<const Part> parts) {
  const int64_t bytes = rows.shape.padded_bytes();
  if (bytes == 0 || FitsAsIs(p, rows.shape, travel_)) return BytesIn(rows.offset, from, bytes);
  const auto* data = static_cast<const uint16_t*>(from);
  auto* halves = reinterpret_cast<uint16_t*>(TakeScratch(bytes));
  if (!IsConverted(p.element, travel_)) {
    PadRows(rows.shape, data, halves);
    return BytesIn(rows.offset, halves, bytes);
  }
  std::memset(halves, 0, bytes);  // rows that no part covers
  for (size_t n = 0; n < parts.size(); ++n) {
    if (!IsFirstClass(parts[n])) continue;
    for (const RowBlock& block : BlocksOf(p, parts[n], rows.is_query)) {
      if (p.element == ElementType::kFloat32) {
        HalvesFromFloats(rows.shape, static_cast<const float*>(from), block, rows.exponents[n],
                         halves);
      } else {
        HalvesFromBFloat16(rows.shape, data, block, rows.exponents[n], halves);
      }
    }
  }
  return BytesIn(rows.offset, halves, bytes);
}

absl::Status Transfer::RowsOut(const RowShape& shape, void* to, int64_t offset) {
  const int64_t bytes = shape.padded_bytes();
  if (bytes == 0 || shape.dim % kChunk == 0) return BytesOut(to, offset, bytes);
  auto* padded = reinterpret_cast<uint16_t*>(TakeScratch(bytes));
  conversions_.push_back(
      [shape, padded, to] { UnpadRows(shape, padded, static_cast<uint16_t*>(to)); });
  return BytesOut(padded, offset, bytes);
}

absl::Status Transfer::OutputOut(const Rows& rows, void* to, const Problem& p,
                                 absl::Span<const Part> parts) {
  if (p.element != ElementType::kBFloat16 || !IsConverted(p.element, travel_)) {
    return RowsOut(rows.shape, to, rows.offset);
  }
  const int64_t bytes = rows.shape.padded_bytes();
  auto* data = static_cast<uint16_t*>(to);
  auto* halves = reinterpret_cast<uint16_t*>(TakeScratch(bytes));
  conversions_.push_back([rows, data, halves, parts, &p] {
    for (size_t n = 0; n < parts.size(); ++n) {
      if (!IsFirstClass(parts[n])) continue;
      for (const RowBlock& block : BlocksOf(p, parts[n], true)) {
        BFloat16FromHalves(rows.shape, halves, block, rows.exponents[n], data);
      }
    }
  });
  return BytesOut(halves, rows.offset, bytes);
}

absl::Status Transfer::In(const CallLayout& at, const ForwardCall& call, absl::Span<Part> parts) {
  BeginCall(at, call.workspace);
  return InputsIn(at, call, ForwardValueBits(*at.problem), parts);
}

absl::Status Transfer::InputsIn(const CallLayout& at, const ForwardCall& call, int value_bits,
                                absl::Span<Part> parts) {
  const Problem& p = *at.problem;
  if (IsConverted(p.element, travel_)) {
    const SeenRows seen(p, call.mask_bits, call.bias);
    SetExponents(parts, [&](Part& part) {
      part.exponents.q = ExponentIn(p, part, QueryRows(p), true, call.q, seen) - ScoreBits(p);
      part.exponents.k = ExponentIn(p, part, KeyRows(p), false, call.k, seen) - ScoreBits(p);
      part.exponents.kept_v = ExponentIn(p, part, ValueRows(p), false, call.v, seen);
      part.exponents.v = part.exponents.kept_v - value_bits;
    });
  }
  auto of = [&](int Exponents::*member) {
    return ExponentsOf(parts, [member](const Exponents& e) { return e.*member; });
  };
  RETURN_IF_ERROR(MaskAndBiasIn(at, call));
  RETURN_IF_ERROR(RowsIn({KeyRows(p), false, at.k, of(&Exponents::k)}, call.k, p, parts));
  RETURN_IF_ERROR(RowsIn({ValueRows(p), false, at.v, of(&Exponents::v)}, call.v, p, parts));
  return RowsIn({QueryRows(p), true, at.q, of(&Exponents::q)}, call.q, p, parts);
}

absl::Status Transfer::MaskAndBiasIn(const CallLayout& at, const ForwardCall& call) {
  const Problem& p = *at.problem;
  if (p.bool_mask) RETURN_IF_ERROR(BytesIn(at.mask, call.mask_bits, p.bool_mask->bytes()));
  if (!p.bias) return absl::OkStatus();
  return BytesIn(at.bias, call.bias, p.bias->shape.elements() * ElementBytes(p.bias->element));
}

absl::Status Transfer::ScoresIn(const CallLayout& at, const ForwardCall& call,
                                absl::Span<Part> parts) {
  const Problem& p = *at.problem;
  BeginCall(at, call.workspace);
  if (IsConverted(p.element, travel_)) {
    const SeenRows seen(p, call.mask_bits, call.bias);
    for (Part& part : parts) {
      part.exponents.q = ExponentIn(p, part, QueryRows(p), true, call.q, seen) - kWideBits;
      part.exponents.k = ExponentIn(p, part, KeyRows(p), false, call.k, seen) - kWideBits;
    }
  }
  const std::vector<int> q = ExponentsOf(parts, [](const Exponents& e) { return e.q; });
  const std::vector<int> k = ExponentsOf(parts, [](const Exponents& e) { return e.k; });
  RETURN_IF_ERROR(MaskAndBiasIn(at, call));
  RETURN_IF_ERROR(RowsIn({KeyRows(p), false, at.k, k}, call.k, p, parts));
  RETURN_IF_ERROR(RowsIn({QueryRows(p), true, at.q, q}, call.q, p, parts));
  return BytesIn(at.lse, call.lse, p.LseElements() * 4);
}

absl::Status Transfer::Out(const CallLayout& at, const ForwardCall& call,
                           absl::Span<const Part> parts) {
  const Problem& p = *at.problem;
  BeginCall(at, call.workspace);
  std::vector<int> v = ExponentsOf(parts, [](const Exponents& e) { return e.v; });
  RETURN_IF_ERROR(BytesOut(call.lse, at.lse, p.LseElements() * 4));
  if (at.classes) {
    conversions_.push_back([&p, classes = *at.classes, to = call.lse] {
      const std::vector<float> own(to, to + p.LseElements());
      FromClassOrder(p, classes, own.data(), to);
    });
  }
  return OutputOut({OutputRows(p), true, at.o, v}, call.o, p, parts);
}

absl::Status Transfer::In(const CallLayout& at, const BackwardCall& call, absl::Span<Part> parts) {
  const Problem& p = *at.problem;
  BeginCall(at, call.workspace);
  if (call.residual == nullptr) RETURN_IF_ERROR(ForwardIn(at, call, parts));
  if (IsConverted(p.element, travel_)) {
    // The bool mask and the bias of a residual are on the device, and bits are to be the same.
    const SeenRows seen(p, nullptr, nullptr);
    SetExponents(parts, [&](Part& part) {
      part.exponents.d_o = ExponentIn(p, part, OutputRows(p), true, call.d_o, seen) - kWideBits;
    });
  }
  std::vector<int> d_o = ExponentsOf(parts, [](const Exponents& e) { return e.d_o; });
  RETURN_IF_ERROR(RowsIn({OutputRows(p), true, at.d_o, d_o}, call.d_o, p, parts));
  return DLseIn(at, call, parts);
}

absl::Status Transfer::ForwardIn(const CallLayout& at, const BackwardCall& call,
                                 absl::Span<Part> parts) {
  const Problem& p = *at.problem;
  ForwardCall inputs;
  inputs.q = call.q;
  inputs.k = call.k;
  inputs.v = call.v;
  inputs.mask_bits = call.mask_bits;
  inputs.bias = call.bias;
  RETURN_IF_ERROR(InputsIn(at, inputs, BackwardValueBits(p), parts));
  std::vector<int> v = ExponentsOf(parts, [](const Exponents& e) { return e.v; });
  RETURN_IF_ERROR(LseIn(at, call.lse, at.lse));
  return RowsIn({OutputRows(p), true, at.o, v}, call.o, p, parts);
}

absl::Status Transfer::LseIn(const CallLayout& at, const float* from, int64_t offset) {
  const int64_t bytes = at.problem->LseElements() * 4;
  if (!at.classes) return BytesIn(offset, from, bytes);
  auto* own = reinterpret_cast<float*>(TakeScratch(bytes));
  ToClassOrder(*at.problem, *at.classes, from, own);
  return BytesIn(offset, own, bytes);
}

absl::Status Transfer::DLseIn(const CallLayout& at, const BackwardCall& call,
                              absl::Span<const Part> parts) {
  const Problem& p = *at.problem;
  const int64_t bytes = p.LseElements() * 4;
  if (bytes == 0) return absl::OkStatus();
  if (call.d_lse == nullptr) return launch_.SetZero(launch_.arena() + at.d_lse, bytes);
  if (!IsConverted(p.element, travel_)) return LseIn(at, call.d_lse, at.d_lse);
  auto* scaled = reinterpret_cast<float*>(TakeScratch(bytes));
  if (at.classes) {
    ToClassOrder(p, *at.classes, call.d_lse, scaled);
  } else {
    std::memcpy(scaled, call.d_lse, bytes);
  }
  ScaleLse(p, parts, scaled);
  return BytesIn(at.d_lse, scaled, bytes);
}

absl::Status Transfer::Out(const CallLayout& at, const BackwardCall& call,
                           absl::Span<const Part> parts) {
  const Problem& p = *at.problem;
  BeginCall(at, call.workspace);
  RETURN_IF_ERROR(RowsOut(KeyRows(p), call.d_k, at.d_k));
  RETURN_IF_ERROR(RowsOut(ValueRows(p), call.d_v, at.d_v));
  RETURN_IF_ERROR(RowsOut(QueryRows(p), call.d_q, at.d_q));
  if (at.d_bias >= 0) {
    RETURN_IF_ERROR(BytesOut(call.d_bias, at.d_bias, p.bias->shape.elements() * 4));
    conversions_.push_back([&p, parts, &call] { ScaleBiasGradient(p, parts, call.d_bias); });
  }
  if (at.d_sink >= 0) {
    RETURN_IF_ERROR(BytesOut(call.d_sink, at.d_sink, p.batch * p.q_heads * 4));
    conversions_.push_back([&p, parts, &call] { ScaleSinkGradient(p, parts, call.d_sink); });
  }
  return absl::OkStatus();
}

}  // namespace attnd::cuda
