// Dropout of single numbers of a [rows, columns] tensor, for module calls: the generator of
// dropout.h, with counters that attention's scores never have, since a block of their columns is
// below 2^15.
//     counter = (offset_lo, row, column >> 4, 0x80000000)
//     byte    = column & 15
// The key, the threshold and the scale are dropout.h's. `row` counts in the caller's whole tensor,
// so shards and recomputation drop the same numbers. Pure functions; any thread.
#pragma once

#include "attention/dropout.h"
#include "base/hd.h"

namespace attnd {

// The byte that decides element (row, column): dropped iff it is below the threshold.
ATTN_HD uint32_t ElementwiseDropoutByte(const DropoutStream& stream, uint32_t row,
                                        uint32_t column) {
  const PhiloxBlock bytes = Philox4x32x7({{stream.offset_lo, row, column >> 4, 0x80000000u}},
                                         stream.key_lo, stream.key_hi);
  const uint32_t index = column & 15;
  return (bytes.word[index >> 2] >> ((index & 3) * 8)) & 0xff;
}

}  // namespace attnd
