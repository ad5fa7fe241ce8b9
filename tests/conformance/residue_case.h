// Problems for tests of residue classes: two entries and heads of a few columns, under strided
// masks. Pure functions; a mask that cannot be made ends the test.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/conformance/backend_conformance.h"
#include "tests/masks/small_masks.h"

namespace attnd {

inline MaskExpr And(MaskExpr a, MaskExpr b) { return All({std::move(a), std::move(b)}); }
inline MaskExpr Stride(uint32_t p, uint32_t phase) { return Leaf(StrideRel{p, phase}); }

inline Problem Sized(int64_t q_len, int64_t kv_len) {
  Problem p;
  p.batch = 2;
  p.q_heads = 2;
  p.kv_heads = 1;
  p.q_len = q_len;
  p.kv_len = kv_len;
  p.qk_head_dim = 16;
  p.v_head_dim = 24;
  p.alignment = Alignment::kBottomRight;
  return p;
}

struct ResidueCase {
  const char* name;
  int64_t q_len, kv_len;
  MaskExpr mask;
  std::function<void(Problem&)> set = [](Problem&) {};
  bool is_whole = false;  // in every table, with all that the conformance suite checks of a case

  ConformanceCase Of(ElementType element) const {
    Problem p = Sized(q_len, kv_len);
    p.element = element;
    set(p);
    SetMask(mask, p);
    return {absl::StrCat(name, "_", ElementName(element)), p};
  }
};

}  // namespace attnd
