// Products on tensor cores, what every architecture shares: how a step of the depth of an
// operand lies in shared memory, which part of it a thread brings, and how sums of C leave. A block
// of 128 threads makes kTile × kTile numbers of C, each of four warps a quarter of them.
// Errors: none.
#pragma once

#include "kernels/dense/curves.h"
#include "kernels/dense/elements.h"

namespace attnd {

inline constexpr int kProductThreads = 128;
// The stage of an operand has these bytes for any element.
template <int kTile>
inline constexpr int kOperandBytes = kTile * 64;
template <int kTile>
inline constexpr int kOperandPasses = kOperandBytes<kTile> / 16 / kProductThreads;

// Rows of 16-byte chunks in shared memory, twisted so that no bank is met twice: by eight rows'
// chunks of one number (of four rows' of float32 and the next chunk), by eight chunks of one row.
template <int kTile, int kBytes, bool kByDepth>
struct OperandLayout;
// [kTile][kProductStep]: two rows a line of 128 bytes.
template <int kTile, int kBytes>
struct OperandLayout<kTile, kBytes, false> {
  static constexpr int kChunks = 4;
  ATTN_HD static constexpr int Offset(int row, int chunk) {
    return (row >> 1) * 128 + ((row & 1) * kChunks + (chunk ^ (row >> 1 & 3))) * 16;
  }
};
// [kProductStep][kTile].
template <int kTile, int kBytes>
struct OperandLayout<kTile, kBytes, true> {
  static constexpr int kChunks = kTile * kBytes / 16;
  ATTN_HD static constexpr int Offset(int depth, int chunk) {
    const int twist = kBytes == 2 ? depth & 7 : (depth & 3) * 2;
    return depth * kChunks * 16 + (chunk ^ twist) * 16;
  }
};

// The chunks of an operand that a thread brings: kOperandPasses of each step, one a pass. In place
// of rows (columns) of C that do not exist it brings others, whose sums nobody stores.
template <int kTile, int kBytes, bool kByDepth>
class OperandChunks {
 public:
  using Layout = OperandLayout<kTile, kBytes, kByDepth>;
  // `first` is one of C's rows (columns), of which there are `size`; `begin` is one of the depth.
  ATTN_HD OperandChunks(const void* data, int64_t stride, int first, int size, int begin,
                        int thread) {
    const int line = thread / Layout::kChunks, chunk = thread % Layout::kChunks;
    const int most = (size - first - 1) / (kByDepth ? kNumbers : 1);
    const int there = kByDepth ? (chunk < most ? chunk : most) : (line < most ? line : most);
    const int64_t row = kByDepth ? begin : first + there;
    const int64_t column = kByDepth ? first + there * kNumbers : begin;
    data_ = static_cast<const char*>(data) + (row * stride + column) * kBytes;
    pass_bytes_ = static_cast<int>(stride) * ((kByDepth ? 1 : kLines) * kBytes);
    last_ = (most - there) / kLines;
    depth_ = kByDepth ? line : chunk * kNumbers;
    place_ = Layout::Offset(line, chunk);
  }
  // This one is for steps within the depth.
  ATTN_HD const char* Pass(int n) const {
    if constexpr (kByDepth) return ptx::Offset(data_, depth_ + n * kLines, pass_bytes_);
    return ptx::Offset(data_ + depth_ * kBytes, n < last_ ? n : last_, pass_bytes_);
  }
  // Places beyond the depth, of which `left` are left at this step's begin, are its last chunk.
  ATTN_HD const char* Pass(int n, int left) const {
    if constexpr (kByDepth) {
      const int row = depth_ + n * kLines;
      return ptx::Offset(data_, row < left ? row : left - 1, pass_bytes_);
    }
    const int column = depth_ < left ? depth_ : left - kNumbers;
    return ptx::Offset(data_ + column * kBytes, n < last_ ? n : last_, pass_bytes_);
  }
  ATTN_HD int Place(int n) const { return place_ + n * (kProductThreads * 16); }
  ATTN_HD bool IsWithin(int n, int left) const {
    return depth_ + (kByDepth ? n * kLines : 0) < left;
  }
  ATTN_HD void Advance() {
    data_ = kByDepth ? ptx::Offset(data_, kProductStep<kBytes>, pass_bytes_)
                     : data_ + kProductStep<kBytes> * kBytes;
  }

 private:
  static constexpr int kNumbers = 16 / kBytes;                      // of a chunk
  static constexpr int kLines = kProductThreads / Layout::kChunks;  // of a pass
  static_assert(!kByDepth || kLines * kOperandPasses<kTile> == kProductStep<kBytes>);
  const char* data_;
  int pass_bytes_, last_, depth_, place_;
};

// Waits before a block adds to C, and passes on after. All threads of the block call it.
ATTN_HD void WaitForTurn(const ProductDesc& p, const ProductPart& part, int thread) {
  if (part.turn == 0) return;
  if (thread == 0) {
    while (ptx::LoadAcquire(p.turns + part.tile) != part.turn) {
    }
  }
  ptx::SyncThreads();
}
ATTN_HD void PassTurn(const ProductDesc& p, const ProductPart& part, int thread) {
  if (part.turn == 0 && part.is_last) return;
  ptx::SyncThreads();
  if (thread == 0) ptx::StoreRelease(p.turns + part.tile, part.is_last ? 0 : part.turn + 1);
}

// Sixteen rows of a warp's numbers of C in shared memory, on their way out. Rows two apart and
// columns 32 apart stand in other banks.
template <int kTile>
struct ProductRows {
  ATTN_HD const float* At(int row, int column) const {
    return &sums[row][column + column / 32 * 4];
  }
  ATTN_HD float* At(int row, int column) { return &sums[row][column + column / 32 * 4]; }
  alignas(16) float sums[16][kTile / 2 + 8];
};

// ProductOutput takes a warp's sums of C to memory: bias, rounding, sums with what stands there, or
// a curve of numbers of type Curved. A lane has four columns.
struct NoCurves {
  static constexpr int kBytes = 0;
};
template <bool kHasNone, class Element>
struct ElementUnless {
  using Type = Element;
};
template <class Element>
struct ElementUnless<true, Element> {
  using Type = NoCurves;
};
template <int kTile, class Curved>
class ProductOutput {
 public:
  // `place` is the warp's first row and column of C.
  ATTN_HD ProductOutput(const ProductDesc& desc, const ProductPlace& place, int lane)
      : lane_(lane) {
    const ProductDesc p = desc;  // read at once
    const int column = place.column + lane % kLanes * 4;
    const int number_bytes = BytesOfElement(p.c_element);
    row_bytes_ = static_cast<int>(p.c_stride) * number_bytes;
    rows_left_ = column < p.columns ? p.rows - place.row : 0;
    c_ = ptx::Offset(static_cast<const char*>(p.c) + int64_t{column} * number_bytes, place.row,
                     row_bytes_);
    element_ = p.c_element;
    adds_ = p.result != kProductStore;
    if constexpr (kMayCurve) {
      curve_ = p.curve.curve;
      is_slope_ = p.curve.at != nullptr;
      const auto* beside = static_cast<const char*>(is_slope_ ? p.curve.at : p.curve.value);
      beside_ = ptx::Offset(beside + int64_t{column} * number_bytes, place.row, row_bytes_);
      if (p.c == nullptr) c_ = beside_;
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) bias_[n] = -0.0f;  // changes no sum
    if (p.bias == nullptr || rows_left_ <= 0) return;
    const char* bias = static_cast<const char*>(p.bias) + column * BytesOfElement(p.bias_element);
    if (p.bias_element == kBiasFloat32) {
      Floats::Unpack(Floats::Load(bias), bias_);
    } else if (p.bias_element == kBiasFloat16) {
      Halves<Float16>::Unpack(Halves<Float16>::Load(bias), bias_);
    } else {
      Halves<BFloat16>::Unpack(Halves<BFloat16>::Load(bias), bias_);
    }
  }

  // Stores the rows that the warp's lanes have put into `rows`: row n of it is row
  // Rows::RowOf(group, n) of the warp's.
  template <class Rows>
  ATTN_HD void Store(int group, const ProductRows<kTile>& rows) const {
    ptx::SyncWarp();
    if (element_ == kBiasFloat32) {
      StoreAs<Rows, Floats>(group, rows);
    } else if (element_ == kBiasFloat16) {
      StoreAs<Rows, Halves<Float16>>(group, rows);
    } else {
      StoreAs<Rows, Halves<BFloat16>>(group, rows);
    }
    ptx::SyncWarp();
  }

  // Once all are stored: the curve of the warp's numbers, which are read again as they stand there.
  ATTN_HD void PassThroughCurve() const {
    if constexpr (kMayCurve) {
      if (curve_ == 0) return;
      WithCurve(curve_, [&](auto curve) { Curve<decltype(curve)::kCode>(); });
    }
  }

 private:
  static constexpr int kLanes = kTile / 2 / 4;
  static constexpr bool kMayCurve = Curved::kBytes != 0;

  // Four numbers as they lie in C.
  struct Floats {
    using Words = uint4;
    ATTN_HD static Words Pack(float a, float b, float c, float d) {
      return make_uint4(ptx::FloatBits(a), ptx::FloatBits(b), ptx::FloatBits(c), ptx::FloatBits(d));
    }
    ATTN_HD static void Unpack(Words w, float (&numbers)[4]) {
      numbers[0] = ptx::BitsFloat(w.x), numbers[1] = ptx::BitsFloat(w.y);
      numbers[2] = ptx::BitsFloat(w.z), numbers[3] = ptx::BitsFloat(w.w);
    }
    ATTN_HD static Words Load(const char* p) { return ptx::LoadGlobal128(p); }
    ATTN_HD static void Store(char* p, Words w) { ptx::StoreGlobal128(p, w); }
  };
  template <class Element>
  struct Halves {
    using Words = uint2;
    ATTN_HD static Words Pack(float a, float b, float c, float d) {
      return make_uint2(Element::Pack(a, b), Element::Pack(c, d));
    }
    ATTN_HD static void Unpack(Words w, float (&numbers)[4]) {
      numbers[0] = Element::Low(w.x), numbers[1] = Element::High(w.x);
      numbers[2] = Element::Low(w.y), numbers[3] = Element::High(w.y);
    }
    ATTN_HD static Words Load(const char* p) { return ptx::LoadGlobal64(p); }
    ATTN_HD static void Store(char* p, Words w) { ptx::StoreGlobal64(p, w); }
  };

  template <class Element, int kBytes>
  struct FourOf {
    using Type = Halves<Element>;
  };
  template <class Element>
  struct FourOf<Element, 4> {
    using Type = Floats;
  };

  template <class Rows, class Four>
  ATTN_HD void StoreAs(int group, const ProductRows<kTile>& rows) const {
    if (adds_) {
      StoreRows<Rows, Four, true>(group, rows);
    } else {
      StoreRows<Rows, Four, false>(group, rows);
    }
  }
  // All loads at once, then all stores.
  template <class Rows, class Four, bool kAdds>
  ATTN_HD void StoreRows(int group, const ProductRows<kTile>& rows) const {
    constexpr int kPasses = kLanes / 2;
    typename Four::Words old[kPasses];
    float sums[kPasses][4];
    const auto row_of = [&](int pass) { return lane_ / kLanes + pass * (32 / kLanes); };
    if constexpr (kAdds) {
#pragma unroll
      for (int n = 0; n < kPasses; ++n) {
        const int row = Rows::RowOf(group, row_of(n));
        if (row < rows_left_) old[n] = Four::Load(ptx::Offset(c_, row, row_bytes_));
      }
    }
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      Floats::Unpack(ptx::LoadShared128(rows.At(row_of(n), lane_ % kLanes * 4)), sums[n]);
    }
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      const int row = Rows::RowOf(group, row_of(n));
      const typename Four::Words words = WordsOf<Four, kAdds>(sums[n], old[n]);
      if (row < rows_left_) Four::Store(const_cast<char*>(ptx::Offset(c_, row, row_bytes_)), words);
    }
  }
  // Some rows of a lane's at a time, in whatever order.
  template <int32_t kCurve>
  ATTN_HD void Curve() const {
    using Four = typename FourOf<Curved, Curved::kBytes>::Type;
    constexpr int kTogether = 4, kRowsAtOnce = 32 / kLanes;
#pragma unroll 1
    for (int first = lane_ / kLanes; first < kTile / 2; first += kTogether * kRowsAtOnce) {
      typename Four::Words words[kTogether], at[kTogether];
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int row = first + n * kRowsAtOnce;
        if (row >= rows_left_) continue;
        words[n] = Four::Load(ptx::Offset(c_, row, row_bytes_));
        if (is_slope_) at[n] = Four::Load(ptx::Offset(beside_, row, row_bytes_));
      }
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int row = first + n * kRowsAtOnce;
        float numbers[4], x[4];
        Four::Unpack(words[n], numbers);
        if (is_slope_) {
          Four::Unpack(at[n], x);
#pragma unroll
          for (int i = 0; i < 4; ++i) numbers[i] = SlopeTimes<kCurve>(x[i], numbers[i]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) numbers[i] = CurveValue<kCurve>(numbers[i]);
        }
        if (row >= rows_left_) continue;
        Four::Store(const_cast<char*>(ptx::Offset(is_slope_ ? c_ : beside_, row, row_bytes_)),
                    Four::Pack(numbers[0], numbers[1], numbers[2], numbers[3]));
      }
    }
  }
  template <class Four, bool kAdds>
  ATTN_HD typename Four::Words WordsOf(float (&sums)[4], const typename Four::Words& old) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = ptx::Add(sums[i], bias_[i]);
    const typename Four::Words words = Four::Pack(sums[0], sums[1], sums[2], sums[3]);
    if constexpr (!kAdds) return words;
    float stands[4];
    Four::Unpack(words, sums);  // rounded
    Four::Unpack(old, stands);
    return Four::Pack(ptx::Add(stands[0], sums[0]), ptx::Add(stands[1], sums[1]),
                      ptx::Add(stands[2], sums[2]), ptx::Add(stands[3], sums[3]));
  }

  const char* c_;  // of the lane's first column
  int row_bytes_, lane_, rows_left_;
  int32_t element_;
  bool adds_;
  float bias_[4];
  // With a curve.
  int32_t curve_;
  bool is_slope_;
  const char* beside_;  // of the lane's first column
};

}  // namespace attnd
