// TensorView: a pointer and three strides over a [batch, heads, length, dim] tensor in one of the
// layouts; a row's numbers are contiguous. It owns nothing. Strides count elements of T.
#pragma once

#include <cstdint>

#include "attention/problem.h"

namespace attnd {

struct TensorStrides {
  int64_t batch = 0, head = 0, row = 0;  // in elements

  static TensorStrides Of(Layout layout, int64_t heads, int64_t length, int64_t dim) {
    switch (layout) {
      case Layout::kBhld:
        return {heads * length * dim, length * dim, dim};
      case Layout::kBlhd:
        return {heads * length * dim, dim, heads * dim};
      case Layout::kPackedThd:
        return {0, dim, heads * dim};
      case Layout::kPackedHtd:
        return {0, length * dim, dim};
    }
    return {};
  }
  // Element index of the first number of a row; `row` counts from the tensor's first row (add
  // Sequence::q_begin).
  int64_t Row(int64_t batch_index, int64_t head_index, int64_t row_index) const {
    return batch_index * batch + head_index * head + row_index * row;
  }
};

inline TensorStrides QueryStrides(const Problem& p) {
  return TensorStrides::Of(p.layout, p.q_heads, p.q_len, p.qk_head_dim);
}
inline TensorStrides KeyStrides(const Problem& p) {
  return TensorStrides::Of(p.layout, p.kv_heads, p.kv_len, p.qk_head_dim);
}
inline TensorStrides ValueStrides(const Problem& p) {
  return TensorStrides::Of(p.layout, p.kv_heads, p.kv_len, p.v_head_dim);
}
inline TensorStrides OutputStrides(const Problem& p) {
  return TensorStrides::Of(p.layout, p.q_heads, p.q_len, p.v_head_dim);
}

template <class T>
struct TensorView {
  T* data = nullptr;
  TensorStrides strides;
  T* Row(int64_t batch_index, int64_t head_index, int64_t row_index) const {
    return data + strides.Row(batch_index, head_index, row_index);
  }
};

// Index of a broadcast tensor's element (b, h, i, j): a dimension of 1 has stride 0.
inline int64_t BroadcastIndex(const BroadcastShape& shape, int64_t b, int64_t h, int64_t i,
                              int64_t j) {
  int64_t index = shape.batch == 1 ? 0 : b;
  index = index * shape.heads + (shape.heads == 1 ? 0 : h);
  index = index * shape.rows + (shape.rows == 1 ? 0 : i);
  return index * shape.columns + (shape.columns == 1 ? 0 : j);
}

// The bool mask's bit for (b, h, i, j).
inline bool MaskBit(const BoolMask& mask, const uint8_t* bits, int64_t b, int64_t h, int64_t i,
                    int64_t j) {
  const BroadcastShape& s = mask.shape;
  int64_t row =
      ((s.batch == 1 ? 0 : b) * s.heads + (s.heads == 1 ? 0 : h)) * s.rows + (s.rows == 1 ? 0 : i);
  int64_t column = s.columns == 1 ? 0 : j;
  return (bits[row * mask.row_bytes() + (column >> 3)] >> (column & 7)) & 1;
}

}  // namespace attnd
