// Rules on score tiles, as types because they change the inner loop. Scores leave a rule in units
// of log2, so that P = 2^(score − stabiliser); −infinity means not visible.
//   LinearScores    scale·s; causal, window and lengths cut tiles, and only PARTIAL tiles run Apply
//   GeneralScores   also softcap, bias, ALiBi, bool mask and any scale, decided at run time; every
//                   tile runs Apply
// Positions: (row, key) count inside a sequence. Errors: none. Threads: pure functions.
#pragma once

#include "attention/score_rule.h"
#include "kernels/params.h"
#include "kernels/sm70/ptx.h"

namespace attnd {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kLowest = -3.402823466e38f;
ATTN_HD float Infinity() { return ptx::BitsFloat(0x7f800000u); }

ATTN_HD Visibility VisibilityOf(const SequenceDesc& s) {
  return {s.q_len, s.kv_len, s.low, s.high};
}

// A score in units of log2, and whether its key is visible at all (a visible one may be −infinity).
struct Scored {
  float score;
  bool visible;
};

// Where a score tile stands.
struct ScoreContext {
  const ProblemDesc& problem;
  const SequenceDesc& sequence;
  int batch, head;  // batch entry or sequence; query head
};

// Two neighbouring scores of a row; `key` is even.
struct KeyPair {
  int row, key;
};

struct LinearScores {
  static constexpr bool kEveryTile = false;
  // Products of kPairs pairs become scores. Returns which keys are visible: bit 2·pair + n.
  // `is_cut`: causal, window or lengths may hide some.
  template <int kPairs>
  ATTN_HD static uint32_t ApplyAll(const ScoreContext& at, const KeyPair (&pairs)[kPairs],
                                   bool /*is_cut*/, float (&scores)[kPairs][2]) {
    uint32_t visible = 0;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      const KeyPair pair = pairs[n >> 1];
      const Scored scored = Apply(at, pair.row, pair.key + (n & 1), scores[n >> 1][n & 1]);
      scores[n >> 1][n & 1] = scored.score;
      visible |= static_cast<uint32_t>(scored.visible) << n;
    }
    return visible;
  }
  // dS of the raw product over dS of the score, where it is not constant (softcap).
  ATTN_HD static bool HasSlope(const ProblemDesc&) { return false; }
  ATTN_HD static float Slope(const ScoreContext&, float) { return 1; }
  // What a raw product is multiplied by after Apply.
  ATTN_HD static float Multiplier(const ProblemDesc& problem) { return problem.scale_log2; }
  ATTN_HD static bool AllPartial(const ProblemDesc&) { return false; }
  // Rows beyond the sequence, which fill up tiles, see nothing.
  ATTN_HD static bool IsVisible(const ScoreContext& at, int row, int key) {
    return row < at.sequence.q_len && attnd::IsVisible(VisibilityOf(at.sequence), row, key);
  }
  ATTN_HD static Scored Apply(const ScoreContext& at, int row, int key, float product) {
    bool visible = IsVisible(at, row, key);
    return {visible ? product : -Infinity(), visible};
  }
  // Keys that `row` sees, for the denominator; `counted` is what the loop counted.
  ATTN_HD static int VisibleCount(const ScoreContext& at, int row, int /*counted*/) {
    Range keys = VisibleKeys(VisibilityOf(at.sequence), row, row + 1);
    return MaxInt(0, keys.end - keys.begin);
  }
};

struct GeneralScores {
  static constexpr bool kEveryTile = true;
  // Option by option over the whole tile: one uniform branch for each, and all loads of an option
  // are under way before the first is needed (one by one, each would cost what the L2 takes to
  // answer).
  template <int kPairs>
  ATTN_HD static uint32_t ApplyAll(const ScoreContext& at, const KeyPair (&pairs)[kPairs],
                                   bool is_cut, float (&scores)[kPairs][2]) {
    const ProblemDesc& problem = at.problem;
    uint32_t visible = (1u << (2 * kPairs)) - 1;
    if (is_cut) visible = VisiblePlaces(at, pairs);
    Multiply(problem.scale, scores);
    if (problem.softcap != 0) CapAll(problem.softcap, scores);
    if (problem.bias.data != nullptr || problem.alibi_slopes != nullptr) {
      visible &= AddAll(at, pairs, scores);
    } else {
      Multiply(kLog2E, scores);
    }
    if (problem.mask.data != nullptr) visible &= MaskAll(at, pairs);
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      if (!(visible >> n & 1)) scores[n >> 1][n & 1] = -Infinity();
    }
    return visible;
  }
  ATTN_HD static bool HasSlope(const ProblemDesc& problem) { return problem.softcap != 0; }
  ATTN_HD static float Slope(const ScoreContext& at, float product) {
    const float cap = at.problem.softcap;
    if (cap == 0) return 1;
    const float inverse = ptx::Reciprocal(1.0f + SoftcapPower(cap, product * at.problem.scale));
    return 4.0f * inverse * (1.0f - inverse);  // 1 − tanh², tanh = 1 − 2·inverse
  }
  ATTN_HD static float Multiplier(const ProblemDesc&) { return 1.0f; }
  ATTN_HD static bool AllPartial(const ProblemDesc& problem) {
    return problem.mask.data != nullptr || problem.bias.data != nullptr;
  }

  // Index of (b, h, i, j); broadcast dimensions have stride 0.
  ATTN_HD static int64_t Index(const BroadcastTensor& t, const ScoreContext& at, int row, int key) {
    return at.batch * t.batch + at.head * t.head + row * t.row + int64_t{key} * t.column;
  }
  ATTN_HD static bool MaskAllows(const ScoreContext& at, int row, int key) {
    const BroadcastTensor& mask = at.problem.mask;
    if (mask.data == nullptr) return true;
    int column = mask.column * key;
    int64_t byte = at.batch * mask.batch + at.head * mask.head + row * mask.row + (column >> 3);
    return (ptx::LoadConstant8(static_cast<const char*>(mask.data) + byte) >> (column & 7)) & 1;
  }
  // 0 where there is none.
  ATTN_HD static float BiasAt(const ScoreContext& at, int row, int key) {
    const BroadcastTensor& bias = at.problem.bias;
    if (bias.data == nullptr) return 0;
    const char* data = static_cast<const char*>(bias.data);
    int64_t index = Index(bias, at, row, key);
    if (bias.element == kBiasFloat32) return ptx::LoadConstantFloat(data + index * 4);
    uint32_t half = ptx::LoadConstant16(data + index * 2);
    return bias.element == kBiasFloat16 ? ptx::LowHalf(half) : ptx::BitsFloat(half << 16);
  }
  ATTN_HD static float Softcap(float cap, float score) {
    if (cap == 0) return score;
    return SoftcapFromInverse(cap, ptx::Reciprocal(1.0f + SoftcapPower(cap, score)));
  }
  ATTN_HD static float SoftcapPower(float cap, float score) {
    return ptx::Exp2(score * (2 * kLog2E / cap));
  }
  ATTN_HD static float Alibi(const ScoreContext& at, int row, int key) {
    if (at.problem.alibi_slopes == nullptr) return 0;
    float slope = ptx::LoadConstantFloat(at.problem.alibi_slopes +
                                         at.batch * at.problem.alibi_batch + at.head);
    return AlibiBias(slope, at.sequence.diagonal, row, key);
  }
  ATTN_HD static bool IsVisible(const ScoreContext& at, int row, int key) {
    return LinearScores::IsVisible(at, row, key) && MaskAllows(at, row, key) &&
           BiasAt(at, row, key) != -Infinity();
  }
  ATTN_HD static Scored Apply(const ScoreContext& at, int row, int key, float product) {
    const Scored kHidden = {-Infinity(), false};
    if (!LinearScores::IsVisible(at, row, key)) return kHidden;
    if (!MaskAllows(at, row, key)) return kHidden;
    return Score(at, row, key, product, BiasAt(at, row, key));
  }
  ATTN_HD static int VisibleCount(const ScoreContext&, int /*row*/, int counted) { return counted; }

 private:
  ATTN_HD static Scored Score(const ScoreContext& at, int row, int key, float product, float bias) {
    const float score = Softcap(at.problem.softcap, product * at.problem.scale);
    const float added = AddedInLog2(bias + Alibi(at, row, key));
    if (bias == -Infinity()) return {-Infinity(), false};
    return {ptx::Fma(score, kLog2E, added), true};
  }
  // A bias of the type's lowest number, as masks are often written, stays finite in units of log2:
  // a row of nothing else is then a plain average, as in the reference.
  ATTN_HD static float AddedInLog2(float added) {
    return added * kLog2E < 0.9f * kLowest ? 0.9f * kLowest : added * kLog2E;
  }

  template <int kPairs>
  ATTN_HD static void Multiply(float factor, float (&scores)[kPairs][2]) {
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) scores[n >> 1][n & 1] *= factor;
  }
  template <int kPairs>
  ATTN_HD static void CapAll(float cap, float (&scores)[kPairs][2]) {
    const float to_power = 2 * kLog2E / cap;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      float& score = scores[n >> 1][n & 1];
      score = SoftcapFromInverse(cap, ptx::Reciprocal(1.0f + ptx::Exp2(score * to_power)));
    }
  }
  template <int kPairs>
  ATTN_HD static uint32_t VisiblePlaces(const ScoreContext& at, const KeyPair (&pairs)[kPairs]) {
    uint32_t visible = 0;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      const KeyPair pair = pairs[n >> 1];
      visible |= static_cast<uint32_t>(LinearScores::IsVisible(at, pair.row, pair.key + (n & 1)))
                 << n;
    }
    return visible;
  }

  // Adds bias and ALiBi and goes over to units of log2; a bias of −infinity hides.
  template <int kPairs>
  ATTN_HD static uint32_t AddAll(const ScoreContext& at, const KeyPair (&pairs)[kPairs],
                                 float (&scores)[kPairs][2]) {
    const ProblemDesc& problem = at.problem;
    uint32_t bias[kPairs][2];  // float32 bits
    LoadBias(at, pairs, bias);
    float slope = 0;
    if (problem.alibi_slopes != nullptr) {
      slope =
          ptx::LoadConstantFloat(problem.alibi_slopes + at.batch * problem.alibi_batch + at.head);
    }
    uint32_t visible = 0;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      const KeyPair pair = pairs[n >> 1];
      const float own = ptx::BitsFloat(bias[n >> 1][n & 1]);
      const float alibi = AlibiBias(slope, at.sequence.diagonal, pair.row, pair.key + (n & 1));
      float& score = scores[n >> 1][n & 1];
      score = ptx::Fma(score, kLog2E, AddedInLog2(own + alibi));
      visible |= static_cast<uint32_t>(own != -Infinity()) << n;
    }
    return visible;
  }
  ATTN_HD static bool Exists(const ScoreContext& at, KeyPair pair, int n) {
    return pair.row < at.sequence.q_len && pair.key + n < at.sequence.kv_len;
  }
  template <int kPairs>
  ATTN_HD static void LoadBias(const ScoreContext& at, const KeyPair (&pairs)[kPairs],
                               uint32_t (&to)[kPairs][2]) {
    const BroadcastTensor& bias = at.problem.bias;
    const bool is_wide = bias.element == kBiasFloat32, is_half = bias.element == kBiasFloat16;
    const int bytes = is_wide ? 4 : 2;
    const char* data =
        static_cast<const char*>(bias.data) + (at.batch * bias.batch + at.head * bias.head) * bytes;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      const KeyPair pair = pairs[n >> 1];
      const char* from = data + (pair.row * bias.row + (pair.key + (n & 1)) * bias.column) * bytes;
      const bool exists = bias.data != nullptr && Exists(at, pair, n & 1);
      to[n >> 1][n & 1] =
          is_wide ? ptx::LoadConstant32If(from, exists) : ptx::LoadConstant16If(from, exists);
    }
    if (is_wide) return;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      const uint32_t word = to[n >> 1][n & 1];
      to[n >> 1][n & 1] = is_half ? ptx::FloatBits(ptx::LowHalf(word)) : word << 16;
    }
  }
  // A pair's bits lie in one byte.
  template <int kPairs>
  ATTN_HD static uint32_t MaskAll(const ScoreContext& at, const KeyPair (&pairs)[kPairs]) {
    const BroadcastTensor& mask = at.problem.mask;
    const char* data =
        static_cast<const char*>(mask.data) + at.batch * mask.batch + at.head * mask.head;
    uint32_t bytes[kPairs], allowed = 0;
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const int64_t byte = pairs[n].row * mask.row + (mask.column * pairs[n].key >> 3);
      bytes[n] = ptx::LoadConstant8If(data + byte, Exists(at, pairs[n], 0));
    }
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const uint32_t first = bytes[n] >> (mask.column * pairs[n].key & 7);
      allowed |= (mask.column ? first & 3 : (first & 1) * 3) << (2 * n);
    }
    return allowed;
  }
};

}  // namespace attnd
