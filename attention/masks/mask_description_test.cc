// The canonical form: spellings that are one mask have one id, and masks that differ have two.
#include "attention/masks/mask_description.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "tests/masks/small_masks.h"

namespace attnd {
namespace {

const MaskCall kLongCall = {2, 4, 100, 120, {0}};

MaskExpr Every() { return {AllKeys{}, {}}; }
MaskExpr Rel(uint32_t p, uint32_t phase = 0) { return {StrideRel{p, phase}, {}}; }
MaskExpr Col(uint32_t p, uint32_t lo, uint32_t hi) { return {StrideCol{p, lo, hi}, {}}; }
MaskExpr Columns(std::vector<uint32_t> start, std::vector<uint32_t> end) {
  return {Global{std::move(start), std::move(end), GlobalDirection::kColumns}, {}};
}

std::shared_ptr<const MaskDescription> Make(const MaskSpec& spec) {
  auto mask = MaskDescription::Make(spec, kLongCall);
  EXPECT_TRUE(mask.ok()) << mask.status();
  return *mask;
}
std::string IdOf(const MaskSpec& spec) {
  const MaskId& id = Make(spec)->id();
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(id.data()), id.size()));
}
std::string IdOf(MaskPattern pattern) { return IdOf(SpecOf({std::move(pattern)})); }

TEST(CanonicalMask, FollowsDeMorgan) {
  EXPECT_EQ(IdOf(Not(All({Rel(3), Col(5, 0, 2)}))), IdOf(Any({Not(Rel(3)), Not(Col(5, 0, 2))})));
  EXPECT_EQ(IdOf(Not(Any({Rel(3), Col(5, 0, 2)}))), IdOf(All({Not(Rel(3)), Not(Col(5, 0, 2))})));
  EXPECT_EQ(IdOf(Not(Not(Rel(3)))), IdOf(Rel(3)));
}

TEST(CanonicalMask, IgnoresOrderNestingAndRepetition) {
  const MaskExpr a = Rel(3), b = Col(5, 0, 2), c = Window(4, 0);
  EXPECT_EQ(IdOf(All({a, b, c})), IdOf(All({c, All({b, a}), b})));
  EXPECT_EQ(IdOf(Any({a, b, c})), IdOf(Any({Any({c}), Any({b, a, a})})));
  EXPECT_EQ(IdOf(All({a})), IdOf(a));
  EXPECT_NE(IdOf(All({a, b})), IdOf(Any({a, b})));
}

TEST(CanonicalMask, DropsWhatChangesNothing) {
  const MaskExpr a = Rel(3), nothing = Any({}), everything = Every();
  EXPECT_EQ(IdOf(All({a, everything})), IdOf(a));
  EXPECT_EQ(IdOf(Any({a, nothing})), IdOf(a));
  EXPECT_EQ(IdOf(All({a, nothing})), IdOf(nothing));
  EXPECT_EQ(IdOf(Any({a, everything})), IdOf(everything));
  EXPECT_EQ(IdOf(All({})), IdOf(everything));
  EXPECT_EQ(IdOf(Not(everything)), IdOf(nothing));
  EXPECT_EQ(IdOf(All({a, Not(a)})), IdOf(nothing));
  EXPECT_EQ(IdOf(Any({a, Not(a)})), IdOf(everything));
}

TEST(CanonicalMask, MergesWindows) {
  EXPECT_EQ(IdOf(All({Window(4, -1), Window(9, 2)})), IdOf(Window(4, 2)));
  EXPECT_EQ(IdOf(Any({Window(4, 0), Window(1, 7)})), IdOf(Window(4, 7)));
  EXPECT_EQ(IdOf(Any({Window(4, -1), Window(-1, 0)})), IdOf(Every()));
  EXPECT_EQ(IdOf(All({Not(Window(4, 0)), Not(Window(1, 7))})), IdOf(Not(Window(4, 7))));
  EXPECT_EQ(IdOf(Any({Not(Window(4, 0)), Not(Window(1, 7))})), IdOf(Not(Window(1, 0))));
}

TEST(CanonicalMask, KnowsLeavesThatAreOthers) {
  EXPECT_EQ(IdOf(Window(-1, -1)), IdOf(Every()));
  EXPECT_EQ(IdOf(Window(1 << 30, 3)), IdOf(Window(-1, 3)));
  EXPECT_EQ(IdOf(Rel(1)), IdOf(Every()));
  EXPECT_EQ(IdOf(MaskExpr{Dilated{1, 4, 2}, {}}), IdOf(Window(4, 2)));
  EXPECT_EQ(IdOf(MaskExpr{Dilated{6, -1, -1}, {}}), IdOf(Rel(6)));
  EXPECT_EQ(IdOf(Col(7, 0, 7)), IdOf(Every()));
  EXPECT_EQ(IdOf(Col(7, 3, 3)), IdOf(Any({})));
  EXPECT_EQ(IdOf(MaskExpr{BlockWindow{8, -1, 0, {11, 3}}, {}}),
            IdOf(MaskExpr{BlockWindow{8, -1, 0, {3}}, {}}));
  EXPECT_EQ(IdOf(MaskExpr{BlockWindow{8, -1, 0, {16}}, {}}),
            IdOf(MaskExpr{BlockWindow{8, -1, 0, {}}, {}}));
  EXPECT_EQ(IdOf(Columns({2, 5, 9}, {5, 7, 9})), IdOf(Columns({2}, {7})));
  EXPECT_EQ(IdOf(Columns({0, 60}, {60, 500})), IdOf(Every()));
  EXPECT_EQ(IdOf(MaskExpr{Prefix{{30, 30}}, {}}), IdOf(MaskExpr{Prefix{{30}}, {}}));
  EXPECT_EQ(IdOf(MaskExpr{Prefix{{500}}, {}}), IdOf(Every()));
  EXPECT_EQ(IdOf(MaskExpr{Segment{{0, 0, 4, 4, 9}}, {}}), IdOf(MaskExpr{Segment{{0, 4, 9}}, {}}));
  // Not all: an offset may move queries out of the document.
  EXPECT_EQ(IdOf(MaskExpr{Segment{{0, 120}}, {}}),
            IdOf(MaskExpr{Global{{0}, {120}, GlobalDirection::kRows}, {}}));
}

TEST(CanonicalMask, DropsPatternsThatNoHeadUses) {
  EXPECT_EQ(IdOf(SpecOf({Rel(3), Window(4, 0), Rel(5)}, {1})), IdOf(Window(4, 0)));
  // A pattern that another one refers to is used.
  const MaskExpr ref = {PatternRef{0}, {}};
  EXPECT_NE(IdOf(SpecOf({Rel(3), All({Window(4, 0), ref})}, {1})), IdOf(Window(4, 0)));
  EXPECT_EQ(IdOf(SpecOf({Rel(3), ref}, {1})), IdOf(Rel(3)));
}

TEST(CanonicalMask, IgnoresTheNumbersOfPatterns) {
  EXPECT_EQ(IdOf(SpecOf({Rel(3), Window(4, 0)}, {0, 1, 1, 0})),
            IdOf(SpecOf({Window(4, 0), Rel(3), Rel(3)}, {2, 0, 0, 1})));
  const auto refer = [](uint32_t a, uint32_t b) {
    return Any(
        {All({Col(5, 0, 1), {PatternRef{a}, {}}}), All({Col(5, 2, 3), {PatternRef{b}, {}}})});
  };
  const RowIntervals one = {1, std::vector<uint32_t>(100, 3), std::vector<uint32_t>(100, 9)};
  const RowIntervals two = {1, std::vector<uint32_t>(100, 50), std::vector<uint32_t>(100, 70)};
  EXPECT_EQ(IdOf(SpecOf({one, two, refer(0, 1)}, {2})), IdOf(SpecOf({two, one, refer(1, 0)}, {2})));
  EXPECT_NE(IdOf(SpecOf({one, two, refer(0, 1)}, {2})), IdOf(SpecOf({one, two, refer(1, 0)}, {2})));
}

TEST(CanonicalMask, NarrowsPatternOf) {
  const std::vector<MaskPattern> two = {Rel(3), Window(4, 0)};
  EXPECT_EQ(IdOf(SpecOf(two, {0, 1, 1, 0, 0, 1, 1, 0})), IdOf(SpecOf(two, {0, 1, 1, 0})));
  EXPECT_EQ(IdOf(SpecOf(two, {0, 0, 0, 0})), IdOf(SpecOf(two, {0})));
  EXPECT_NE(IdOf(SpecOf(two, {0, 1, 1, 0, 0, 1, 1, 1})), IdOf(SpecOf(two, {0, 1, 1, 0})));
}

TEST(CanonicalMask, CountsBatchAndHeadsWhereTheyMatterAlone) {
  MaskSpec spec = SpecOf({Rel(3)});
  spec.extents = {7, 9, 0, 0};
  EXPECT_EQ(IdOf(spec), IdOf(Rel(3)));
  EXPECT_EQ(Make(spec)->spec().extents, (MaskExtents{0, 0, 100, 120}));
  spec.extents.rows = 101;
  EXPECT_NE(IdOf(spec), IdOf(Rel(3)));
  spec.extents.rows = 0;
  spec.empty_row = EmptyRow::kReject;
  EXPECT_NE(IdOf(spec), IdOf(Rel(3)));
  EXPECT_EQ(Make(SpecOf({MaskExpr{Prefix{{3, 4}}, {}}}))->spec().extents,
            (MaskExtents{2, 0, 100, 120}));
}

TEST(CanonicalMask, BringsListsIntoOneForm) {
  // A full bitmap is a full block, an empty one no block; equal ones are one.
  BlockList list = {.bq = 50, .bk = 8};
  list.indptr = {0, 3, 5};
  list.indices = {0, 1, 2, 3, 4};
  list.kind = {0, 1, 1, 1, 1};
  const auto add = [&](uint8_t bits) { list.bitmaps.insert(list.bitmaps.end(), 50, bits); };
  add(0xff), add(0), add(0x0f), add(0x0f);
  BlockList same = {.bq = 50, .bk = 8};
  same.indptr = {0, 2, 4};
  same.indices = {0, 1, 3, 4};
  same.kind = {0, 0, 1, 1};
  same.bitmaps = std::vector<uint8_t>(50, 0x0f);
  same.bitmap_of = {0, 0};
  EXPECT_EQ(IdOf(list), IdOf(same));

  std::vector<uint32_t> zero(240), end(240), begin(240);
  RowIntervals pairs = {2, {}, {}}, wholes = {1, {}, {}};
  RowRuns runs = {2, {}, {}, {}}, run = {1, {}, {}, {}};
  for (uint32_t row = 0; row < 100; ++row) {
    pairs.begin.insert(pairs.begin.end(), {3, 7});
    pairs.end.insert(pairs.end.end(), {7, 9});
    wholes.begin.push_back(3);
    wholes.end.push_back(9);
    runs.first.insert(runs.first.end(), {5, 90});
    runs.stride.insert(runs.stride.end(), {4, 0});
    runs.count.insert(runs.count.end(), {3, 0});
    run.first.push_back(5);
    run.stride.push_back(4);
    run.count.push_back(3);
  }
  EXPECT_EQ(IdOf(pairs), IdOf(wholes));
  EXPECT_EQ(IdOf(runs), IdOf(run));
}

TEST(CanonicalMask, ReadsBothBitOrders) {
  // Only row 9, column 2 of a block of 16 × 8.
  BlockList list = {.bq = 16, .bk = 8, .indptr = std::vector<uint32_t>(8, 1), .indices = {0}};
  list.indptr[0] = 0;
  list.kind = {1};
  list.bitmaps = std::vector<uint8_t>(16, 0);
  list.bitmaps[9] = 1 << 2;
  BlockList tiled = list;
  tiled.order = BitOrder::kTile8ColumnMajor;
  tiled.bitmaps = std::vector<uint8_t>(16, 0);
  tiled.bitmaps[8 + 1] = 1 << 2;  // second tile of the column, its row 1
  EXPECT_EQ(IdOf(list), IdOf(tiled));
  tiled.bk = list.bk = 16;
  list.bitmaps = std::vector<uint8_t>(32, 0);
  list.bitmaps[9 * 2 + 1] = 1 << 2;  // row 9, column 10
  tiled.bitmaps = std::vector<uint8_t>(32, 0);
  tiled.bitmaps[3 * 8 + 1] = 1 << 2;  // tiles (0, 0), (1, 0), (0, 1), (1, 1)
  EXPECT_EQ(IdOf(list), IdOf(tiled));
}

// From the encoding written down apart. AnyOfThese other implementation has to give these.
TEST(MaskId, IsTheKnownOne) {
  EXPECT_EQ(IdOf(Every()), "6640665fdd4960c69bb0abdfed2c275cc9473f5e58f5ff6b92df36b1e4527f97");
  EXPECT_EQ(IdOf(Any({Window(4, 0), Rel(3)})),
            "d959f8e24ec4b2ee9709714a3e3263a3200d7ad5536331ff699255fe630e6c3c");
}

TEST(MaskDescription, KnowsWhetherItDependsOnTheDiagonal) {
  const RowIntervals list = {0, {}, {}};
  EXPECT_TRUE(Make(SpecOf({Window(4, 0)}))->depends_on_diagonal());
  EXPECT_TRUE(Make(SpecOf({All({Col(5, 0, 1), Not(Rel(3))})}))->depends_on_diagonal());
  EXPECT_FALSE(Make(SpecOf({Col(5, 0, 1)}))->depends_on_diagonal());
  EXPECT_FALSE(Make(SpecOf({Columns({0}, {4})}))->depends_on_diagonal());
  EXPECT_FALSE(Make(SpecOf({list}))->depends_on_diagonal());
  EXPECT_FALSE(Make(SpecOf({Col(5, 0, 1), Window(4, 0)}))->depends_on_diagonal());  // not used
}

TEST(MaskDescription, CountsItsBytes) {
  RowIntervals one = {1, std::vector<uint32_t>(100, 3), std::vector<uint32_t>(100, 9)};
  RowIntervals two = {2, {}, {}};
  for (int row = 0; row < 100; ++row) {
    two.begin.insert(two.begin.end(), {3, 20});
    two.end.insert(two.end.end(), {9, 30});
  }
  EXPECT_EQ(Make(SpecOf({two}))->bytes(), Make(SpecOf({one}))->bytes() + 800);
}

}  // namespace
}  // namespace attnd
