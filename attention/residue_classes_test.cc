// Classes by residue against the mask's own predicate: every (row, key) that the problem shows is
// in exactly one class, and no other is.
#include "attention/residue_classes.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/masks/mask_description.h"
#include "attention/masks/mask_oracle.h"
#include "tests/masks/small_masks.h"

namespace attnd {
namespace {

Problem WithMaskOver(MaskExpr expr, int64_t rows, int64_t keys, int32_t offset = 0) {
  Problem p;
  p.batch = p.q_heads = p.kv_heads = 1;
  p.q_len = rows;
  p.kv_len = keys;
  p.qk_head_dim = p.v_head_dim = 8;
  p.alignment = Alignment::kOffsets;
  p.offsets = {offset};
  SetMask(std::move(expr), p);
  return p;
}

std::vector<MaskExpr> Masks() {
  return {Leaf(StrideRel{2, 0}),
          Leaf(StrideRel{5, 3}),
          Leaf(StrideRel{64, 63}),
          Leaf(StrideRel{4000000000u, 0}),
          Leaf(StrideRel{4000000000u, 3999999999u}),
          Leaf(Dilated{3, 4, 2}),
          Leaf(Dilated{7, -1, 0}),
          Leaf(Dilated{2, 0, -1}),
          All({Leaf(StrideRel{5, 3}), Window(-1, 0)}),
          All({Leaf(StrideRel{5, 3}), Window(2, 9)}),
          All({Leaf(StrideRel{9, 8}), Window(3, 1)}),
          All({Leaf(Dilated{4, 5, 6}), Leaf(StrideRel{4, 0}), Window(9, 30)})};
}

// visible[row][key] by classes; −1 where two classes hold it.
std::vector<std::vector<int>> ByClasses(const Problem& p, const ResidueClasses& classes) {
  Problem of_class = p;
  of_class.causal = false;
  of_class.window_left = classes.window_left;
  of_class.window_right = classes.window_right;
  std::vector<std::vector<int>> seen(p.q_len, std::vector<int>(p.kv_len));
  const Sequence whole = p.SequenceAt(0);
  for (int64_t c = 0; c < classes.Count(whole); ++c) {
    const Sequence s = classes.ClassAt(whole, c);
    for (int64_t r = 0; r < s.q_len; ++r) {
      const KeyRange range = of_class.VisibleRange(s, r);
      for (int64_t t = range.begin; t < range.end; ++t) {
        int& cell = seen[s.q_begin + r * classes.p][s.kv_begin + t * classes.p];
        EXPECT_EQ(c, classes.ResidueOfKey(whole, s.kv_begin + t * classes.p));
        cell = cell == 0 ? 1 : -1;
      }
    }
  }
  return seen;
}

void ExpectTheMasksOwn(const Problem& p, const std::string& what) {
  const absl::StatusOr<ResidueClasses> classes = ResidueClassesOf(p);
  std::vector<std::vector<int>> seen(p.q_len, std::vector<int>(p.kv_len));
  if (classes.ok()) {
    seen = ByClasses(p, *classes);
  } else {
    EXPECT_EQ(classes.status().message(), "problem.mask: shows nothing") << what;
  }
  const MaskCall call = MaskCallOf(p);
  const MaskOracle oracle(p.mask->spec(), call);
  const Sequence whole = p.SequenceAt(0);
  for (int64_t i = 0; i < p.q_len; ++i) {
    const KeyRange range = p.VisibleRange(whole, i);
    for (int64_t j = 0; j < p.kv_len; ++j) {
      const bool visible = j >= range.begin && j < range.end && oracle.IsVisible(0, 0, i, j);
      ASSERT_EQ(seen[i][j], visible) << what << ", row " << i << ", key " << j;
    }
  }
}

TEST(ResidueClasses, HoldEachVisibleScoreOnce) {
  const std::pair<int64_t, int64_t> sizes[] = {{1, 1}, {13, 20}, {70, 66}, {3, 70}};
  int n = 0;
  for (const MaskExpr& mask : Masks()) {
    for (const auto& [rows, keys] : sizes) {
      for (int32_t offset : {0, 1, -5, 40}) {
        Problem p = WithMaskOver(mask, rows, keys, offset);
        const std::string what = absl::StrCat("mask ", n, ", ", rows, " x ", keys, ", ", offset);
        ExpectTheMasksOwn(p, what);
        p.causal = true;
        ExpectTheMasksOwn(p, what + ", causal");
        p.window_left = 6;
        ExpectTheMasksOwn(p, what + ", causal, left 6");
        p.causal = false;
        p.window_right = 4;
        ExpectTheMasksOwn(p, what + ", window 6, 4");
      }
    }
    ++n;
  }
}

TEST(ResidueClasses, SayWhichFieldKeepsAProblemFromBeingCut) {
  Problem p = WithMaskOver(Leaf(StrideRel{5, 3}), 20, 20);
  p.dropout.threshold = 3;
  EXPECT_EQ(ResidueClassesOf(p).status().message(), "problem.dropout: drawn for blocks of scores");
  for (const MaskExpr& mask :
       {Leaf(StrideCol{8, 1, 2}), Window(3, 3), All({Leaf(StrideRel{5, 3}), Leaf(StrideRel{6, 3})}),
        All({Leaf(StrideRel{5, 3}), Leaf(Prefix{{7}})}),
        MaskExpr{.op = Negate(), .of = {Leaf(StrideRel{5, 3})}}}) {
    const absl::Status status = ResidueClassesOf(WithMaskOver(mask, 20, 20)).status();
    EXPECT_TRUE(absl::IsUnimplemented(status));
    EXPECT_EQ(status.message(), "problem.mask: no stride or dilated window for all heads");
  }
}

}  // namespace
}  // namespace attnd
