// Rows of a tensor into a tile in shared memory by cp.async. Rows beyond the sequence and chunks
// beyond the row's end become zeros. Errors: none.
#pragma once

#include "kernels/rules/params.h"
#include "kernels/rules/score_rules.h"
#include "kernels/sm80/tile_math.h"

namespace attnd::sm80 {

// Tiles of kRows rows of `kChunks` chunks, kPitch apart, by kThreads threads.
template <int kRows, int kChunks, int kPitch, int kThreads>
class RowCopier {
 public:
  // `rows` rows starting at `data`, of which `live_chunks` chunks exist.
  ATTN_HD RowCopier(const void* data, int64_t row_bytes, int rows, int live_chunks, int thread)
      : row_bytes_(static_cast<int>(row_bytes)), rows_(rows), live_chunks_(live_chunks) {
    row_ = thread / kLine;
    chunk_ = thread % kLine;
    data_ = static_cast<const char*>(data) + chunk_ * 16;
  }
  // Rows [first_row, first_row + kRows).
  ATTN_HD void Copy(int first_row, void* tile) const {
#pragma unroll
    for (int n = 0; n < kRows; n += kRowsAPass) {
      const int row = n + row_;
      const bool exists = first_row + row < rows_;
      const char* from = ptx::Offset(data_, exists ? first_row + row : 0, row_bytes_);
#pragma unroll
      for (int c = 0; c < kChunks; c += kLine) {
        // Where rows are no whole lines, the last line's chunks beyond them are left alone.
        if (kChunks % kLine != 0 && c + chunk_ >= kChunks) continue;
        const bool is_live = exists && c + chunk_ < live_chunks_;
        ptx::CopyAsync(At(tile, ChunkOffset<kPitch>(row, c + chunk_)),
                       is_live ? from + c * 16 : from, is_live);
      }
    }
  }

 private:
  static constexpr int kLine = 8;  // chunks of a row at a time: 128 bytes
  static constexpr int kRowsAPass = kThreads / kLine;
  static_assert(kRows % kRowsAPass == 0);

  const char* data_;
  int row_bytes_, rows_, live_chunks_, row_, chunk_;
};

// Zero in place of infinities and NaN, in rows of a tile of PARTIAL tiles: what is hidden must not
// reach a product, even as 0·NaN. Returns whether this thread met one.
template <class Element, int kRows, int kChunks, int kPitch, int kThreads>
ATTN_HD bool LeaveOutNonFinite(void* tile, int thread) {
  bool met = false;
#pragma unroll 1
  for (int n = thread; n < kRows * kChunks; n += kThreads) {
    char* at = At(tile, ChunkOffset<kPitch>(n / kChunks, n % kChunks));
    const uint4 words = ptx::LoadShared128(at);
    const uint4 bad = NonFiniteHalves<Element>(words);
    if ((bad.x | bad.y | bad.z | bad.w) == 0) continue;
    met = true;
    ptx::StoreShared128(at, FiniteHalves<Element>(words));
  }
  return met;
}

}  // namespace attnd::sm80
