// NumbersKernel: functions of single numbers (NumbersDesc), kNumbersOfBlock a block. Bound by
// memory, but for dropout, whose generator runs for each number. A number's result depends on its
// operands and, with dropout, on its logical row and column alone.
#pragma once

#include "attention/elementwise_dropout.h"
#include "kernels/dense/curves.h"
#include "kernels/dense/elements.h"

namespace attnd {

struct NumbersKernel {
  static constexpr int kThreads = kNumbersThreads;
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const NumbersDesc& d = *static_cast<const NumbersDesc*>(params.dense);
    const auto columns = static_cast<uint32_t>(d.columns);
    const auto count = static_cast<uint32_t>(d.rows) * columns;
    const uint32_t first = static_cast<uint32_t>(at.block) * kNumbersOfBlock + at.thread;
    if (first >= count) return;
    Places p;
    p.left = static_cast<int>((count - first + kThreads - 1) / kThreads);
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      const uint32_t number = first + static_cast<uint32_t>(n * kThreads);
      p.row[n] = d.rows == 1 ? 0 : number / columns;
      p.column[n] = number - p.row[n] * columns;
    }
    Do(d, p);
  }

 private:
  // Of a thread, whose loads wait together.
  static constexpr int kTogether = kNumbersOfBlock / kThreads;
  struct Places {
    int left;  // of them there are
    uint32_t row[kTogether], column[kTogether];
    ATTN_HD int64_t At(int n, int64_t stride) const { return row[n] * stride + column[n]; }
  };

  ATTN_HD static void Load(const DenseTensor& t, int64_t stride, const Places& p,
                           float (&numbers)[kTogether]) {
    LoadNumbers(
        t, p.left, [&](int n) { return p.At(n, stride); }, numbers);
  }
  ATTN_HD static uint16_t* HalfAt(void* data, int64_t index) {
    return static_cast<uint16_t*>(data) + index;
  }

  ATTN_HD static void Do(const NumbersDesc& d, const Places& p) {
    if (d.op == kNumbersCopy && d.add == 0 && d.a.element == d.out.element) return CopyBits(d, p);
    float a[kTogether] = {}, b[kTogether] = {}, there[kTogether] = {};
    if (d.op != kNumbersZero) Load(d.a, d.a_stride, p, a);
    if (d.b.data != nullptr) Load(d.b, d.a_stride, p, b);
    if (d.add != 0) Load(d.out, d.out_stride, p, there);
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      if (n >= p.left) break;
      float value = d.op == kNumbersZero ? 0 : Value(d, a[n], b[n], p.row[n], p.column[n]);
      if (d.add != 0) value = Added(d.out.element, there[n], value);
      StoreNumber(d.out.data, d.out.element, p.At(n, d.out_stride), value);
    }
  }
  ATTN_HD static void CopyBits(const NumbersDesc& d, const Places& p) {
    uint32_t bits[kTogether] = {};
    if (d.a.element == kBiasFloat32) {
      const auto* in = static_cast<const uint32_t*>(d.a.data);
      auto* out = static_cast<uint32_t*>(d.out.data);
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        if (n < p.left) bits[n] = ptx::LoadGlobal32(in + p.At(n, d.a_stride));
      }
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        if (n < p.left) ptx::StoreGlobal32(out + p.At(n, d.out_stride), bits[n]);
      }
      return;
    }
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      if (n < p.left) bits[n] = ptx::LoadGlobal16(HalfAt(d.a.data, p.At(n, d.a_stride)));
    }
#pragma unroll
    for (int n = 0; n < kTogether; ++n) {
      if (n < p.left) ptx::StoreGlobal16(HalfAt(d.out.data, p.At(n, d.out_stride)), bits[n]);
    }
  }
  ATTN_HD static float Value(const NumbersDesc& d, float a, float b, uint32_t row,
                             uint32_t column) {
    switch (d.op) {
      case kNumbersScaled:
        return ptx::Multiply(a, d.scale);
      case kNumbersSum:
        return ptx::Fma(b, d.scale, a);
      case kNumbersProduct:
        return ptx::Multiply(a, ptx::Multiply(b, d.scale));
      case kNumbersDrop:
        return Dropped(d, row, column) ? 0 : ptx::Multiply(a, d.scale);
      case kNumbersCurve:
        return CurveValue(d.curve, a);
      case kNumbersSlope:
        return ptx::Multiply(b, CurveSlope(d.curve, a));
      default:
        return a;
    }
  }
  ATTN_HD static bool Dropped(const NumbersDesc& d, uint32_t row, uint32_t column) {
    if (d.threshold == 0) return false;
    const DropoutStream stream = {d.key_lo, d.key_hi, d.offset_lo, 0};
    return ElementwiseDropoutByte(stream, d.first_row + row, column) < d.threshold;
  }
};

}  // namespace attnd
