// The fate of one score between Q·Kᵀ and softmax, as far as it follows from numbers alone: which
// keys a row sees (causal, window, lengths), and the pieces of softcap and ALiBi. Host and device.
//
// Row i sees keys [i + low, i + high] inside [0, kv_len); both ends grow with the row, so what a
// block of rows sees is an interval again. Positions count inside a sequence. Pure functions.
#pragma once

#include "base/hd.h"

namespace attnd {

struct Range {
  int begin, end;  // empty if end <= begin
};
ATTN_HD bool IsInside(Range range, int at) { return at >= range.begin && at < range.end; }

struct Visibility {
  int q_len, kv_len, low, high;
};

ATTN_HD int MinInt(int a, int b) { return a < b ? a : b; }
ATTN_HD int MaxInt(int a, int b) { return a > b ? a : b; }

// Keys that at least one of the rows [row_begin, row_end) sees.
ATTN_HD Range VisibleKeys(Visibility v, int row_begin, int row_end) {
  return {MaxInt(0, row_begin + v.low), MinInt(v.kv_len, row_end + v.high)};
}
// Keys that all of them see.
ATTN_HD Range KeysVisibleToAll(Visibility v, int row_begin, int row_end) {
  return {MaxInt(0, row_end - 1 + v.low), MinInt(v.kv_len, row_begin + v.high + 1)};
}
// The same from the side of the keys [key_begin, key_end).
ATTN_HD Range RowsThatSee(Visibility v, int key_begin, int key_end) {
  return {MaxInt(0, key_begin - v.high), MinInt(v.q_len, key_end - v.low)};
}
ATTN_HD Range RowsThatSeeAll(Visibility v, int key_begin, int key_end) {
  return {MaxInt(0, key_end - 1 - v.high), MinInt(v.q_len, key_begin - v.low + 1)};
}
ATTN_HD bool IsVisible(Visibility v, int row, int key) {
  return IsInside(VisibleKeys(v, row, row + 1), key);
}

// cap·tanh(score/cap) from power = e^(2·score/cap): tanh y = 1 − 2/(1 + e^2y), off by one rounding
// of 1 at most. `inverse` = 1/(1 + power).
ATTN_HD float SoftcapFromInverse(float cap, float inverse) { return cap * (1.0f - 2.0f * inverse); }

// −slope·|i + diagonal − j|.
ATTN_HD float AlibiBias(float slope, int diagonal, int row, int key) {
  int distance = row + diagonal - key;
  return -slope * static_cast<float>(distance < 0 ? -distance : distance);
}

}  // namespace attnd
