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

// The 16 bytes of the columns that stand with this one between multiples of 16.
ATTN_HD PhiloxBlock ElementwiseDropoutBytes(const DropoutStream& stream, uint32_t row,
                                            uint32_t column) {
  return Philox4x32x7({{stream.offset_lo, row, column >> 4, 0x80000000u}}, stream.key_lo,
                      stream.key_hi);
}
ATTN_HD uint32_t ElementwiseDropoutByteOf(uint32_t word, uint32_t column) {
  return (word >> ((column & 3) * 8)) & 0xff;
}
// The byte that decides element (row, column): dropped iff it is below the threshold.
ATTN_HD uint32_t ElementwiseDropoutByte(const DropoutStream& stream, uint32_t row,
                                        uint32_t column) {
  const PhiloxBlock bytes = ElementwiseDropoutBytes(stream, row, column);
  return ElementwiseDropoutByteOf(bytes.word[(column & 15) >> 2], column);
}

}  // namespace attnd
