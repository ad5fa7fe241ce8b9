// keep_rows.h: a kept bfloat16 forward leaves, besides K, Q and lse, V and O once more, in the
// powers of two that backward wants (kernels/cuda/transfer.h). A block has 64 rows of a head, four
// lanes a row; it is bound by memory. In the numbers of the caller, of which forward reads
// V·2^−v_exponent:
//   kept V = V·2^−kept_v_exponent    kept O = bfloat16(O)·2^−kept_v_exponent
// The bits are those that kernels/cuda/layout/staging.h makes of the caller's V and of the O that
// it received: V came to forward exactly, or is too small for backward by 2^8 at least (CanKeep).
// Rows     of O are heads [0, q_heads) of the tile list, rows of V those after them.
// Errors   none
#pragma once

#include "kernels/rules/gradient_scale.h"
#include "kernels/sm70/backward_passes.h"

namespace attnd::sm70 {

// float16 times a power of two → bfloat16 → float16 times another.
class ScaleMover {
 public:
  ATTN_HD ScaleMover(int from_exponent, int to_exponent)
      : up_first_(PowerOfTwo(from_exponent / 2)),
        up_second_(PowerOfTwo(from_exponent - from_exponent / 2)),
        down_first_(PowerOfTwo(-to_exponent / 2)),
        down_second_(PowerOfTwo(-to_exponent - -to_exponent / 2)) {}

  ATTN_HD uint4 Moved(uint4 x) const {
    return make_uint4(Moved(x.x), Moved(x.y), Moved(x.z), Moved(x.w));
  }

 private:
  ATTN_HD uint32_t Moved(uint32_t word) const {
    const uint32_t moved = ptx::PackRounded(Moved(ptx::LowHalf(word)), Moved(ptx::HighHalf(word)));
    return OrNaN(word & 0xffffu, moved & 0xffffu) | OrNaN(word >> 16, moved >> 16) << 16;
  }
  // Multiplies in two steps each, because one factor alone may lie beyond float32.
  ATTN_HD float Moved(float x) const {
    const uint32_t bits = BFloat16InUpperHalf(x * up_first_ * up_second_) & 0xffff0000u;
    return ptx::BitsFloat(bits) * down_first_ * down_second_;
  }
  ATTN_HD static uint32_t OrNaN(uint32_t half, uint32_t moved) {
    return (half & 0x7fffu) > 0x7c00u ? (half & 0x8000u) | 0x7e00u : moved;
  }

  float up_first_, up_second_, down_first_, down_second_;
};

struct KeepRowsKernel {
  static constexpr int kThreads = 256;
  struct Shared {};

  ATTN_HD static void Run(const LaunchParams& params, ThreadIndex at, Shared&) {
    const TileWork& tile = params.tiles[at.block];
    const ProblemDesc& p = params.problems[tile.problem];
    const SequenceDesc& s = p.sequences[tile.batch];
    const int row = tile.tile * kDqBlockRows + (at.thread >> 2), first = at.thread & 3;
    if (tile.head < p.q_heads) {
      if (row < s.q_len) Move(p, s, p.o, p.kept_o, tile.head, int64_t{s.q_begin} + row, first);
    } else if (row < s.kv_len) {
      Move(p, s, p.v, p.kept_v, tile.head - p.q_heads, int64_t{s.kv_begin} + row, first);
    }
  }

 private:
  ATTN_HD static void Move(const ProblemDesc& p, const SequenceDesc& s, const RowTensor& from,
                           const RowTensor& to, int head, int64_t row, int first_chunk) {
    const ScaleMover mover(p.v_exponent, p.kept_v_exponent);
    const char* in = RowOf(from, s.batch, head, row);
    char* out = RowOf(to, s.batch, head, row);
    for (int c = first_chunk; c < p.v_chunks; c += 4) {
      ptx::StoreGlobal128(out + c * 16, mover.Moved(ptx::LoadConstant128(in + c * 16)));
    }
  }
};

}  // namespace attnd::sm70
