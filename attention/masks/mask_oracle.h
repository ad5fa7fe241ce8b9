// MaskOracle: one score's fate by the definition of each kind, in plain loops over the spec as it
// was sent. It shares nothing with validation, canonical form or compilation, which are tested
// against it; the reference engine asks it. Slow: a call costs the size of what it looks through.
// One thread at a time, since it remembers the random blocks that it has drawn. Errors: none, the
// spec is valid for the call (ValidateMask).
#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "attention/masks/mask_spec.h"

namespace attnd {

class MaskOracle {
 public:
  // Both outlive it. The origin is the spec's; extents that are 0 are the call's.
  MaskOracle(const MaskSpec& spec, const MaskCall& call);

  // Whether row i of query head h of batch entry or sequence b sees key j, by the mask alone.
  bool IsVisible(int64_t b, int64_t h, int64_t i, int64_t j) const;

 private:
  struct Place {  // of one score, in the mask's coordinates
    int64_t batch, head, query, row, key;
    int64_t row_to_query;  // query − row, the same for all of a batch entry
  };

  bool Sees(const MaskPattern& pattern, const Place& at) const;
  bool Holds(const MaskExpr& expr, const Place& at) const;
  bool SeesBlock(const BlockList& list, const Place& at) const;
  bool SeesRandom(const MaskExpr& expr, const RandomBlocks& random, const Place& at) const;
  std::vector<int64_t> Draw(const MaskExpr& expr, const RandomBlocks& random,
                            const Place& at) const;
  bool ExcludesAll(const MaskExpr& excluded, int64_t block, int64_t key_block,
                   const Place& at) const;

  const MaskSpec& spec_;
  const MaskCall& call_;
  MaskExtents extents_;
  // By node, batch entry, head and row of blocks.
  mutable std::map<std::tuple<const MaskExpr*, int64_t, int64_t, int64_t>, std::vector<int64_t>>
      drawn_;
};

}  // namespace attnd
