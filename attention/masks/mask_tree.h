// MaskTree: one pattern of a canonical mask as a tree of leaves, bound to a batch entry, a head and
// the place of a problem, with references followed. MaskTreeWalk asks it about rectangles that lie
// inside one another: what is decided for a rectangle is not asked again inside it.
// A tree is immutable, any thread; a walk is one thread's.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "attention/masks/mask_leaf.h"
#include "attention/masks/mask_spec.h"

namespace attnd {

// Work and memory so far, and how much there may be.
struct CompileBudget {
  int64_t max_steps = 0, max_bytes = 0;
  int64_t steps = 0, bytes = 0;
  bool IsSpent() const { return steps > max_steps || bytes > max_bytes; }
};

// The rows of a mask that a tree is asked about, and whose they are.
struct MaskPlace {
  int64_t batch = 0, head = 0;  // B, H
  int64_t row_to_query = 0;     // Q − I
  int64_t row_begin = 0, rows = 0;
};

// Leaves of lists, which are the same for all trees of a mask.
using ListLeaves = std::map<std::pair<const MaskPattern*, BlocksWanted>, std::shared_ptr<MaskLeaf>>;

class MaskTree {
 public:
  // OutOfRange, without a field, where random blocks take more than the budget.
  static absl::StatusOr<MaskTree> Build(const MaskSpec& canonical, uint32_t pattern,
                                        const MaskPlace& place, ListLeaves& lists,
                                        CompileBudget& budget);

  size_t node_count() const { return nodes_.size(); }
  // Finds the rectangle's keys that row `rect.row` sees, as ascending runs that do not touch.
  std::vector<KeyRun> Runs(const MaskRect& rect) const { return Runs(root_, rect); }

 private:
  friend class MaskTreeBuilder;
  friend class MaskTreeWalk;

  enum class Kind : uint8_t { kLeaf, kAllOf, kAnyOf, kNot };
  struct Node {
    Kind kind;
    std::shared_ptr<const MaskLeaf> leaf;
    std::vector<uint32_t> of;
  };

  std::vector<KeyRun> Runs(uint32_t node, const MaskRect& rect) const;

  std::vector<Node> nodes_;
  uint32_t root_ = 0;
};

// Bits of a tile, row-major: key c of row r is bit c mod 32 of word r·words_per_row + c / 32.
struct TileBits {
  int64_t rows = 0, words_per_row = 0;
  std::vector<uint32_t> words;  // [rows · words_per_row]
  uint32_t* Row(int64_t r) { return words.data() + r * words_per_row; }
};

class MaskTreeWalk {
 public:
  // Both outlive it.
  MaskTreeWalk(const MaskTree& tree, CompileBudget& budget) : tree_(tree), budget_(budget) {}

  // At depth 0 any rectangle; at depth d one inside that of the last call with depth d − 1, which
  // has given kMixed.
  Seen Classify(size_t depth, const MaskRect& rect);
  // Writes the bits of `rect`, which the last Classify of this depth has found kMixed; bits beyond
  // it become 0.
  void Fill(size_t depth, const MaskRect& rect, TileBits& bits);
  // Numbers that are equal only for rectangles whose bits are; false where they are not known. Of a
  // rectangle as for Fill.
  bool Shape(size_t depth, const MaskRect& rect, std::vector<int64_t>& shape);
  // Leaves that the last Classify of this depth has left undecided.
  int64_t MixedLeaves(size_t depth) const { return MixedLeaves(depth, tree_.root_); }

 private:
  Seen Classify(size_t depth, uint32_t node, const MaskRect& rect);
  Seen Evaluate(size_t depth, const MaskTree::Node& node, const MaskRect& rect);
  void Fill(size_t depth, uint32_t node, size_t level, const MaskRect& rect, TileBits& bits);
  void FillLeaf(const MaskLeaf& leaf, const MaskRect& rect, TileBits& bits);
  void FillOperands(size_t depth, uint32_t node, size_t level, const MaskRect& rect,
                    TileBits& bits);
  int64_t MixedLeaves(size_t depth, uint32_t node) const;
  bool AppendShape(size_t depth, uint32_t node, const MaskRect& rect, std::vector<int64_t>& shape);

  const MaskTree& tree_;
  CompileBudget& budget_;
  std::vector<std::vector<Seen>> seen_;  // [depth][node]
  std::vector<TileBits> scratch_;        // one for each level of operands
  std::vector<KeyRun> runs_;
};

}  // namespace attnd
