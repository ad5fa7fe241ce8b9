// MaskLeaf: one predicate of a mask with all its numbers bound, as a compiler asks it: about one
// row, and about a rectangle of rows and keys at once. Coordinates are the mask's: Q and I of rows,
// J of keys (mask_spec.h). Leaves point into the mask that they were made from, which outlives
// them. Immutable; any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/masks/key_run.h"
#include "attention/masks/mask_spec.h"

namespace attnd {

enum class Seen : uint8_t {
  kNone,
  kAll,
  kMixed,  // some, or not known without a look at each
};

// Rows from (query, row) on, at keys [key_begin, key_end). Never empty.
struct MaskRect {
  int64_t query, row, rows;
  int64_t key_begin, key_end;
  int64_t last_query() const { return query + rows - 1; }
  int64_t last_row() const { return row + rows - 1; }
  int64_t last_key() const { return key_end - 1; }
  int64_t keys() const { return key_end - key_begin; }
};

class MaskLeaf {
 public:
  virtual ~MaskLeaf() = default;

  // kNone and kAll are true; kMixed is where a look at each score is needed. Adds to `steps` what
  // it takes beyond one.
  virtual Seen Classify(const MaskRect& rect, int64_t& steps) const = 0;

  // Appends what the first row of `rect` sees of its keys, ascending and disjoint. Returns how many
  // rows from this one on are known to see the same of them, at least 1.
  virtual int64_t AppendRuns(const MaskRect& rect, std::vector<KeyRun>& runs) const = 0;

  // Writes what the first row of `rect` sees, key key_begin + c as bit c mod 32 of word c / 32.
  // False where AppendRuns is as good.
  virtual bool CopyRow(const MaskRect& rect, uint32_t* words) const {
    static_cast<void>(rect), static_cast<void>(words);
    return false;
  }

  // Appends numbers that are equal only for rectangles of which this leaf shows the same places,
  // for rectangles of equal size. False where it knows no such numbers.
  virtual bool AppendShape(const MaskRect& rect, std::vector<int64_t>& shape) const {
    static_cast<void>(rect), static_cast<void>(shape);
    return false;
  }
};

// Collects what a leaf has found of a rectangle, line after line.
class Finding {
 public:
  // Whether both were found, so that no other line matters.
  bool Add(Seen line) {
    is_visible_ |= line != Seen::kNone;
    is_hidden_ |= line != Seen::kAll;
    return is_visible_ && is_hidden_;
  }
  Seen result() const {
    return !is_hidden_ ? Seen::kAll : is_visible_ ? Seen::kMixed : Seen::kNone;
  }

 private:
  bool is_visible_ = false, is_hidden_ = false;
};

// Makes the leaf of an operation that is not a combination, a reference or random, for batch entry
// B of the mask.
std::unique_ptr<MaskLeaf> MakeExprLeaf(const MaskExpr& expr, const MaskExtents& extents,
                                       int64_t batch);

// Makes the leaf of a canonical list, without its partial_expr or base. Block lists whose partial
// blocks have an expression give the blocks of the wanted kind alone.
enum class BlocksWanted : uint8_t { kBoth, kFull, kPartial };
std::unique_ptr<MaskLeaf> MakeListLeaf(const MaskPattern& pattern, BlocksWanted wanted);

std::unique_ptr<MaskLeaf> MakeBlocksLeaf(const BlockList& list, BlocksWanted wanted);

// Blocks of block × block in rows of query positions: row of blocks R keeps
// indices[indptr[R − first] .. indptr[R − first + 1]), ascending.
struct DrawnBlocks {
  int64_t block = 0, first = 0;
  std::vector<uint32_t> indptr, indices;
};
std::unique_ptr<MaskLeaf> MakeDrawnLeaf(DrawnBlocks blocks);

}  // namespace attnd
