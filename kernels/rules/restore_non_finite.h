// restore_non_finite.h: forward kernels leave infinities and NaN out of PARTIAL tiles of V; this
// adds them to the rows of O that see them. It is slow, rare, and far from the hot loop. Errors:
// none.
#pragma once

#include "kernels/rules/dropout_rules.h"
#include "kernels/rules/half_element.h"
#include "kernels/rules/list_runs.h"

namespace attnd {

// `Rule` is that of scores; `kDrops` says whether the kernel has dropout.
template <class Element, class Rule, bool kDrops>
struct NonFiniteValues {
  // Row `row` of O, which has been written. By one thread; `tiles`: those that the row's block
  // visited, of `tile_keys` keys each. `kInAll`: the kernel leaves them out of all tiles.
  template <bool kInAll = false, class Visits>
  ATTN_HD static void Restore(const ScoreContext& at, const Visits& tiles, int tile_keys, int row) {
    const ProblemDesc& problem = at.problem;
    const SequenceDesc& s = at.sequence;
    char* out = RowOf(problem.o, s.batch, at.head, s.q_begin + row);
    const bool is_run = IsRun(problem);
    MaskLookup mask(problem.tile_lists, at.batch, at.head);
    for (int n = 0; n < tiles.count(); ++n) {
      const auto visit = tiles.Any(n);
      if (!kInAll && !visit.IsPartial()) continue;
      const int first = visit.First(), end = MinInt(first + tile_keys, s.kv_len);
      for (int key = first; key < end; ++key) {
        if (!Rule::IsVisible(at, mask, row, key)) continue;
        const char* value =
            RowOf(problem.v, s.batch, at.head / problem.group, int64_t{s.kv_begin} + key);
        bool is_dropped = false;
        if constexpr (kDrops) is_dropped = IsDropped(at, row, key);
        Add(value, problem.v_chunks * 4, is_dropped, is_run, out);
      }
    }
  }

 private:
  // An infinity counts as it is (its P is positive, however small), or as 0·∞ if it was dropped.
  ATTN_HD static void Add(const char* value, int pairs, bool is_dropped, bool is_run, char* out) {
    for (int n = 0; n < pairs; ++n) {
      const uint32_t word = Element::WordOf(value, n);
      const uint32_t bad = Element::NonFinite(word);
      if (bad == 0) continue;
      const float factor = is_dropped ? 0.0f : 1.0f;
      const float low = bad & 0xffffu ? factor * Element::Low(word) : 0.0f;
      const float high = bad >> 16 ? factor * Element::High(word) : 0.0f;
      if (is_run) {
        const uint2 old = ptx::LoadGlobal64(out + n * 8);
        StorePair(out, n * 2, ptx::BitsFloat(old.x) + low, ptx::BitsFloat(old.y) + high);
      } else {
        const uint32_t old = ptx::LoadGlobal32(out + n * 4);
        ptx::StoreGlobal32(out + n * 4,
                           Element::Pack(Element::Low(old) + low, Element::High(old) + high));
      }
    }
  }
};

}  // namespace attnd
