// Cutting a shard of one batch entry further, where its heads cannot be: by rows of Q, or by keys.
// Pure arithmetic on the Problem.
//
// A row-cut shard brings only the keys that its rows see, a key-cut one only the rows that see its
// keys; both begin where every engine's tiles do, so that a row's arithmetic is that of the uncut
// call. Pieces of rows have like shares of the scores: under a causal mask the first has most rows.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/problem.h"
#include "attention/shard.h"

namespace attnd {

// Multiples of these are where pieces begin, under a strided mask of as many times its period.
// Every engine's tiles of rows and of keys divide them (kernels/cpu/tiles.h, kernels/tiles.cc); a
// bool mask needs whole bytes of keys.
struct CutSteps {
  int64_t rows = 128;
  int64_t keys = 256;  // a multiple of 8
};

// Whether the options of the contract let a shard of `range` be cut so. Rows, forward: without
// dropout. Rows, backward: also without the gradient of a bias. Keys, forward only: without
// dropout and zero_rest.
bool MayCut(const Problem& problem, const ShardRange& range, Direction direction, Cut cut);

// About `pieces` shards, in ascending order, together `range`; at least one. A row that sees no key
// may be in none of several key cuts. MayCut has said yes.
std::vector<ShardRange> CutShard(const Problem& problem, const ShardRange& range, Cut cut,
                                 int64_t pieces, const CutSteps& steps);

}  // namespace attnd
