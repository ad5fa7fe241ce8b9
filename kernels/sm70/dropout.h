// Dropout's keep decisions in the lane maps of sm70/tile_math.h: a lane owns whole generator calls
// (attention/dropout.h), so that no random byte is made twice or thrown away.
//   NoDropout         keeps everything; costs nothing
//   PhiloxDropout     two row tiles × 32 keys a step: one call for each row tile
// The output role, which has instruction slots to spare, runs the generator for the score warp of
// its number one step ahead and leaves the decisions in shared memory (Store); the score role loads
// those of a row tile and 16-key group (Load) and takes the mask of one half2 of P (Mask): the
// lane's row r, k step k.
#pragma once

#include "kernels/rules/dropout_rules.h"
#include "kernels/sm70/tile_math.h"

namespace attnd::sm70 {

struct NoDropout {
  static constexpr bool kDrops = false;
  template <int kRowTiles, int kWarps>
  struct Words {
    static constexpr int kStep = 0, kWarp = 0;
  };
  struct Keep {};
  ATTN_HD NoDropout(const ScoreContext&, int, int) {}
  template <class Words>
  ATTN_HD void Store(void*, int) const {}
  template <class Words>
  ATTN_HD static Keep Load(const Words&, int, int, int, int) {
    return {};
  }
  ATTN_HD static uint32_t Mask(Keep, int, int) { return 0xffffffffu; }
};

// For Float32Accumulate: the lane's rows r (bit 3 of the row) and keys (bits 0, 3, 4) are what one
// call serves, so word 2r + group holds [k step][pair] of that row and group.
class PhiloxDropout {
 public:
  static constexpr bool kDrops = true;
  // Words holds, for two steps in turn, the words of a lane's two rows; the sign of a byte says
  // keep.
  template <int kRowTiles, int kWarps>
  struct Words {
    static constexpr int kTiles = kRowTiles;
    static constexpr int kWarp = kRowTiles * 256, kGroup = kWarps * kWarp, kStep = 2 * kGroup;
    uint2 signs[4][kWarps][kRowTiles][32];  // [2·step + group][warp][tile][lane]
  };
  using Keep = uint2;

  // `first_row`: of the score warp.
  ATTN_HD PhiloxDropout(const ScoreContext& at, int first_row, int lane)
      : threshold_bytes_(at.problem.dropout_threshold * 0x01010101u), stream_(DropoutStreamOf(at)) {
    using Math = Float32Accumulate;
    row_block_ = first_row >> 4;
    place_ = (Math::Row(0, lane) & 7) * 4 + (Math::Col(0, lane) >> 1);
  }

  // `first_key`: of the step's 32. `words`: this lane's of the warp and step.
  template <class Words>
  ATTN_HD void Store(void* words, int first_key) const {
#pragma unroll
    for (int m = 0; m < Words::kTiles; ++m) {
      const PhiloxBlock bytes = DropoutBytes(stream_, row_block_ + m, first_key >> 5, place_);
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        ptx::StoreShared64(static_cast<char*>(words) + m * 256 + group * Words::kGroup,
                           make_uint2(KeepSigns(bytes.word[group], threshold_bytes_),
                                      KeepSigns(bytes.word[2 + group], threshold_bytes_)));
      }
    }
  }
  // `slot`: 2·step + group.
  template <class Words>
  ATTN_HD static Keep Load(const Words& words, int slot, int warp, int m, int lane) {
    return ptx::LoadShared64(&words.signs[slot][warp][m][lane]);
  }
  // PRMT spreads the signs of the lower or upper two bytes.
  ATTN_HD static uint32_t Mask(Keep keep, int r, int k) {
    return ptx::Permute(r ? keep.y : keep.x, 0, k ? 0xbbaau : 0x9988u);
  }

 private:
  uint32_t threshold_bytes_;
  DropoutStream stream_;
  int row_block_, place_;
};

}  // namespace attnd::sm70
