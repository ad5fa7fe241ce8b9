// Dropout's keep decisions: a pure function of seed, offset and the *logical* coordinates
// (b, h, i, j) of one score in the caller's whole tensors. Every engine, tiling, batch mix and
// shard therefore drops the same scores.
//
// Generator: Philox4x32-7 (Salmon et al., SC'11). Known answer: key 0, counter 0 → 5f6fb709
// 0d893f64 4f121f81 4f730a48. One call serves the 16 scores that one lane holds of a 16-row ×
// 32-column block in an m16n8 accumulator layout:
//     key     = (seed_lo, seed_hi ^ offset_hi)
//     lane    = (i & 7)·4 + ((j & 7) >> 1)
//     counter = (offset_lo, (i >> 4)·32 + lane, b·total_q_heads + h, j >> 5)
//     byte    = ((i >> 3) & 1)·8 + ((j >> 3) & 3)·2 + (j & 1)
// `byte` counts in the 16 output bytes, little endian words in order.
// A score is dropped iff its byte < threshold, threshold = round(256·p); a kept one is scaled by
// 256/(256 − threshold).
#pragma once

#include "base/hd.h"

namespace attnd {

struct PhiloxBlock {
  uint32_t word[4];
};

ATTN_HD uint32_t MultiplyHigh(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

inline constexpr uint32_t kPhiloxMultiplier[2] = {0xD2511F53u, 0xCD9E8D57u};
inline constexpr uint32_t kPhiloxKeyStep[2] = {0x9E3779B9u, 0xBB67AE85u};

ATTN_HD PhiloxBlock PhiloxRound(const PhiloxBlock& counter, uint32_t key_lo, uint32_t key_hi) {
  const uint32_t hi0 = MultiplyHigh(kPhiloxMultiplier[0], counter.word[0]);
  const uint32_t lo0 = kPhiloxMultiplier[0] * counter.word[0];
  const uint32_t hi1 = MultiplyHigh(kPhiloxMultiplier[1], counter.word[2]);
  const uint32_t lo1 = kPhiloxMultiplier[1] * counter.word[2];
  return {{hi1 ^ counter.word[1] ^ key_lo, lo1, hi0 ^ counter.word[3] ^ key_hi, lo0}};
}
// Seven rounds of Philox4x32 over `counter` with `key_lo`, `key_hi`.
ATTN_HD PhiloxBlock Philox4x32x7(PhiloxBlock counter, uint32_t key_lo, uint32_t key_hi) {
  for (int round = 0; round < 7; ++round) {
    counter = PhiloxRound(counter, key_lo, key_hi);
    key_lo += kPhiloxKeyStep[0];
    key_hi += kPhiloxKeyStep[1];
  }
  return counter;
}

// The stream of one (batch entry, head), which decides its scores. `head_index` = b·total_q_heads +
// h of the whole tensor.
struct DropoutStream {
  uint32_t key_lo, key_hi;
  uint32_t offset_lo;
  uint32_t head_index;
};

ATTN_HD DropoutStream MakeDropoutStream(uint64_t seed, uint64_t offset, uint32_t head_index) {
  return {static_cast<uint32_t>(seed),
          static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32),
          static_cast<uint32_t>(offset), head_index};
}

// The 16 bytes of lane `lane` (0..31) of the block at rows 16·row_block, columns 32·column_block.
ATTN_HD PhiloxBlock DropoutBytes(const DropoutStream& stream, uint32_t row_block,
                                 uint32_t column_block, uint32_t lane) {
  return Philox4x32x7({{stream.offset_lo, row_block * 32 + lane, stream.head_index, column_block}},
                      stream.key_lo, stream.key_hi);
}

// The byte that decides score (row, column): dropped iff it is below the threshold.
ATTN_HD uint32_t DropoutByte(const DropoutStream& stream, uint32_t row, uint32_t column) {
  uint32_t lane = (row & 7) * 4 + ((column & 7) >> 1);
  PhiloxBlock bytes = DropoutBytes(stream, row >> 4, column >> 5, lane);
  uint32_t index = ((row >> 3) & 1) * 8 + ((column >> 3) & 3) * 2 + (column & 1);
  return (bytes.word[index >> 2] >> ((index & 3) * 8)) & 0xff;
}

// p quantised: a score is dropped with probability DropoutThreshold(p)/256 exactly. For 0 ≤ p < 1.
ATTN_HD uint32_t DropoutThreshold(float p) { return static_cast<uint32_t>(p * 256.0f + 0.5f); }

// 1/keep probability. `threshold` < 256.
ATTN_HD float DropoutScale(uint32_t threshold) {
  return 256.0f / static_cast<float>(256 - static_cast<int>(threshold));
}

}  // namespace attnd
