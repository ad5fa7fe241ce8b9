// Rules on score tiles, as types because they change the inner loop. Scores leave a rule in units
// of log2 divided by its Multiplier, so that P = 2^(score·Multiplier − stabiliser); −infinity
// means not visible.
//   LinearScores    scale·s; causal, window and lengths cut tiles, and only PARTIAL tiles run it
//   ListedScores    the same under a mask, which lists tiles and hides what its bitmaps say
//   GeneralScores   also softcap, bias, ALiBi and any scale, decided at run time; every tile runs
//                   it. With or without a mask
// Positions: (row, key) count inside a sequence. Errors: none. Threads: pure functions, except that
// ApplyAll must be called by a whole warp.
#pragma once

#include "kernels/rules/score_tensors.h"
#include "kernels/rules/tile_iterator.h"

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

struct LinearScores {
  static constexpr bool kListed = false, kEveryTile = false;
  ATTN_HD static uint32_t OptionsOf(const ProblemDesc&) { return 0; }
  // Products of kPairs pairs become scores, −infinity where invisible. Returns which keys are
  // visible. `is_cut`: causal, window or lengths may hide some. `shown`: by the mask.
  template <Along kAlong, int kPairs>
  ATTN_HD static uint32_t ApplyAll(const ScoreContext& at, const ScorePlace (&pairs)[kPairs],
                                   bool /*is_cut*/, uint32_t /*shown*/, ScorePairs<kPairs>& scores,
                                   ScorePairs<kPairs>& /*slopes*/) {
    const uint32_t visible = VisiblePlaces<kAlong>(at, pairs);
    Hide(visible, scores);
    return visible;
  }
  template <int kPairs>
  ATTN_HD static void Hide(uint32_t visible, ScorePairs<kPairs>& scores) {
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      if (!(visible >> n & 1)) scores[n >> 1][n & 1] = -Infinity();
    }
  }
  // dS of the raw product over dS of the score, where it is not constant (softcap): `slopes`.
  ATTN_HD static bool HasSlope(const ProblemDesc&) { return false; }
  // The factor that brings a score, or a raw product, to units of log2.
  ATTN_HD static float Multiplier(const ProblemDesc& problem) { return problem.scale_log2; }
  // Rows beyond the sequence, which fill up tiles, see nothing.
  ATTN_HD static bool IsVisible(const ScoreContext& at, int row, int key) {
    return row < at.sequence.q_len && attnd::IsVisible(VisibilityOf(at.sequence), row, key);
  }
  // One place alone; `mask` is that of (b, h).
  ATTN_HD static bool IsVisible(const ScoreContext& at, MaskLookup& /*mask*/, int row, int key) {
    return IsVisible(at, row, key);
  }
  template <Along kAlong, int kPairs>
  ATTN_HD static uint32_t VisiblePlaces(const ScoreContext& at, const ScorePlace (&pairs)[kPairs]) {
    uint32_t visible = 0;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      const ScorePlace place = InPair<kAlong>(pairs[n >> 1], n & 1);
      const Range seen = Line<kAlong>(at, pairs[n >> 1]);
      const int position = kAlong == Along::kKeys ? place.key : place.row;
      // One comparison for both ends.
      const bool is_inside = static_cast<uint32_t>(position - seen.begin) <
                             static_cast<uint32_t>(MaxInt(0, seen.end - seen.begin));
      visible |= static_cast<uint32_t>(is_inside) << n;
    }
    return visible;
  }
  // Returns the visible part of the line along which a pair lies: keys of its row, or rows of its
  // key.
  template <Along kAlong>
  ATTN_HD static Range Line(const ScoreContext& at, ScorePlace place) {
    const Visibility v = VisibilityOf(at.sequence);
    const bool exists = kAlong == Along::kKeys ? place.row < v.q_len : place.key < v.kv_len;
    const Range seen = kAlong == Along::kKeys ? VisibleKeys(v, place.row, place.row + 1)
                                              : RowsThatSee(v, place.key, place.key + 1);
    return {seen.begin, exists ? seen.end : seen.begin};
  }
  // Keys that `row` sees, for the denominator; `counted` is what the loop counted.
  ATTN_HD static int VisibleCount(const ScoreContext& at, int row, int /*counted*/) {
    Range keys = VisibleKeys(VisibilityOf(at.sequence), row, row + 1);
    return MaxInt(0, keys.end - keys.begin);
  }
};

struct ListedScores : LinearScores {
  static constexpr bool kListed = true;
  template <Along kAlong, int kPairs>
  ATTN_HD static uint32_t ApplyAll(const ScoreContext& at, const ScorePlace (&pairs)[kPairs],
                                   bool is_cut, uint32_t shown, ScorePairs<kPairs>& scores,
                                   ScorePairs<kPairs>& /*slopes*/) {
    uint32_t visible = shown & kAllScores<kPairs>;
    if (is_cut) visible &= VisiblePlaces<kAlong>(at, pairs);
    Hide(visible, scores);
    return visible;
  }
  // Every visit has these flags.
  ATTN_HD static uint32_t VisitFlags(const ProblemDesc&) { return 0; }
  ATTN_HD static bool IsVisible(const ScoreContext& at, MaskLookup& mask, int row, int key) {
    return LinearScores::IsVisible(at, row, key) && mask.Shows(row, key);
  }
  ATTN_HD static int VisibleCount(const ScoreContext&, int /*row*/, int counted) { return counted; }
};

struct GeneralScores {
  static constexpr bool kListed = true, kEveryTile = true;
  // The options of a problem, looked up once.
  enum Option : uint32_t { kSoftcap = 1, kBias = 2, kAlibi = 4 };
  ATTN_HD static uint32_t OptionsOf(const ProblemDesc& p) {
    return (p.softcap != 0 ? kSoftcap : 0u) | (p.bias.data != nullptr ? kBias : 0u) |
           (p.alibi_slopes != nullptr ? kAlibi : 0u);
  }
  // Scores leave it in natural units.
  ATTN_HD static float Multiplier(const ProblemDesc&) { return kLog2E; }
  // The same, but scores of invisible keys mean nothing yet: the caller, which counts them, hides
  // them in one rare branch. Option by option over all pairs: one uniform branch for each (each
  // jump may wait for its line of code), and all loads of an option are under way before the first
  // is needed.
  template <Along kAlong, int kPairs>
  ATTN_HD static uint32_t ApplyAll(const ScoreContext& at, const ScorePlace (&pairs)[kPairs],
                                   bool is_cut, uint32_t shown, ScorePairs<kPairs>& scores,
                                   ScorePairs<kPairs>& slopes) {
    const uint32_t options = at.options;
    float factor = at.problem.scale;
    if (options & kSoftcap) {
      Cap(at.problem, scores, slopes);
      factor = 1;
    }
    uint32_t visible = shown & kAllScores<kPairs>;
    if (options & kBias) {
      visible &= AddBias<kAlong>(at, pairs, factor, scores);
    } else {
#pragma unroll
      for (int n = 0; n < 2 * kPairs; ++n) scores[n >> 1][n & 1] *= factor;
    }
    if (options & kAlibi) AddAlibi<kAlong>(at, pairs, scores);
    if (is_cut) visible &= LinearScores::VisiblePlaces<kAlong>(at, pairs);
    return visible;
  }
  ATTN_HD static bool HasSlope(const ProblemDesc& problem) { return problem.softcap != 0; }
  // Every visit has these flags besides those of its list.
  ATTN_HD static uint32_t VisitFlags(const ProblemDesc& problem) {
    return problem.bias.data != nullptr ? uint32_t{ListedVisit::kOther} : 0u;
  }

  ATTN_HD static bool IsVisible(const ScoreContext& at, MaskLookup& mask, int row, int key) {
    return LinearScores::IsVisible(at, row, key) && mask.Shows(row, key) &&
           ScoreTensors::BiasAt(at, row, key) != -Infinity();
  }
  // One score alone.
  ATTN_HD static Scored Apply(const ScoreContext& at, MaskLookup& mask, int row, int key,
                              float product) {
    const Scored kHidden = {-Infinity(), false};
    if (!IsVisible(at, mask, row, key)) return kHidden;
    const float cap = at.problem.softcap;
    float score = cap == 0 ? product * at.problem.scale
                           : SoftcapFromInverse(cap, Inverse(product * ToPower(at.problem)));
    if (at.problem.alibi_slopes != nullptr) {
      score += AlibiBias(ScoreTensors::SlopeOf(at), at.sequence.diagonal, row, key);
    }
    return {score + Moderate(ScoreTensors::BiasAt(at, row, key)), true};
  }
  ATTN_HD static int VisibleCount(const ScoreContext&, int /*row*/, int counted) { return counted; }

 private:
  // Beyond this a score times log2 e, less the stabiliser's rounding of the same, would not be 0.
  // It is for powers of two, so larger biases become one, towards 0: those between two powers count
  // alike, and a row of nothing else is the plain average of V.
  static constexpr float kExactBias = 0x1p26f;
  ATTN_HD static float Moderate(float bias) {
    const uint32_t kept = ptx::Absolute(bias) > kExactBias ? 0xff800000u : 0xffffffffu;
    return ptx::BitsFloat(ptx::FloatBits(bias) & kept);
  }

  // The factor that brings a product to 2·score/cap in units of log2. It is finite even where 1/cap
  // is not, so that a product of 0 stays 0.
  ATTN_HD static float ToPower(const ProblemDesc& problem) {
    const float power = problem.scale * (2 * kLog2E) * ptx::Reciprocal(problem.softcap);
    return ptx::Max(kLowest, -ptx::Max(kLowest, -power));
  }
  // 1/(1 + 2^x).
  ATTN_HD static float Inverse(float x) { return ptx::Reciprocal(1.0f + ptx::Exp2(x)); }
  template <int kPairs>
  ATTN_HD static void Cap(const ProblemDesc& problem, ScorePairs<kPairs>& scores,
                          ScorePairs<kPairs>& slopes) {
    const float cap = problem.softcap;
    const float to_power = ToPower(problem);
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      const float inverse = Inverse(scores[n >> 1][n & 1] * to_power);
      scores[n >> 1][n & 1] = SoftcapFromInverse(cap, inverse);
      slopes[n >> 1][n & 1] = 4.0f * inverse * (1.0f - inverse);  // 1 − tanh²
    }
  }

  // ---- Bias.
  template <Along kAlong, int kPairs>
  ATTN_HD static uint32_t AddBias(const ScoreContext& at, const ScorePlace (&pairs)[kPairs],
                                  float factor, ScorePairs<kPairs>& scores) {
    ScorePairs<kPairs> bias;
    ScoreTensors::LoadBias<kAlong>(at, pairs, bias);
    float largest = 0;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      largest = ptx::Max(largest, ptx::Absolute(bias[n >> 1][n & 1]));
    }
    uint32_t visible = kAllScores<kPairs>;
    if (ptx::VoteAny(largest > kExactBias)) visible = ModerateAll(bias);
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      float& score = scores[n >> 1][n & 1];
      score = ptx::Fma(score, factor, bias[n >> 1][n & 1]);
    }
    return visible;
  }
  // Returns which are not −infinity.
  template <int kPairs>
  ATTN_HD static uint32_t ModerateAll(ScorePairs<kPairs>& bias) {
    uint32_t visible = 0;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
      float& value = bias[n >> 1][n & 1];
      visible |= static_cast<uint32_t>(value != -Infinity()) << n;
      value = Moderate(value);
    }
    return visible;
  }

  // ---- ALiBi.
  template <Along kAlong, int kPairs>
  ATTN_HD static void AddAlibi(const ScoreContext& at, const ScorePlace (&pairs)[kPairs],
                               ScorePairs<kPairs>& scores) {
    const float slope = ScoreTensors::SlopeOf(at);
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
};

}  // namespace attnd
