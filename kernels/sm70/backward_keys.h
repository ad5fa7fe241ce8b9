// K and V of a backward block's keys: all threads bring them in whole lines and leave them
// twice in shared memory, as they are (each warp takes its operand from there) and K as dQ's
// product wants it. Fetch runs ahead of Put. Errors: none.
#pragma once

#include "kernels/sm70/backward_passes.h"
#include "kernels/sm70/pipeline.h"

namespace attnd::sm70 {

template <class Kernel>
class KeyRows {
 public:
  static constexpr int kKeys = Kernel::kKeys, kChunks = Kernel::kRowChunks;

  // Rows beyond the sequence get what its last one holds, chunks that do not exist zeros.
  ATTN_HD void Fetch(const ProblemDesc& p, const SequenceDesc& s, int kv_head, int first_key,
                     int thread) {
    const int chunk = thread % kChunks, row = first_key + Kernel::RowOfThread(thread);
    const char* from_k = RowOf(p.k, s.batch, kv_head, s.kv_begin) + chunk * 16;
    const char* from_v = RowOf(p.v, s.batch, kv_head, s.kv_begin) + chunk * 16;
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      const int from = MinInt(row + n * kRowsAPass, s.kv_len - 1);
      k_[n] = v_[n] = make_uint4(0, 0, 0, 0);
      ptx::LoadConstant128If(k_[n], ptx::Offset(from_k, from, static_cast<int>(p.k.row_stride * 2)),
                             chunk < p.qk_chunks);
      ptx::LoadConstant128If(v_[n], ptx::Offset(from_v, from, static_cast<int>(p.v.row_stride * 2)),
                             chunk < p.v_chunks);
    }
  }
  // K, then V, to `staged`; to `for_dq` K, where rows from `existing` on, infinities and NaN are
  // zero. Returns whether this thread met one of the latter.
  ATTN_HD bool Put(int thread, int existing, char* staged, char* for_dq) const {
    uint32_t met = 0;
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      const int row = Kernel::RowOfThread(thread) + n * kRowsAPass, chunk = thread % kChunks;
      const int place = ChunkOffset(row, chunk, Kernel::kChunks);
      ptx::StoreShared128(staged + place, k_[n]);
      ptx::StoreShared128(staged + Kernel::Second(place, kKeys), v_[n]);
      const uint4 words = row < existing ? Finite(k_[n], met) : make_uint4(0, 0, 0, 0);
      ptx::StoreShared128(for_dq + ChunkOffset(row, Kernel::DqChunk(chunk), Kernel::kChunks),
                          words);
    }
    return met != 0;
  }

 private:
  static constexpr int kRowsAPass = Kernel::kThreads / kChunks, kPasses = kKeys / kRowsAPass;

  ATTN_HD static uint4 Finite(uint4 words, uint32_t& met) {
    const uint4 bad = NonFiniteHalves(words);
    met |= bad.x | bad.y | bad.z | bad.w;
    return make_uint4(words.x & ~bad.x, words.y & ~bad.y, words.z & ~bad.z, words.w & ~bad.w);
  }

  uint4 k_[kPasses], v_[kPasses];
};

}  // namespace attnd::sm70
