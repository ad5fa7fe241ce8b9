// NumbersKernel: functions of single numbers (NumbersDesc), eight neighbours a thread. Bound by
// memory, but for dropout's generator and some curves. A number's result depends on its operands
// and, with dropout, on its logical row and column alone.
#pragma once

#include "attention/elementwise_dropout.h"
#include "kernels/dense/curves.h"
#include "kernels/dense/elements.h"

namespace attnd {

// Eight neighbours of one row.
struct NeighboursPlace {
  uint32_t row, column;
  int count;
  ATTN_HD int64_t At(int64_t stride) const { return row * stride + column; }
};

// Calls body(place) for each group of neighbours that is the thread's: one of each of `passes` runs
// of kNumbersThreads groups, which are the block's.
template <class Body>
ATTN_HD void ForNeighbours(int64_t rows, int64_t columns, int passes, ThreadIndex at,
                           const Body& body) {
  static_assert(kNumbersOfGroup == kNeighbours);
  const auto of_row = static_cast<uint32_t>(NumbersGroupsOfRow(columns));
  uint32_t group = static_cast<uint32_t>(at.block) * kNumbersThreads * passes + at.thread;
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass, group += kNumbersThreads) {
    NeighboursPlace p;
    p.row = rows == 1 ? 0 : group / of_row;
    if (p.row >= rows || (rows == 1 && group >= of_row)) return;
    p.column = (group - p.row * of_row) * kNumbersOfGroup;
    const int64_t left = columns - p.column;
    p.count = left < kNumbersOfGroup ? static_cast<int>(left) : kNumbersOfGroup;
    body(p);
  }
}

// Applies a rule to numbers; one definition for all kernels that have rules.
struct NumbersFunction {
  using Numbers = float[kNeighbours];

  // a ← f(a, b). The operation is asked for once, not for each number.
  ATTN_HD static void Apply(const NumbersRule& rule, const NeighboursPlace& p, Numbers& a,
                            const Numbers& b) {
    switch (rule.op) {
      case kNumbersScaled:
        return Each(a, [&](int n) { return ptx::Multiply(a[n], rule.scale); });
      case kNumbersSum:
        return Each(a, [&](int n) { return ptx::Fma(b[n], rule.scale, a[n]); });
      case kNumbersProduct:
        return Each(a, [&](int n) { return ptx::Multiply(a[n], ptx::Multiply(b[n], rule.scale)); });
      case kNumbersDrop:
        return Drop(rule, p, a);
      case kNumbersCurve:
        return WithCurve(rule.curve, [&](auto curve) {
          Each(a, [&](int n) { return CurveValue<decltype(curve)::kCode>(a[n]); });
        });
      case kNumbersSlope:
        return WithCurve(rule.curve, [&](auto curve) {
          Each(a, [&](int n) { return SlopeTimes<decltype(curve)::kCode>(a[n], b[n]); });
        });
      default:  // zeros, and what is copied
        return;
    }
  }

 private:
  template <class Function>
  ATTN_HD static void Each(Numbers& a, const Function& function) {
#pragma unroll
    for (int n = 0; n < kNeighbours; ++n) a[n] = function(n);
  }
  // A group's numbers stand in one half of 16 columns.
  ATTN_HD static void Drop(const NumbersRule& rule, const NeighboursPlace& p, Numbers& a) {
    uint32_t bytes[2] = {};
    if (rule.threshold != 0) {
      const DropoutStream stream = {rule.key_lo, rule.key_hi, rule.offset_lo, 0};
      const PhiloxBlock block = ElementwiseDropoutBytes(stream, rule.first_row + p.row, p.column);
      const bool is_second = (p.column & 8) != 0;
      bytes[0] = is_second ? block.word[2] : block.word[0];
      bytes[1] = is_second ? block.word[3] : block.word[1];
    }
    Each(a, [&](int n) {
      const uint32_t byte = ElementwiseDropoutByteOf(bytes[n >> 2], static_cast<uint32_t>(n));
      return ptx::Multiply(a[n], byte < rule.threshold ? 0 : rule.scale);
    });
  }
};

struct NumbersKernel {
  static constexpr int kThreads = kNumbersThreads;
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const NumbersDesc d = *static_cast<const NumbersDesc*>(params.dense);  // read at once
    const bool is_copy = d.rule.op == kNumbersCopy && d.add == 0 && d.a.element == d.out.element;
    WithNeighbours(d.whole, [&](auto how) {
      ForNeighbours(d.rows, d.columns, d.passes, at, [&](const Place& p) {
        if (is_copy) {
          CopyBits(d, p);
        } else {
          Do<decltype(how)>(d, p);
        }
      });
    });
  }

 private:
  using Place = NeighboursPlace;
  using Numbers = float[kNeighbours];

  template <class How>
  ATTN_HD static void Do(const NumbersDesc& d, const Place& p) {
    const int64_t index = p.At(d.a_stride), out_index = p.At(d.out_stride);
    const bool has_a = d.rule.op != kNumbersZero, has_b = d.b.data != nullptr;
    typename How::Raw of_a = {}, of_b = {}, there = {};
    if (has_a) How::Fetch(d.a, index, of_a);
    if (has_b) How::Fetch(d.b, index, of_b);
    if (d.add != 0) How::Fetch(d.out, out_index, there);
    Numbers a = {}, b = {};
    if (has_a) How::Load(of_a, d.a, index, p.count, a);
    if (has_b) How::Load(of_b, d.b, index, p.count, b);
    NumbersFunction::Apply(d.rule, p, a, b);
    if (d.add != 0) AddNeighbours<How>(there, d.out, out_index, p.count, a);
    How::Store(d.out, out_index, p.count, a);
  }
  // Copies as numbers, which carry the bits.
  ATTN_HD static void CopyBits(const NumbersDesc& d, const Place& p) {
    const char* from = PlaceOf(d.a, p.At(d.a_stride));
    char* to = PlaceOf(d.out, p.At(d.out_stride));
    const int size = BytesOfElement(d.a.element);
    if (IsChunk(from, p.count) && IsChunk(to, p.count)) {
      const uint4 first = ptx::LoadGlobal128(from);
      const uint4 second = size == 4 ? ptx::LoadGlobal128(from + 16) : first;
      ptx::StoreGlobal128(to, first);
      if (size == 4) ptx::StoreGlobal128(to + 16, second);
      return;
    }
    uint32_t bits[kNeighbours] = {};
#pragma unroll
    for (int n = 0; n < kNeighbours; ++n) {
      if (n >= p.count) break;
      bits[n] = size == 4 ? ptx::LoadGlobal32(from + n * 4) : ptx::LoadGlobal16(from + n * 2);
    }
#pragma unroll
    for (int n = 0; n < kNeighbours; ++n) {
      if (n >= p.count) break;
      if (size == 4) {
        ptx::StoreGlobal32(to + n * 4, bits[n]);
      } else {
        ptx::StoreGlobal16(to + n * 2, bits[n]);
      }
    }
  }
};

}  // namespace attnd
