// forward_layout.h: the layout that both roles of a forward block share (forward.h): sizes, shared
// memory, named barriers, and the block's place. Errors: none.
#pragma once

#include "kernels/rules/online_softmax.h"
#include "kernels/sm70/dropout.h"
#include "kernels/sm70/forward_visits.h"
#include "kernels/sm70/pipeline.h"
#include "kernels/sm70/split_float.h"

namespace attnd::sm70 {

template <TileMath Math, Tile kTile, class Rule, class DropoutPolicy>
struct ForwardLayout {
  using ScoreMath = Math;
  using ScoreRule = Rule;
  using Dropout = DropoutPolicy;
  static constexpr int kBlockRows = kTile.q_rows;
  static constexpr int kRoleWarps = kBlockRows == 32 ? 1 : 4;
  static constexpr int kRoleThreads = 32 * kRoleWarps, kThreads = 2 * kRoleThreads;
  static constexpr int kRowTiles = kBlockRows / (16 * kRoleWarps);  // of a score warp, 16 rows
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kTeamTiles = 2, kTeamRows = 16 * kTeamTiles;
  static constexpr int kTeamWarps = kTeamTiles / kRowTiles;  // of each role
  static constexpr int kTeams = kRoleWarps / kTeamWarps;
  static constexpr int kStepKeys = 32, kGroupKeys = 16, kGroups = 2;
  // Chains of products that a score is the sum of. A link of float16 takes 13 cycles, of float32 8,
  // which one block an SM cannot hide: two chains are faster by 4 to 6 %, and err by 40 % less.
  static constexpr int kChains = Math::kRows == 1 && kTile.blocks_per_sm == 1 ? 2 : 1;
  // Short rows have little to do in a group: both of a step in one piece of code.
  static constexpr int kUnrolled = kTile.head_dim == 32 ? 2 : 1;
  static_assert((kRowTiles == 1 || kRowTiles == 2) && kTile.kv_rows == kStepKeys);

  // 16-byte chunks of a row: what is multiplied, what an output warp has of them, and how far rows
  // stand apart in shared memory (whole 128-byte lines, a power of two).
  static constexpr bool kSplits = Math::kSplits;
  static constexpr int kParts = kSplits ? 2 : 1;  // of an operand
  static constexpr int kChunks = kTile.head_dim * kParts / 8, kOutputChunks = kChunks / kTeamWarps;
  static constexpr int kPitch = kChunks <= 8 ? 8 : kChunks <= 16 ? 16 : 32;
  static_assert(kOutputChunks % 4 == 0);

  // Groups of 16 keys go round in rings: two steps of K, three of V (of split numbers the five
  // groups that are in use at once), four groups of P. Where one warp brings what it multiplies
  // (forward_rows.h), one step of either does, and short rows of V stand in the other half of K's.
  static constexpr bool kOwnTiles = kRoleWarps == 1;
  static constexpr bool kSharesRows = kOwnTiles && 2 * kChunks <= kPitch;
  static constexpr int kKeyRing = kOwnTiles ? 2 : 4, kValueRing = kOwnTiles ? 2 : kSplits ? 5 : 6;
  static constexpr int kPRing = 4;
  static constexpr int kValueChunk = kSharesRows ? kChunks : 0;  // where rows of V begin
  static constexpr int kGroupBytes = kGroupKeys * kPitch * 16;
  static constexpr int kTileBytes = kGroups * kGroupBytes;
  static constexpr int kLineTileBytes = 32 * 16;  // lines of one 16×16 tile of P
  static constexpr int kPartBytes = kTeamTiles * kLineTileBytes;
  static constexpr int kPBytes = kParts * kPartBytes;  // of a team: high parts, then low ones
  static constexpr int kBitmapWords = BitmapWords(kBlockRows, kStepKeys);
  using Words = typename DropoutPolicy::template Words<kRowTiles, kRoleWarps>;
  using Visits = KeyVisits<Rule, kStepKeys>;
  struct alignas(128) Shared {
    uint4 k[kKeyRing * kGroupKeys * kPitch];
    uint4 own_v[kSharesRows ? 1 : kValueRing * kGroupKeys * kPitch];
    uint4 p[kPRing][kTeams][kParts][kTeamTiles][32];  // lines of P, see Line
    float factor[kPRing][kRoleWarps][kWarpRows];
    // 1 + the last group of this slot for which a score warp wrote factor.
    int grown[kPRing][kRoleWarps];
    float end_factor[kRoleWarps * kWarpRows];
    Words keep;
    Descriptors descriptors;
    int left_out;  // whether an infinity or NaN of a PARTIAL tile of V was left out
    typename Visits::Ring visits;
    ATTN_HD void* v() { return kSharesRows ? k : own_v; }
    ATTN_HD const void* v() const { return kSharesRows ? k : own_v; }
  };
  static_assert(sizeof(Shared) * kTile.blocks_per_sm <= 96 * 1024, "Volta has 96 KiB an SM");

  // How P becomes float16. Truncated, it is made larger by what that loses; split, it is as large
  // as float16 allows, so that low parts keep their bits, and the sum of a row with it.
  static constexpr float kBias = kSplits ? 6.0f : kTruncationBias;
  static constexpr float kGain = kSplits ? 1.0f : 1.0f + kTruncationLoss;
  // A lane's part of a row's sum in a group, and so each P, reaches 2^kLag before the stabiliser
  // moves.
  static constexpr float kMostOfP = kSplits ? 16384.0f : 256.0f;

  // Steps after which sums of split numbers are taken to others: short sums round less.
  static constexpr int kFoldSteps = 8;
  ATTN_HD static constexpr bool FoldsAfter(int step) {
    return kSplits && step % kFoldSteps == kFoldSteps - 1;
  }

  // Named barriers. Turn: a team's score warps have made their products of one group, so the P of
  // the group before is complete and the tensor cores are free for its output warps (by parity of
  // the group). KeysReady: a step's K is there (unless score warps bring it) and its decisions of
  // dropout, and output warps are at most one group behind.
  // KeysRead: all of a step's K has been read, and all output warps are done with the step before.
  // Arriving does not wait, so scores never wait for the output of their own step; since a warp may
  // then arrive for the next step before others have met for this one, both alternate by step.
  static constexpr int kTurn = 1, kKeysReady = kTurn + 2 * kTeams, kKeysRead = kKeysReady + 2,
                       kOutputOnly = kKeysRead + 2;
  static constexpr int kTurnThreads = 64 * kTeamWarps;

  // Work is known to both roles.
  struct Work {
    ScoreContext at;
    Visits tiles;
    int block_row;  // the block's first
    Lane lane;
    int warp, thread;  // within the role
    ATTN_HD int team() const { return warp / kTeamWarps; }
    ATTN_HD int part() const { return warp % kTeamWarps; }  // of a team
    ATTN_HD int score_row() const { return block_row + warp * kWarpRows; }
    ATTN_HD int team_row() const { return block_row + team() * kTeamRows; }
  };

  ATTN_HD static const char* At(const void* base, int offset, int constant) {
    return static_cast<const char*>(base) + offset + constant;
  }
  ATTN_HD static char* At(void* base, int offset, int constant) {
    return static_cast<char*>(base) + offset + constant;
  }

  // The 16-byte line of P that belongs to row `row` (0..3) of a quad-pair's half and to `half` of
  // the columns. No bank conflicts, written by halves or read whole.
  ATTN_HD static constexpr int Line(int row, int row_half, int upper, int half) {
    return (row & 1) | half << 1 | (row_half ^ (row >> 1)) << 2 | (row >> 1) << 3 | upper << 4;
  }
  static constexpr int kSecondRow = Line(2, 0, 0, 0) * 16;  // offset ^ this: the lane's second row
  static constexpr int kOtherHalf = Line(0, 0, 0, 1) * 16;  // offset ^ this: the other columns
  // Row of the score warp's that this lane's r-th row of tile m is.
  ATTN_HD static int PlaceOf(int m, int r, Lane lane) {
    return m * 16 + Math::Row(Math::Element(r, 0), lane.index);
  }
  ATTN_HD static float* LseOf(const Work& work) {
    const SequenceDesc& s = work.at.sequence;
    const ProblemDesc& problem = work.at.problem;
    return problem.lse + s.batch * problem.lse_batch + work.at.head * problem.lse_head + s.q_begin;
  }
};

}  // namespace attnd::sm70
