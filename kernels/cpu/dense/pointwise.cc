#include "kernels/cpu/dense/pointwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/dense/pointwise.cc"
#include "kernels/cpu/targets.h"
//
#include <hwy/foreach_target.h>
//
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "attention/elementwise_dropout.h"
#include "kernels/cpu/dense/chunks-inl.h"
#include "kernels/cpu/dense/curves-inl.h"
#include "kernels/cpu/dense/dense_product.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

// body(first, count) for stretches of at most kChunk.
template <class Body>
HWY_INLINE void ForEachChunk(IndexRange range, const Body& body) {
  for (int64_t n = 0; n < range.count; n += kChunk) {
    body(range.first + n, std::min(kChunk, range.count - n));
  }
}

// out[n] = f(a[n], b[n]) in whole vectors.
template <class Function>
HWY_INLINE void Map(const float* a, const float* b, int64_t count, float* out, Function f) {
  const FloatTag d;
  for (int64_t n = 0; n < count; n += kLanes) {
    hn::StoreU(f(hn::LoadU(d, a + n), hn::LoadU(d, b + n)), d, out + n);
  }
}

template <class Function>
void MapTensors(ConstTensor a, ConstTensor b, Tensor out, bool add, IndexRange numbers,
                Function f) {
  ForEachChunk(numbers, [&](int64_t first, int64_t count) {
    alignas(64) Chunk of_a, of_b, result;
    const float* left = Floats(a.element, a.data, first, count, of_a);
    const float* right = Floats(b.element, b.data, first, count, of_b);
    Map(left, right, count, result, f);
    StoreOrAdd(result, add, out.element, out.data, first, count);
  });
}

template <class Body>
void WithCurve(Curve curve, const Body& body) {
  switch (curve) {
    case Curve::kRelu:
      return body(ReluCurve());
    case Curve::kGelu:
      return body(GeluCurve());
    case Curve::kGeluTanh:
      return body(GeluTanhCurve());
    case Curve::kSilu:
      return body(GateCurve<1000>());
    case Curve::kQuickGelu:
      return body(GateCurve<1702>());
    case Curve::kTanh:
      return body(TanhCurve());
  }
}

void ApplyCurveImpl(Curve curve, ConstTensor x, Tensor y, IndexRange numbers) {
  WithCurve(curve, [&]<class C>(C) {
    MapTensors(x, x, y, false, numbers, [](FloatVector v, FloatVector) { return C::Value(v); });
  });
}

void ApplyCurveSlopeImpl(Curve curve, ConstTensor x, ConstTensor dy, Tensor dx, bool add,
                         IndexRange numbers) {
  WithCurve(curve, [&]<class C>(C) {
    MapTensors(x, dy, dx, add, numbers,
               [](FloatVector v, FloatVector d) { return C::Gradient(v, d); });
  });
}

void CombineImpl(Combination kind, ConstTensor a, float scale, ConstTensor b, Tensor out, bool add,
                 IndexRange numbers) {
  const auto by = [=] { return hn::Set(FloatTag(), scale); };
  switch (kind) {
    case Combination::kScaled:
      return MapTensors(a, a, out, add, numbers,
                        [&](FloatVector x, FloatVector) { return hn::Mul(x, by()); });
    case Combination::kSum:
      return MapTensors(a, b, out, add, numbers,
                        [&](FloatVector x, FloatVector y) { return hn::MulAdd(y, by(), x); });
    case Combination::kProduct:
      return MapTensors(a, b, out, add, numbers,
                        [&](FloatVector x, FloatVector y) { return hn::Mul(x, hn::Mul(y, by())); });
  }
}

// 1 or 0 for each of 16 columns, from a multiple of 16.
HWY_INLINE void KeptColumns(const DropoutStream& stream, uint32_t row, int64_t column,
                            uint32_t threshold, float scale, float* factors) {
  const PhiloxBlock block =
      Philox4x32x7({{stream.offset_lo, row, static_cast<uint32_t>(column >> 4), 0x80000000u}},
                   stream.key_lo, stream.key_hi);
  for (int n = 0; n < 16; ++n) {
    const uint32_t byte = (block.word[n >> 2] >> ((n & 3) * 8)) & 0xff;
    factors[n] = byte < threshold ? 0.0f : scale;
  }
}

void DropRowsImpl(const DropoutRule& rule, int64_t columns, ConstTensor in, Tensor out, bool add,
                  IndexRange rows) {
  const DropoutStream stream = MakeDropoutStream(rule.seed, rule.offset, 0);
  const float scale = rule.threshold == 0 ? 1.0f : DropoutScale(rule.threshold);
  for (int64_t row = rows.first; row < rows.first + rows.count; ++row) {
    ForEachChunk({0, columns}, [&](int64_t first, int64_t count) {
      alignas(64) Chunk values, factors;
      for (int64_t n = 0; n < count; n += 16) {
        KeptColumns(stream, static_cast<uint32_t>(rule.first_row + row), first + n, rule.threshold,
                    scale, factors + n);
      }
      LoadFloats(in.element, in.data, row * columns + first, count, values);
      Map(values, factors, count, values,
          [](FloatVector x, FloatVector factor) { return hn::Mul(x, factor); });
      StoreOrAdd(values, add, out.element, out.data, row * columns + first, count);
    });
  }
}

void CopyColumnsImpl(ConstTensor in, const ColumnRange& from, Tensor out, const ColumnRange& to,
                     int64_t count, bool add, IndexRange rows) {
  for (int64_t row = rows.first; row < rows.first + rows.count; ++row) {
    const int64_t source = row * from.stride + from.first, target = row * to.stride + to.first;
    if (!add && in.element == out.element) {
      const int64_t size = ElementBytes(in.element);
      std::memcpy(static_cast<uint8_t*>(out.data) + target * size,
                  static_cast<const uint8_t*>(in.data) + source * size, count * size);
      continue;
    }
    ForEachChunk({0, count}, [&](int64_t first, int64_t part) {
      alignas(64) Chunk values;
      LoadFloats(in.element, in.data, source + first, part, values);
      StoreOrAdd(values, add, out.element, out.data, target + first, part);
    });
  }
}

void AddFloats(const float* from, int64_t count, float* to) {
  Map(from, to, count, to, [](FloatVector x, FloatVector y) { return hn::Add(x, y); });
}

// Sums one chunk of columns over one block of rows: stretches of 32 rows, so that no chain is long.
void SumBlock(const ColumnSum& sum, IndexRange rows, IndexRange columns, float* block) {
  constexpr int64_t kStretch = 32;
  std::memset(block, 0, sizeof(Chunk));
  for (int64_t row = 0; row < rows.count; row += kStretch) {
    alignas(64) Chunk stretch = {}, values;
    for (int64_t n = row; n < std::min(rows.count, row + kStretch); ++n) {
      LoadFloats(sum.in.element, sum.in.data, (rows.first + n) * sum.columns + columns.first,
                 columns.count, values);
      if (sum.in.element != sum.operand) RoundFloats(sum.operand, values, columns.count);
      AddFloats(values, columns.count, stretch);
    }
    AddFloats(stretch, columns.count, block);
  }
}

void AddColumnSumsImpl(const ColumnSum& sum, IndexRange columns) {
  ForEachChunk(columns, [&](int64_t first, int64_t count) {
    for (int64_t row = 0; row < sum.rows; row += kGradientBlockRows) {
      alignas(64) Chunk block;
      SumBlock(sum, {row, std::min(kGradientBlockRows, sum.rows - row)}, {first, count}, block);
      StoreOrAdd(block, true, ElementType::kFloat32, sum.sums, first, count);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {

HWY_EXPORT(ApplyCurveImpl);
HWY_EXPORT(ApplyCurveSlopeImpl);
HWY_EXPORT(CombineImpl);
HWY_EXPORT(DropRowsImpl);
HWY_EXPORT(CopyColumnsImpl);
HWY_EXPORT(AddColumnSumsImpl);

void ApplyCurve(Curve curve, ConstTensor x, Tensor y, IndexRange numbers) {
  HWY_DYNAMIC_DISPATCH(ApplyCurveImpl)(curve, x, y, numbers);
}

void ApplyCurveSlope(Curve curve, ConstTensor x, ConstTensor dy, Tensor dx, bool add,
                     IndexRange numbers) {
  HWY_DYNAMIC_DISPATCH(ApplyCurveSlopeImpl)(curve, x, dy, dx, add, numbers);
}

void Combine(Combination kind, ConstTensor a, float scale, ConstTensor b, Tensor out, bool add,
             IndexRange numbers) {
  HWY_DYNAMIC_DISPATCH(CombineImpl)(kind, a, scale, b, out, add, numbers);
}

void DropRows(const DropoutRule& rule, int64_t columns, ConstTensor in, Tensor out, bool add,
              IndexRange rows) {
  HWY_DYNAMIC_DISPATCH(DropRowsImpl)(rule, columns, in, out, add, rows);
}

void CopyColumns(ConstTensor in, const ColumnRange& from, Tensor out, const ColumnRange& to,
                 int64_t count, bool add, IndexRange rows) {
  HWY_DYNAMIC_DISPATCH(CopyColumnsImpl)(in, from, out, to, count, add, rows);
}

void AddColumnSums(const ColumnSum& sum, IndexRange columns) {
  HWY_DYNAMIC_DISPATCH(AddColumnSumsImpl)(sum, columns);
}

}  // namespace attnd
#endif
