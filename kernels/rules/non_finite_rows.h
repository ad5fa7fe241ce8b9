// Rows that are not finite: those with infinities or NaN in Q or dO, and those whose P or delta is
// NaN. They reach dK and dV of the keys that such a row sees and of no others, which a product
// cannot tell apart (0·∞ is NaN). DeltaKernel says which heads have such rows; there backward
// multiplies with zeros in place of what is not finite, and DqKernel, which runs last, puts into
// dK and dV what that took away. All of it is slow and rare. Errors: none.
#pragma once

#include "kernels/rules/half_element.h"
#include "kernels/rules/score_rules.h"

namespace attnd {

template <class Element>
class NonFiniteRows {
 public:
  ATTN_HD NonFiniteRows(const ProblemDesc& problem, const SequenceDesc& sequence,
                        const TileWork& tile)
      : at_{problem, sequence, tile.batch, tile.head, GeneralScores::OptionsOf(problem)},
        kv_head_(tile.head / problem.group) {}

  // Whole warps call it: a lane has one chunk of the row.
  ATTN_HD void Restore(int row, int lane) const {
    const ProblemDesc& p = at_.problem;
    const SequenceDesc& s = at_.sequence;
    const int64_t at_row = int64_t{s.q_begin} + row;
    const int64_t index = s.batch * p.lse_batch + at_.head * p.lse_head + at_row;
    const float lse = ptx::LoadConstantFloat(p.lse + index);
    const float delta = ptx::LoadConstantFloat(p.delta + index);
    const bool is_p_nan = lse != lse, is_delta_finite = delta - delta == 0;
    const uint4 of_d_v = Bad(RowOf(p.d_o, s.batch, at_.head, at_row), p.v_chunks, is_p_nan, lane);
    const uint4 of_d_k =
        Bad(RowOf(p.q, s.batch, at_.head, at_row), p.qk_chunks, is_p_nan || !is_delta_finite, lane);
    if (!ptx::VoteAny(IsAny(of_d_v) || IsAny(of_d_k))) return;
    const Range keys = VisibleKeys(VisibilityOf(s), row, row + 1);
    MaskLookup mask(p.tile_lists, at_.batch, at_.head);
    for (int key = keys.begin; key < keys.end; ++key) {
      if (!GeneralScores::IsVisible(at_, mask, row, key)) continue;
      const int64_t at_key = int64_t{s.kv_begin} + key;
      SetNan(RowOf(p.d_v, s.batch, kv_head_, at_key) + lane * 16, of_d_v);
      SetNan(RowOf(p.d_k, s.batch, kv_head_, at_key) + lane * 16, of_d_k);
    }
  }

 private:
  // All ones in numbers of the lane's chunk that make a column of dK or dV NaN.
  ATTN_HD static uint4 Bad(const char* row, int chunks, bool all, int lane) {
    if (lane >= chunks) return make_uint4(0, 0, 0, 0);
    if (all) return make_uint4(~0u, ~0u, ~0u, ~0u);
    return NonFiniteHalves<Element>(ptx::LoadConstant128(row + lane * 16));
  }
  // Makes NaN of what is a float16, a bfloat16 or a float32, in any order of rows.
  ATTN_HD static void SetNan(char* chunk, uint4 bad) {
    if (!IsAny(bad)) return;
    const uint32_t words[4] = {bad.x, bad.y, bad.z, bad.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      ptx::ReduceOr(reinterpret_cast<uint32_t*>(chunk) + n, words[n] & 0x7fff7fffu);
    }
  }
  ATTN_HD static bool IsAny(uint4 words) { return (words.x | words.y | words.z | words.w) != 0; }

  ScoreContext at_;
  int kv_head_;
};

}  // namespace attnd
