// score_tensors.h reads a caller's tensors of scores by place: bias and ALiBi slopes. GeneralScores
// (score_rules.h) uses it. A lane's numbers come together: all loads are under way before the first
// is needed. Errors: none. Threads: pure functions.
#pragma once

#include "attention/score_rule.h"
#include "kernels/ptx/instructions.h"
#include "kernels/rules/params.h"

namespace attnd {

// ScoreContext says where a score tile stands.
struct ScoreContext {
  const ProblemDesc& problem;
  const SequenceDesc& sequence;
  int batch, head;   // batch entry or sequence; query head
  uint32_t options;  // of the rule: OptionsOf(problem)
};

struct ScorePlace {
  int row, key;
};
// A lane's scores of a tile come in pairs of neighbours: two keys of a row, of which the first is
// even (kKeys), or two rows (kRows).
enum class Along { kKeys, kRows };
template <Along kAlong>
ATTN_HD ScorePlace InPair(ScorePlace first, int n) {
  if (kAlong == Along::kKeys) return {first.row, first.key + n};
  return {first.row + n, first.key};
}

// Scores of kPairs pairs. Sets of them are bits 2·pair + n.
template <int kPairs>
using ScorePairs = float[kPairs][2];
template <int kPairs>
inline constexpr uint32_t kAllScores = (2u << (2 * kPairs - 1)) - 1;

struct ScoreTensors {
  // ---- Bias.
  // All loads, then all conversions; one branch for each kind.
  template <Along kAlong, int kPairs>
  ATTN_HD static void LoadBias(const ScoreContext& at, const ScorePlace (&pairs)[kPairs],
                               ScorePairs<kPairs>& to) {
    const BroadcastTensor& bias = at.problem.bias;
    const int bytes = bias.element == kBiasFloat32 ? 4 : 2;
    const char* data =
        static_cast<const char*>(bias.data) + (at.batch * bias.batch + at.head * bias.head) * bytes;
    const int row_bytes = static_cast<int>(bias.row * bytes), key_bytes = bias.column * bytes;
    if (bytes == 4) {
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n) {
        const ScorePlace place = Inside(at, InPair<kAlong>(pairs[n >> 1], n & 1));
        to[n >> 1][n & 1] =
            ptx::LoadConstantFloat(ptx::Offset(data, place.row, row_bytes) + place.key * key_bytes);
      }
      return;
    }
    const bool is_half = bias.element == kBiasFloat16;
    if (kAlong == Along::kKeys && bias.has_pairs) {
      uint32_t words[kPairs];
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        const ScorePlace place = Inside(at, pairs[n]);
        words[n] =
            ptx::LoadConstant32(ptx::Offset(data, place.row, row_bytes) + (place.key & ~1) * 2);
      }
      if (is_half) {
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
          to[n][0] = ptx::LowHalf(words[n]);
          to[n][1] = ptx::HighHalf(words[n]);
        }
      } else {
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
          to[n][0] = ptx::BitsFloat(words[n] << 16);
          to[n][1] = ptx::BitsFloat(words[n] & 0xffff0000u);
        }
      }
      return;
    }
    uint32_t words[kPairs][2];
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      const ScorePlace place = Inside(at, InPair<kAlong>(pairs[n >> 1], n & 1));
      words[n >> 1][n & 1] =
          ptx::LoadConstant16(ptx::Offset(data, place.row, row_bytes) + place.key * key_bytes);
    }
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      const uint32_t word = words[n >> 1][n & 1];
      to[n >> 1][n & 1] = is_half ? ptx::LowHalf(word) : ptx::BitsFloat(word << 16);
    }
  }
  // 0 where there is none.
  ATTN_HD static float BiasAt(const ScoreContext& at, int row, int key) {
    const BroadcastTensor& bias = at.problem.bias;
    if (bias.data == nullptr) return 0;
    const char* data = static_cast<const char*>(bias.data);
    const int64_t index =
        at.batch * bias.batch + at.head * bias.head + row * bias.row + int64_t{key} * bias.column;
    if (bias.element == kBiasFloat32) return ptx::LoadConstantFloat(data + index * 4);
    uint32_t half = ptx::LoadConstant16(data + index * 2);
    return bias.element == kBiasFloat16 ? ptx::LowHalf(half) : ptx::BitsFloat(half << 16);
  }

  // ---- ALiBi.
  ATTN_HD static float SlopeOf(const ScoreContext& at) {
    return ptx::LoadConstantFloat(at.problem.alibi_slopes + at.batch * at.problem.alibi_batch +
                                  at.head);
  }

 private:
  // Places beyond the sequence get what stands at its end.
  ATTN_HD static ScorePlace Inside(const ScoreContext& at, ScorePlace place) {
    return {MinInt(place.row, at.sequence.q_len - 1), MinInt(place.key, at.sequence.kv_len - 1)};
  }
};

}  // namespace attnd
