// Rules on score tiles, as types because they change the inner loop. Scores leave a rule in units
// of log2 divided by its Multiplier, so that P = 2^(score·Multiplier − stabiliser); −infinity
// means not visible.
//   LinearScores    scale·s; causal, window and lengths cut tiles, and only PARTIAL tiles run it
//   GeneralScores   also softcap, bias, ALiBi, bool mask and any scale, decided at run time; every
//                   tile runs it
// Positions: (row, key) count inside a sequence. Errors: none. Threads: pure functions, except that
// ApplyAll must be called by a whole warp.
#pragma once

#include "attention/score_rule.h"
#include "kernels/params.h"
#include "kernels/sm70/ptx.h"
#include "kernels/tile_iterator.h"

namespace attnd {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kLowest = -3.402823466e38f;
ATTN_HD float Infinity() { return ptx::BitsFloat(0x7f800000u); }

ATTN_HD Visibility VisibilityOf(const SequenceDesc& s) {
  return {s.q_len, s.kv_len, s.low, s.high};
}

// A score, and whether its key is visible at all (a visible one may be −infinity).
struct Scored {
  float score;
  bool visible;
};

// Where a score tile stands.
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
inline constexpr uint32_t kAllScores = (1u << (2 * kPairs)) - 1;
struct LinearScores {
  static constexpr bool kEveryTile = false;
  ATTN_HD static uint32_t OptionsOf(const ProblemDesc&) { return 0; }
  ATTN_HD static uint32_t OptionsIn(uint32_t options, bool /*is_masked*/) { return options; }
  // Products of kPairs pairs become scores, −infinity where invisible. Returns which keys are
  // visible. `is_cut`: causal, window or lengths may hide some.
  template <Along kAlong, int kPairs>
  ATTN_HD static uint32_t ApplyAll(const ScoreContext& at, const ScorePlace (&pairs)[kPairs],
                                   bool /*is_cut*/, ScorePairs<kPairs>& scores,
                                   ScorePairs<kPairs>& /*slopes*/) {
    const uint32_t visible = VisiblePlaces<kAlong>(at, pairs);
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      if (!(visible >> n & 1)) scores[n >> 1][n & 1] = -Infinity();
    }
    return visible;
  }
  // dS of the raw product over dS of the score, where it is not constant (softcap): `slopes`.
  ATTN_HD static bool HasSlope(const ProblemDesc&) { return false; }
  // What a score, or a raw product, is multiplied by to be in units of log2.
  ATTN_HD static float Multiplier(const ProblemDesc& problem) { return problem.scale_log2; }
  // Rows beyond the sequence, which fill up tiles, see nothing.
  ATTN_HD static bool IsVisible(const ScoreContext& at, int row, int key) {
    return row < at.sequence.q_len && attnd::IsVisible(VisibilityOf(at.sequence), row, key);
  }
  template <Along kAlong, int kPairs>
  ATTN_HD static uint32_t VisiblePlaces(const ScoreContext& at, const ScorePlace (&pairs)[kPairs]) {
    uint32_t visible = 0;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      const ScorePlace place = InPair<kAlong>(pairs[n >> 1], n & 1);
      visible |= static_cast<uint32_t>(IsVisible(at, place.row, place.key)) << n;
    }
    return visible;
  }
  // Keys that `row` sees, for the denominator; `counted` is what the loop counted.
  ATTN_HD static int VisibleCount(const ScoreContext& at, int row, int /*counted*/) {
    Range keys = VisibleKeys(VisibilityOf(at.sequence), row, row + 1);
    return MaxInt(0, keys.end - keys.begin);
  }
};

struct GeneralScores {
  static constexpr bool kEveryTile = true;
  // What a problem asks for, looked up once.
  enum Option : uint32_t { kSoftcap = 1, kBias = 2, kAlibi = 4, kMask = 8 };
  ATTN_HD static uint32_t OptionsOf(const ProblemDesc& p) {
    return (p.softcap != 0 ? kSoftcap : 0u) | (p.bias.data != nullptr ? kBias : 0u) |
           (p.alibi_slopes != nullptr ? kAlibi : 0u) | (p.mask.data != nullptr ? kMask : 0u);
  }
  // Scores leave it in natural units.
  ATTN_HD static float Multiplier(const ProblemDesc&) { return kLog2E; }
  // The same, but scores of invisible keys mean nothing yet: the caller, who counts them, hides
  // them in one rare branch. Option by option over all pairs: one uniform branch for each (each
  // jump may wait for its line of code), and all loads of an option are under way before the first
  // is needed.
  template <Along kAlong, int kPairs>
  ATTN_HD static uint32_t ApplyAll(const ScoreContext& at, const ScorePlace (&pairs)[kPairs],
                                   bool is_cut, ScorePairs<kPairs>& scores,
                                   ScorePairs<kPairs>& slopes) {
    const uint32_t options = at.options;
    float factor = at.problem.scale;
    if (options & kSoftcap) {
      Cap(at.problem, scores, slopes);
      factor = 1;
    }
    uint32_t visible = kAllScores<kPairs>;
    if (options & kBias) {
      visible = AddBias<kAlong>(at, pairs, factor, scores);
    } else {
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n) scores[n >> 1][n & 1] *= factor;
    }
    if (options & kAlibi) AddAlibi<kAlong>(at, pairs, scores);
    if (is_cut) visible &= LinearScores::VisiblePlaces<kAlong>(at, pairs);
    if (options & kMask) visible &= Allowed<kAlong>(at, pairs);
    return visible;
  }
  ATTN_HD static bool HasSlope(const ProblemDesc& problem) { return problem.softcap != 0; }
  // Of every visit, besides what tile lists say.
  ATTN_HD static uint32_t VisitFlags(const ProblemDesc& problem) {
    const bool unlisted = problem.mask.data != nullptr && problem.tile_lists.data == nullptr;
    return (unlisted ? uint32_t{ListedVisit::kMasked} : 0u) |
           (problem.bias.data != nullptr ? uint32_t{ListedVisit::kOther} : 0u);
  }
  // Of those of a problem, what a tile needs.
  ATTN_HD static uint32_t OptionsIn(uint32_t options, bool is_masked) {
    return is_masked ? options : options & ~uint32_t{kMask};
  }

  ATTN_HD static bool IsVisible(const ScoreContext& at, int row, int key) {
    return LinearScores::IsVisible(at, row, key) && MaskAllows(at, row, key) &&
           BiasAt(at, row, key) != -Infinity();
  }
  // One score alone.
  ATTN_HD static Scored Apply(const ScoreContext& at, int row, int key, float product) {
    const Scored kHidden = {-Infinity(), false};
    if (!LinearScores::IsVisible(at, row, key) || !MaskAllows(at, row, key)) return kHidden;
    const float bias = BiasAt(at, row, key), cap = at.problem.softcap;
    if (bias == -Infinity()) return kHidden;
    float score = product * at.problem.scale;
    if (cap != 0) score = SoftcapFromInverse(cap, Inverse(score * (2 * kLog2E / cap)));
    if (at.problem.alibi_slopes != nullptr) {
      score += AlibiBias(SlopeOf(at), at.sequence.diagonal, row, key);
    }
    return {score + AtLeastLowest(bias), true};
  }
  ATTN_HD static int VisibleCount(const ScoreContext&, int /*row*/, int counted) { return counted; }

 private:
  // Lower biases become this: far below any other score, and a row of nothing else is an average of
  // V, though not a plain one: float32 holds multiples of 4 there, which scores beyond 2 move.
  static constexpr float kLowestBias = -0x1p26f;
  ATTN_HD static float AtLeastLowest(float bias) { return bias < kLowestBias ? kLowestBias : bias; }

  // 1/(1 + 2^x).
  ATTN_HD static float Inverse(float x) { return ptx::Reciprocal(1.0f + ptx::Exp2(x)); }
  template <int kPairs>
  ATTN_HD static void Cap(const ProblemDesc& problem, ScorePairs<kPairs>& scores,
                          ScorePairs<kPairs>& slopes) {
    const float cap = problem.softcap;
    const float to_power = problem.scale * (2 * kLog2E) * ptx::Reciprocal(cap);
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      const float inverse = Inverse(scores[n >> 1][n & 1] * to_power);
      scores[n >> 1][n & 1] = SoftcapFromInverse(cap, inverse);
      slopes[n >> 1][n & 1] = 4.0f * inverse * (1.0f - inverse);  // 1 − tanh²
    }
  }

  // Places beyond the sequence get what stands at its end.
  ATTN_HD static ScorePlace Inside(const ScoreContext& at, ScorePlace place) {
    return {MinInt(place.row, at.sequence.q_len - 1), MinInt(place.key, at.sequence.kv_len - 1)};
  }

  // ---- Bias.
  template <Along kAlong, int kPairs>
  ATTN_HD static uint32_t AddBias(const ScoreContext& at, const ScorePlace (&pairs)[kPairs],
                                  float factor, ScorePairs<kPairs>& scores) {
    ScorePairs<kPairs> bias;
    LoadBias<kAlong>(at, pairs, bias);
    float most_negative = 0;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      most_negative = ptx::Max(most_negative, -bias[n >> 1][n & 1]);
    }
    uint32_t visible = kAllScores<kPairs>;
    if (ptx::VoteAny(most_negative > -kLowestBias)) visible = Moderate(bias);
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      float& score = scores[n >> 1][n & 1];
      score = ptx::Fma(score, factor, bias[n >> 1][n & 1]);
    }
    return visible;
  }
  // Which are not −infinity; those that units of log2 could not hold become what they hold.
  template <int kPairs>
  ATTN_HD static uint32_t Moderate(ScorePairs<kPairs>& bias) {
    uint32_t visible = 0;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      float& value = bias[n >> 1][n & 1];
      visible |= static_cast<uint32_t>(value != -Infinity()) << n;
      value = AtLeastLowest(value);
    }
    return visible;
  }
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
  template <Along kAlong, int kPairs>
  ATTN_HD static void AddAlibi(const ScoreContext& at, const ScorePlace (&pairs)[kPairs],
                               ScorePairs<kPairs>& scores) {
    const float slope = SlopeOf(at);
    // Places differ by constants from the first, so only its distance is converted.
    const int first = pairs[0].row - pairs[0].key;
    const float distance = static_cast<float>(first + at.sequence.diagonal);
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      const ScorePlace place = InPair<kAlong>(pairs[n >> 1], n & 1);
      const float own = distance + static_cast<float>(place.row - place.key - first);
      scores[n >> 1][n & 1] = ptx::Fma(ptx::Absolute(own), -slope, scores[n >> 1][n & 1]);
    }
  }

  // ---- Bool mask.
  ATTN_HD static const char* MaskOf(const ScoreContext& at) {
    const BroadcastTensor& mask = at.problem.mask;
    return static_cast<const char*>(mask.data) + at.batch * mask.batch + at.head * mask.head;
  }
  ATTN_HD static bool MaskAllows(const ScoreContext& at, int row, int key) {
    const BroadcastTensor& mask = at.problem.mask;
    if (mask.data == nullptr) return true;
    const int column = mask.column * key;
    return ptx::LoadConstant8(MaskOf(at) + row * mask.row + (column >> 3)) >> (column & 7) & 1;
  }
  // A pair of keys has its bits in one byte.
  template <Along kAlong, int kPairs>
  ATTN_HD static uint32_t Allowed(const ScoreContext& at, const ScorePlace (&pairs)[kPairs]) {
    constexpr int kEach = kAlong == Along::kKeys ? 1 : 2;  // bytes of a pair
    const BroadcastTensor& mask = at.problem.mask;
    const char* data = MaskOf(at);
    uint32_t bytes[kPairs][kEach], allowed = 0;
#pragma unroll
    for (int n = 0; n < kEach * kPairs; ++n) {
      const ScorePlace place = Inside(at, InPair<kAlong>(pairs[n / kEach], n % kEach));
      const char* row = ptx::Offset(data, place.row, static_cast<int>(mask.row));
      bytes[n / kEach][n % kEach] = ptx::LoadConstant8(row + (mask.column * place.key >> 3));
    }
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const uint32_t first = bytes[n][0] >> (mask.column * pairs[n].key & 7);
      if (kAlong == Along::kRows) {
        const uint32_t second = bytes[n][kEach - 1] >> (mask.column * pairs[n].key & 7);
        allowed |= ((first & 1) | (second & 1) << 1) << (2 * n);
      } else {
        allowed |= (mask.column ? first & 3 : (first & 1) * 3) << (2 * n);
      }
    }
    return allowed;
  }
};

}  // namespace attnd
