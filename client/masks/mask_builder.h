// Masks by description as C++ callers write them: small values that compose.
//
//     masks::Mask mask = (masks::Window(255, 0) | masks::Global({{0, 64}})) & masks::Causal();
//     RETURN_IF_ERROR(masks::SetMask(mask.Spec(), problem));      // then Forward(problem, ...)
//     masks::SetMask(masks::PerHead({mask, masks::Causal()}), problem);
//
// What each one shows stands beside it: I and J count rows and keys of the mask, Q = I + offset is
// the position that the call's alignment gives a row (mask_spec.h). Nothing is checked here:
// SetMask says what is wrong, by the wire's name. Values; any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "attention/masks/mask_spec.h"
#include "attention/problem.h"

namespace attnd::masks {

class Mask {
 public:
  // Any kind, for example a BlockList with bitmaps. It refers to no other pattern.
  explicit Mask(MaskPattern pattern);
  // Random blocks of those that `exclude` does not hold entirely.
  Mask(const ::attnd::RandomBlocks& random, Mask exclude);

  friend Mask operator&(const Mask& a, const Mask& b);  // what both show
  friend Mask operator|(const Mask& a, const Mask& b);  // what either shows
  friend Mask operator~(Mask a);                        // what it hides
  friend bool operator==(const Mask&, const Mask&) = default;

  // For all heads and batch entries.
  MaskSpec Spec(EmptyRow empty_row = EmptyRow::kZero) const;

 private:
  friend MaskSpec PerHead(const std::vector<Mask>& masks, EmptyRow empty_row);
  template <class Operation>
  static Mask Join(Mask a, Mask b);
  // The number, among its patterns, of the one that this mask is.
  uint32_t AddTo(std::vector<MaskPattern>& patterns) const;

  std::vector<MaskPattern> lists_;  // what expr_'s PatternRefs count
  MaskExpr expr_;
};

// One for each head, or for each head of each batch entry, [batch][heads].
MaskSpec PerHead(const std::vector<Mask>& masks, EmptyRow empty_row = EmptyRow::kZero);

// Gives the problem, whose sizes and options are set, this mask. INVALID_ARGUMENT names the field.
absl::Status SetMask(const MaskSpec& spec, Problem& problem);

// ---- Expressions. mod and ⌊ ⌋ round down. A bound of −1 is none.
Mask All();
Mask Nothing();
Mask Causal();                                             // J ≤ Q
Mask Window(int32_t left, int32_t right);                  // Q − left ≤ J ≤ Q + right
Mask Dilated(uint32_t step, int32_t left, int32_t right);  // every step-th key, so many each side
Mask Stride(uint32_t p, uint32_t phase = 0);               // (Q − J) mod p = phase
Mask StrideColumns(uint32_t p, uint32_t lo, uint32_t hi);  // lo ≤ J mod p < hi
// lo ≤ ⌊(J + shift)/p⌋ − ⌊(Q + shift)/p⌋ ≤ hi; shift: none, one, or one for each batch entry.
Mask BlockWindow(uint32_t p, int32_t lo, int32_t hi, std::vector<int32_t> shift = {});

struct Interval {  // [begin, end)
  uint32_t begin = 0, end = 0;
};
// Q (rows), J (columns) or either of them in one of the intervals, which ascend and are disjoint.
Mask Global(const std::vector<Interval>& tokens,
            GlobalDirection direction = GlobalDirection::kBoth);
Mask Prefix(std::vector<uint32_t> len);  // J < len: one, or one for each batch entry
// Q and J in the same document; cu_seqlens holds where each begins, from 0, and the last one's end.
Mask Documents(std::vector<uint32_t> cu_seqlens);
Mask RandomBlocks(uint32_t block, uint32_t per_row, uint64_t seed, bool per_head = false,
                  const std::optional<Mask>& exclude = std::nullopt);

// ---- Lists. They count rows I, whatever the alignment.

// row[I] = key[J] ≠ 0; per_batch: [batch][rows] and [batch][keys].
Mask Groups(std::vector<uint32_t> row, std::vector<uint32_t> key, bool per_batch = false);
// Block (⌊I/bq⌋, ⌊J/bk⌋) of those that layout[block row][block column] keeps.
Mask Blocks(const std::vector<std::vector<bool>>& layout, uint32_t bq, uint32_t bk);
// J in one of the row's intervals, which ascend and are disjoint. One list for each row.
Mask Intervals(const std::vector<std::vector<Interval>>& of_row);
// I in none of the key's intervals (FlashMask). One list for each key.
Mask HiddenRows(const std::vector<std::vector<Interval>>& of_key);
struct Progression {  // first + stride·k for 0 ≤ k < count
  uint32_t first = 0, stride = 1, count = 0;
};
// J in one of the row's progressions (ACSR). One list for each row.
Mask Runs(const std::vector<std::vector<Progression>>& of_row);
Mask Rectangles(std::vector<MaskRectangle> of);  // their union
// dense[I][J]. What a shorter row lacks is hidden.
Mask Bits(const std::vector<std::vector<bool>>& dense);

}  // namespace attnd::masks
