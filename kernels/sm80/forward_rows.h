// forward_rows.h: a forward warp's work on its rows of scores between the two products, in the
// accumulators of m16n8 (also those of wgmma, a warp's 16 rows of 64): rules, stabilisers,
// probabilities. There are `kRowTiles` of 16 rows and `kGroups` of 8 keys. Errors: none.
#pragma once

#include "kernels/rules/online_softmax.h"
#include "kernels/sm80/dropout.h"

namespace attnd::sm80 {

template <class Math, class Rule, class DropoutPolicy, int kRowTiles, int kGroups>
struct ForwardRows {
  static constexpr int kUnits = kGroups / 4, kKeys = kGroups * 8;
  using Scores = float[kRowTiles][kGroups][4];
  using Probabilities = uint32_t[kRowTiles][kGroups][Math::kPairWords];
  using Factors = float[kRowTiles][2];
  struct State {
    Factors stabilizer, sum;
    int hidden[kRowTiles][2];  // keys that a list or a bias hid
  };

  // Rows beyond the sequence never grow: what they might see shows in no other row's bits.
  ATTN_HD static void Clear(int first_row, int q_len, int lane, State& rows) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + m * kUnitRows + Accumulator::Row(2 * r, lane);
        rows.stabilizer[m][r] = row < q_len ? kLowest : -kLowest;
        rows.sum[m][r] = 0;
        rows.hidden[m][r] = 0;
      }
    }
  }

  // Loads the mask's bits of a tile's units: bit 16m + 8r + 2t + c of row tile m. `bitmap` is the
  // tile's, at this lane's word of the warp's first square.
  ATTN_HD static void LoadShown(const char* bitmap, bool is_masked, uint32_t (&shown)[kUnits]) {
#pragma unroll
    for (int g = 0; g < kUnits; ++g) {
      shown[g] = ~0u;
      ptx::LoadConstant32If(shown[g], bitmap + g * 32 * 4, is_masked);
    }
  }

  // The lane's scores of a unit in pairs: pair 4r + t is of row r and group t. `shift`: of the bits
  // that belong to the warp's first row tile.
  template <class Visit>
  ATTN_HD static void ApplyRule(const ScoreContext& at, const Visit& visit, int first_row,
                                int lane_index, const uint32_t (&shown)[kUnits], int shift,
                                Scores& rS, State& rows) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int g = 0; g < kUnits; ++g) {
        ScorePlace pairs[8];
        float scores[8][2], slopes[8][2];
        const int lane = ptx::Keep(lane_index);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int e = 2 * (n >> 2);
          pairs[n] = {first_row + m * kUnitRows + Accumulator::Row(e, lane),
                      visit.First() + g * kUnitColumns + (n & 3) * 8 + Accumulator::Col(e, lane)};
          scores[n][0] = rS[m][g * 4 + (n & 3)][e];
          scores[n][1] = rS[m][g * 4 + (n & 3)][e + 1];
        }
        const uint32_t seen = Rule::kListed ? shown[g] >> (16 * m + shift) : ~0u;
        const uint32_t visible =
            Rule::template ApplyAll<Along::kKeys>(at, pairs, visit.IsCut(), seen, scores, slopes);
#pragma unroll
        for (int n = 0; n < 16; ++n) {
          float& score = rS[m][g * 4 + (n >> 1 & 3)][2 * (n >> 3) + (n & 1)];
          score = scores[n >> 1][n & 1];
          if (Rule::kEveryTile && !(visible >> n & 1)) score = -Infinity();
        }
        if constexpr (Rule::kListed) {
          rows.hidden[m][0] += ptx::CountBits(~visible & 0xffu);
          rows.hidden[m][1] += ptx::CountBits(~visible & 0xff00u);
        }
      }
    }
  }

  // Moves the stabilisers if any row of the warp outgrew its own by 2^kLag; then `factors` are what
  // the rows of O have to be multiplied by. [warp]
  ATTN_HD static bool Grow(const Scores& rS, float multiplier, State& rows, Factors& factors) {
    Factors largest;
    float excess = 0;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x = ptx::Max(rS[m][0][2 * r], rS[m][0][2 * r + 1]);
#pragma unroll
        for (int t = 1; t < kGroups; ++t) {
          x = ptx::Max(x, ptx::Max(rS[m][t][2 * r], rS[m][t][2 * r + 1]));
        }
        largest[m][r] = x;
        const float over = ptx::Fma(x, multiplier, -rows.stabilizer[m][r]);
        excess = m + r == 0 ? over : ptx::Max(excess, over);
      }
    }
    const bool grows = ptx::VoteAny(excess > kLag);
    if (grows) Move(largest, multiplier, rows, factors);
    return grows;
  }
  template <int kChunks>
  ATTN_HD static void Rescale(const Factors& factors, float (&rO)[kRowTiles][kChunks][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) rO[m][c][e] *= factors[m][e >> 1];
      }
    }
  }

  // Scores to P, in place, and its sums.
  ATTN_HD static void MakeP(float multiplier, State& rows, Scores& rS) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sums[2] = {0, 0};
#pragma unroll
        for (int t = 0; t < kGroups; ++t) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& s = rS[m][t][2 * r + c];
            s = ptx::Exp2(ptx::Fma(s, multiplier, -rows.stabilizer[m][r]));
            sums[c] += s;
          }
        }
        rows.sum[m][r] += sums[0] + sums[1];
      }
    }
  }
  ATTN_HD static void Pack(const Scores& rS, const DropoutPolicy& dropout, int first_row,
                           int first_key, int lane, Probabilities& rP) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int g = 0; g < kUnits; ++g) {
        const auto keep = dropout.Of(first_row + m * kUnitRows, first_key + g * kUnitColumns, lane);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float(&p)[4] = rS[m][g * 4 + t];
            const uint32_t mask = DropoutPolicy::Mask(keep, r, t);
            if constexpr (Math::kPairWords == 2) {
              rP[m][g * 4 + t][r] = Math::Pack(p[2 * r], p[2 * r + 1]) & mask;
            } else {
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                rP[m][g * 4 + t][2 * r + c] = ptx::FloatBits(p[2 * r + c]) & Math::Spread(mask, c);
              }
            }
          }
        }
      }
    }
  }

  // Writes lse and multiplies O by what ends a row. `visits`: tiles of kKeys keys that were
  // visited.
  template <int kChunks>
  ATTN_HD static void Finish(const ScoreContext& at, const State& rows, int first_row, int lane,
                             int visits, float (&rO)[kRowTiles][kChunks][4]) {
    const ProblemDesc& p = at.problem;
    const SequenceDesc& s = at.sequence;
    float* lse = p.lse + s.batch * p.lse_batch + at.head * p.lse_head + s.q_begin;
    Factors factors;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + m * kUnitRows + Accumulator::Row(2 * r, lane);
        int counted = 0;
        if constexpr (Rule::kListed) {
          counted = visits * kKeys -
                    static_cast<int>(Accumulator::RowSum(static_cast<float>(rows.hidden[m][r])));
        }
        const RowEnd end =
            FinishRow(at, 1.0f, rows.stabilizer[m][r], Accumulator::RowSum(rows.sum[m][r]),
                      Rule::VisibleCount(at, row, counted));
        if ((lane & 3) == 0 && row < s.q_len) ptx::StoreGlobalFloat(lse + row, end.lse);
        factors[m][r] = end.factor;
      }
    }
    Rescale(factors, rO);
  }

 private:
  ATTN_HD static void Move(const Factors& largest, float multiplier, State& rows,
                           Factors& factors) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float target = Accumulator::RowMax(largest[m][r]) * multiplier;
        const float stabilizer = ptx::Max(target, rows.stabilizer[m][r]);
        factors[m][r] = ptx::Exp2(rows.stabilizer[m][r] - stabilizer);
        rows.stabilizer[m][r] = stabilizer;
        rows.sum[m][r] *= factors[m][r];
      }
    }
  }
};

}  // namespace attnd::sm80
