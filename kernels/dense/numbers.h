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
    uint32_t n = static_cast<uint32_t>(at.block) * kNumbersOfBlock + at.thread;
    for (int of_thread = 0; of_thread < kNumbersOfBlock / kThreads; ++of_thread, n += kThreads) {
      if (n >= count) return;
      const uint32_t row = d.rows == 1 ? 0 : n / columns;
      Do(d, row, n - row * columns);
    }
  }

 private:
  ATTN_HD static void Do(const NumbersDesc& d, uint32_t row, uint32_t column) {
    const int64_t from = row * d.a_stride + column, to = row * d.out_stride + column;
    if (d.op == kNumbersCopy && d.add == 0 && d.a.element == d.out.element) {
      return CopyBits(d, from, to);
    }
    StoreOrAdd(d.out.data, d.out.element, to, Value(d, from, row, column), d.add != 0);
  }
  ATTN_HD static void CopyBits(const NumbersDesc& d, int64_t from, int64_t to) {
    const char* in = static_cast<const char*>(d.a.data);
    char* out = static_cast<char*>(d.out.data);
    if (d.a.element == kBiasFloat32) {
      ptx::StoreGlobal32(out + to * 4, ptx::LoadGlobal32(in + from * 4));
    } else {
      ptx::StoreGlobal16(out + to * 2, ptx::LoadGlobal16(in + from * 2));
    }
  }
  ATTN_HD static float Value(const NumbersDesc& d, int64_t from, uint32_t row, uint32_t column) {
    if (d.op == kNumbersZero) return 0;
    const float a = LoadNumber(d.a, from);
    switch (d.op) {
      case kNumbersScaled:
        return ptx::Multiply(a, d.scale);
      case kNumbersSum:
        return ptx::Fma(LoadNumber(d.b, from), d.scale, a);
      case kNumbersProduct:
        return ptx::Multiply(a, ptx::Multiply(LoadNumber(d.b, from), d.scale));
      case kNumbersDrop:
        return Dropped(d, row, column) ? 0 : ptx::Multiply(a, d.scale);
      case kNumbersCurve:
        return CurveValue(d.curve, a);
      case kNumbersSlope:
        return ptx::Multiply(LoadNumber(d.b, from), CurveSlope(d.curve, a));
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
