// Dropout's keep decisions for units of 16 rows × 32 keys (sm80/tile_math.h), whose sixteen scores
// on a lane are those of one generator call. Errors: none.
//   Keep(unit…)      decisions of a unit
//   Mask(keep, r, t) of the lane's two scores of row r and group t of 8 keys
#pragma once

#include "kernels/rules/dropout_rules.h"
#include "kernels/sm80/tile_math.h"

namespace attnd::sm80 {

struct NoDropout {
  static constexpr bool kDrops = false;
  struct Keep {};
  ATTN_HD explicit NoDropout(const ScoreContext&) {}
  ATTN_HD Keep Of(int, int, int) const { return {}; }
  ATTN_HD static uint32_t Mask(const Keep&, int, int) { return 0xffffffffu; }
};

class PhiloxDropout {
 public:
  static constexpr bool kDrops = true;
  using Keep = PhiloxBlock;  // the sign of a byte says keep
  ATTN_HD explicit PhiloxDropout(const ScoreContext& at)
      : threshold_bytes_(at.problem.dropout_threshold * 0x01010101u),
        stream_(DropoutStreamOf(at)) {}
  // The unit whose first row and key are these, multiples of 16 and 32.
  ATTN_HD Keep Of(int first_row, int first_key, int lane) const {
    PhiloxBlock bytes = DropoutBytes(stream_, first_row >> 4, first_key >> 5, lane);
#pragma unroll
    for (int n = 0; n < 4; ++n) bytes.word[n] = KeepSigns(bytes.word[n], threshold_bytes_);
    return bytes;
  }
  // PRMT spreads the signs of the lower or upper two bytes.
  ATTN_HD static uint32_t Mask(const Keep& keep, int r, int t) {
    return ptx::Permute(keep.word[2 * r + (t >> 1)], 0, t & 1 ? 0xbbaau : 0x9988u);
  }

 private:
  uint32_t threshold_bytes_;
  DropoutStream stream_;
};

}  // namespace attnd::sm80
