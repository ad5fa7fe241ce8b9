// Tile: how a kernel cuts one (batch entry, head) into work for a block. TileMath: what an
// architecture provides so that rules on scores never learn it: a score tile lies spread over
// lanes, and the lane map says which element stands where.
//
//   Math::kRows, kColumns   a lane holds kRows rows of a score tile, kColumns elements of each
//   Math::Element(r, c)     index of the lane's c-th element of its r-th row
//   Math::Row(e, lane)      row of element e within the tile
//   Math::Col(e, lane)      column, likewise
//   Math::RowMax, RowSum    over the lanes that share a row
#pragma once

#include "base/hd.h"

namespace attnd {

struct Tile {
  int q_rows;         // rows of Q that a block owns (forward) or visits at a time (backward)
  int kv_rows;        // keys that a block visits at a time (forward) or owns (backward)
  int head_dim;       // D and Dv are padded with zeros to it
  int blocks_per_sm;  // what its registers and shared memory must leave room for
};

template <class Math>
concept TileMath = requires(float x) {
  Math::Row(0, 0) + Math::Col(0, 0) + Math::Element(0, 0);
  x = Math::RowMax(x);
  x = Math::RowSum(x);
  requires Math::kRows >
  0 && Math::kColumns > 0;
};

}  // namespace attnd
