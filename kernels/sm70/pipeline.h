// Global memory → registers → shared memory, without cp.async: 128 threads bring 32 rows of 16-byte
// chunks at a time. Fetch is issued before a barrier, for the tile after next, so that it is far
// from the loads of operands (the assembler would share their scoreboard); Put stores what was
// fetched one step before. Rows beyond the sequence hold whatever the place held before (Put: their
// scores are masked by selection) or become zero (PutFinite: what a masked row of V holds must not
// reach a product, even as 0·NaN).
#pragma once

#include "kernels/rules/descriptors.h"
#include "kernels/rules/half_element.h"
#include "kernels/sm70/tile_math.h"

namespace attnd::sm70 {

inline constexpr int kStageRows = 32;

ATTN_HD uint32_t NonFiniteHalves(uint32_t word) { return Float16::NonFinite(word); }
ATTN_HD uint4 NonFiniteHalves(uint4 words) { return attnd::NonFiniteHalves<Float16>(words); }
ATTN_HD uint4 FiniteHalves(uint4 words) { return attnd::FiniteHalves<Float16>(words); }

// Rows of kChunks chunks, kPitch chunks apart in shared memory, from chunk kFirst of it on.
template <int kChunks, int kThreads, int kPitch = kChunks, int kFirst = 0>
class RowStager {
 public:
  // `rows` (at least 1) rows starting at `data`, `row_bytes` apart, of which `live_chunks` chunks
  // exist; the rest of a tile's row is zero.
  ATTN_HD RowStager(const void* data, int row_bytes, int rows, int live_chunks, int thread)
      : row_bytes_(row_bytes),
        left_(thread % kChunks < live_chunks ? rows - Row(thread / kChunks) : -kUnboundedKeys) {
    const int row = Row(thread / kChunks), chunk = thread % kChunks;
    data_ = ptx::Offset(static_cast<const char*>(data) + chunk * 16, row, row_bytes);
    place_ = ChunkOffset(row, kFirst + chunk, kPitch);
#pragma unroll
    for (int n = 0; n < kPasses; ++n) held_[n] = make_uint4(0, 0, 0, 0);
  }

  ATTN_HD void Fetch(int first_row) {
    const char* from = ptx::Offset(data_, first_row, row_bytes_);
    const int left = left_ - first_row;
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      const int rows = n * kRowsPerPass;
      ptx::LoadConstant128If(held_[n], ptx::Offset(from, rows, row_bytes_), rows < left);
    }
  }
  // `tiles` + `offset`: the rows in shared memory, those from the 17th on `jump` bytes further.
  ATTN_HD void Put(void* tiles, int offset, int jump = 0) const {
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      ptx::StoreShared128(PlaceOf(tiles, offset, jump, n), held_[n]);
    }
  }
  // The same, but rows beyond the sequence, infinities and NaN become zero. Returns whether this
  // thread met one of the latter. `kSeldom`: a warp looks first whether it has any. By whole warps.
  template <bool kSeldom>
  ATTN_HD bool PutFinite(void* tiles, int offset, int jump, int first_row) const {
    if constexpr (kSeldom) {
      uint32_t odd = 0;  // the exponent of an infinity or NaN carries into the sign's place
#pragma unroll
      for (int n = 0; n < kPasses; ++n) {
        odd |= ((held_[n].x & kExponents) + kCarry) | ((held_[n].y & kExponents) + kCarry);
        odd |= ((held_[n].z & kExponents) + kCarry) | ((held_[n].w & kExponents) + kCarry);
      }
      const bool is_cut = (kPasses - 1) * kRowsPerPass >= left_ - first_row;
      if (!ptx::VoteAny(is_cut || (odd & 0x80008000u))) {
        Put(tiles, offset, jump);
        return false;
      }
    }
    uint32_t met = 0;
#pragma unroll
    for (int n = 0; n < kPasses; ++n) {
      const bool exists = n * kRowsPerPass < left_ - first_row;
      uint4 words = exists ? held_[n] : make_uint4(0, 0, 0, 0);
      ptx::StoreShared128(PlaceOf(tiles, offset, jump, n),
                          make_uint4(Finite(words.x, met), Finite(words.y, met),
                                     Finite(words.z, met), Finite(words.w, met)));
    }
    return met != 0;
  }

 private:
  static constexpr uint32_t kExponents = 0x7c007c00u, kCarry = 0x04000400u;
  static constexpr int kRowsPerPass = kThreads / kChunks;
  // A lone warp brings half as many.
  static constexpr int kPasses = kStageRows / (kThreads == kWarpLanes ? 2 : 1) / kRowsPerPass;
  static_assert((kRowsPerPass & (kRowsPerPass - 1)) == 0 && kPitch >= 8, "PlaceOf needs both");

  // Two short rows that are stored together lie in different halves of their lines.
  ATTN_HD static int Row(int n) { return kChunks > 4 ? n : (n & ~5) | (n & 1) << 2 | (n >> 2 & 1); }
  // The thread's first row is below kRowsPerPass, so what a later pass adds to the row only flips
  // bits of the twist.
  ATTN_HD char* PlaceOf(void* tiles, int offset, int jump, int pass) const {
    const int rows = pass * kRowsPerPass;
    return static_cast<char*>(tiles) + ((offset + place_) ^ (Twist(rows) * 16)) +
           rows * kPitch * 16 + (rows >= kStageRows / 2 ? jump : 0);
  }
  ATTN_HD static uint32_t Finite(uint32_t word, uint32_t& met) {
    const uint32_t bad = NonFiniteHalves(word);
    met |= bad;
    return word & ~bad;
  }

  const char* data_;
  int row_bytes_, place_;
  int left_;  // rows of the sequence from this thread's first on; none if its chunk does not exist
  uint4 held_[kPasses];
};

}  // namespace attnd::sm70
