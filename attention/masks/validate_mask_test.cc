// Every way to be refused, by the text that a caller reads.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "attention/masks/mask_description.h"
#include "tests/masks/small_masks.h"

namespace attnd {
namespace {

const MaskCall kCall = {2, 4, 16, 24, {0}};

using Integers = std::vector<uint32_t>;

std::string Refusal(const MaskSpec& spec, const MaskCall& call = kCall) {
  const absl::Status status = ValidateMask(spec, call);
  if (status.ok()) return "accepted";
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MaskDescription::Make(spec, call).status(), status);
  return std::string(status.message());
}
std::string Refusal(MaskPattern pattern) { return Refusal(SpecOf({std::move(pattern)})); }
template <class Op>
std::string RefusalOf(Op op) {
  return Refusal(MaskExpr{std::move(op), {}});
}

TEST(ValidateMask, RefusesExpressions) {
  const std::string at = "problem.mask.pattern[0].expr.";
  EXPECT_EQ(RefusalOf(RelativeWindow{-2, 0}), at + "window.left: expected -1 or above, got -2");
  EXPECT_EQ(RefusalOf(RelativeWindow{0, -9}), at + "window.right: expected -1 or above, got -9");
  EXPECT_EQ(RefusalOf(Dilated{0, 1, 1}), at + "dilated.step: expected 1 or above, got 0");
  EXPECT_EQ(RefusalOf(Dilated{2, -2, 1}), at + "dilated.left: expected -1 or above, got -2");
  EXPECT_EQ(RefusalOf(Dilated{2, 1, -2}), at + "dilated.right: expected -1 or above, got -2");
  EXPECT_EQ(RefusalOf(StrideRel{0, 0}), at + "stride_rel.p: expected 1 or above, got 0");
  EXPECT_EQ(RefusalOf(StrideRel{4, 4}), at + "stride_rel.phase: expected 0..3, got 4");
  EXPECT_EQ(RefusalOf(StrideCol{0, 0, 0}), at + "stride_col.p: expected 1 or above, got 0");
  EXPECT_EQ(RefusalOf(StrideCol{4, 0, 5}), at + "stride_col.hi: expected 0..4, got 5");
  EXPECT_EQ(RefusalOf(StrideCol{4, 3, 2}), at + "stride_col.lo: expected 0..2, got 3");
  EXPECT_EQ(RefusalOf(BlockWindow{0, 0, 0, {}}), at + "block_window.p: expected 1 or above, got 0");
  EXPECT_EQ(RefusalOf(BlockWindow{4, 1, 0, {}}),
            at + "block_window.hi: expected 1 or above, got 0");
  EXPECT_EQ(RefusalOf(BlockWindow{4, 0, 0, {1, 2, 3}}),
            at + "block_window.shift: expected 1 or batch = 2 entries, got 3");
  EXPECT_EQ(RefusalOf(Global{{1, 2}, {1}}),
            at + "global.end: expected as many as start = 2 entries, got 1");
  EXPECT_EQ(RefusalOf(Global{{3}, {2}}), at + "global.start[0]: expected at most its end 2, got 3");
  EXPECT_EQ(RefusalOf(Global{{1, 3}, {4, 5}}),
            at + "global.start[1]: expected at least the end before it 4, got 3");
  EXPECT_EQ(RefusalOf(Global{{}, {}, static_cast<GlobalDirection>(3)}),
            at + "global.direction: expected 0..2, got 3");
  EXPECT_EQ(RefusalOf(Prefix{{}}), at + "prefix.len: expected 1 or batch = 2 entries, got 0");
  EXPECT_EQ(RefusalOf(Prefix{{1, 2, 3}}),
            at + "prefix.len: expected 1 or batch = 2 entries, got 3");
  EXPECT_EQ(RefusalOf(Segment{{}}), at + "segment.cu: expected at least one entry, got 0");
  EXPECT_EQ(RefusalOf(Segment{{1, 2}}), at + "segment.cu[0]: expected 0, got 1");
  EXPECT_EQ(RefusalOf(Segment{{0, 5, 4}}), at + "segment.cu[2]: expected at least 5, got 4");
  EXPECT_EQ(RefusalOf(Groups{Integers(15), Integers(24)}),
            at + "groups.row: expected rows = 16 entries, got 15");
  EXPECT_EQ(RefusalOf(Groups{Integers(16), Integers(25)}),
            at + "groups.key: expected keys = 24 entries, got 25");
  EXPECT_EQ(RefusalOf(Groups{Integers(16), Integers(24), true}),
            at + "groups.row: expected batch·rows = 32 entries, got 16");
  EXPECT_EQ(RefusalOf(RandomBlocks{0, 1}), at + "random.block: expected 1 or above, got 0");
  EXPECT_EQ(RefusalOf(PatternRef{0}),
            at + "pattern_ref: expected an earlier pattern, below 0, got 0");
  EXPECT_EQ(RefusalOf(std::monostate{}),
            "problem.mask.pattern[0].expr: expected an operation, got none");
}

TEST(ValidateMask, NamesTheWayToANode) {
  const MaskExpr bad = {Dilated{0, 0, 0}, {}}, good = {AllKeys{}, {}};
  const std::string what = "dilated.step: expected 1 or above, got 0";
  const MaskExpr negated = {Negate{}, {bad}};
  const MaskExpr any = {AnyOf{}, {good, negated}};
  EXPECT_EQ(Refusal(MaskExpr{AllOf{}, {good, good, any}}),
            "problem.mask.pattern[0].expr.all_of.e[2].any_of.e[1].negate." + what);
  EXPECT_EQ(Refusal(MaskExpr{RandomBlocks{4, 1}, {bad}}),
            "problem.mask.pattern[0].expr.random.exclude." + what);
  EXPECT_EQ(Refusal(ColRuns{.base = bad}), "problem.mask.pattern[0].col_runs.base." + what);
  BlockList list = {.bq = 16, .bk = 24, .indptr = {0, 0}};
  list.partial_expr = bad;
  EXPECT_EQ(Refusal(list), "problem.mask.pattern[0].blocks.partial_expr." + what);
  MaskSpec spec = SpecOf({good});
  spec.pattern.push_back(good);
  spec.pattern.push_back(bad);
  EXPECT_EQ(Refusal(spec), "problem.mask.pattern[2].expr." + what);
}

TEST(ValidateMask, RefusesWrongNumbersOfOperands) {
  const MaskExpr good = {AllKeys{}, {}};
  EXPECT_EQ(Refusal(MaskExpr{Negate{}, {}}),
            "problem.mask.pattern[0].expr.negate: expected one operand, got 0");
  EXPECT_EQ(Refusal(MaskExpr{AllKeys{}, {good}}),
            "problem.mask.pattern[0].expr: expected no operands, got 1");
  EXPECT_EQ(Refusal(MaskExpr{RandomBlocks{4, 1}, {good, good}}),
            "problem.mask.pattern[0].expr.random.exclude: expected at most one, got 2");
}

BlockList GoodBlocks() {
  BlockList list = {.bq = 8, .bk = 8, .indptr = {0, 2, 3}, .indices = {0, 2, 1}};
  list.kind = {0, 1, 1};
  list.bitmaps = std::vector<uint8_t>(16, 0x55);
  return list;
}

TEST(ValidateMask, RefusesBlocks) {
  const auto refusal = [](const std::function<void(BlockList&)>& change) {
    BlockList list = GoodBlocks();
    change(list);
    const std::string text = Refusal(list), at = "problem.mask.pattern[0].blocks.";
    return text.rfind(at, 0) == 0 ? text.substr(at.size()) : text;
  };
  EXPECT_EQ(refusal([](BlockList&) {}), "accepted");
  EXPECT_EQ(refusal([](BlockList& l) { l.bq = 0; }), "bq: expected 1..1048576, got 0");
  EXPECT_EQ(refusal([](BlockList& l) { l.bk = 1 << 21; }), "bk: expected 1..1048576, got 2097152");
  EXPECT_EQ(refusal([](BlockList& l) {
              l.indptr = {0, 3};
            }),
            "indptr: expected ⌈rows / bq⌉ + 1 = 3 entries, got 2");
  EXPECT_EQ(refusal([](BlockList& l) { l.indptr = {1, 2, 3}; }), "indptr[0]: expected 0, got 1");
  EXPECT_EQ(refusal([](BlockList& l) {
              l.indptr = {0, 4, 3};
            }),
            "indptr[2]: expected at least 4, got 3");
  EXPECT_EQ(refusal([](BlockList& l) {
              l.indptr = {0, 2, 4};
            }),
            "indptr[2]: expected the number of indices 3, got 4");
  EXPECT_EQ(refusal([](BlockList& l) {
              l.indices = {0, 3, 1};
            }),
            "indices[1]: expected 1..2, ascending, got 3");
  EXPECT_EQ(refusal([](BlockList& l) {
              l.indices = {2, 2, 1};
            }),
            "indices[1]: expected 3..2, ascending, got 2");
  EXPECT_EQ(refusal([](BlockList& l) {
              l.indices = {2, 1, 1};
            }),
            "indices[1]: expected 3..2, ascending, got 1");
  EXPECT_EQ(refusal([](BlockList& l) { l.kind = {0}; }),
            "kind: expected none, or indices = 3 entries, got 1");
  EXPECT_EQ(refusal([](BlockList& l) { l.kind[1] = 2; }), "kind[1]: expected 0 or 1, got 2");
  EXPECT_EQ(refusal([](BlockList& l) { l.bitmaps.pop_back(); }),
            "bitmaps: expected 2 partial blocks · 8 bytes, or partial_expr, got 15 bytes");
  EXPECT_EQ(refusal([](BlockList& l) { l.kind = {}; }),
            "bitmaps: expected 0 partial blocks · 8 bytes, or partial_expr, got 16 bytes");
  EXPECT_EQ(refusal([](BlockList& l) {
              l.partial_expr = MaskExpr{AllKeys{}, {}};
            }),
            "bitmaps: expected none beside partial_expr, got 16");
  EXPECT_EQ(refusal([](BlockList& l) { l.bitmap_of = {0}; }),
            "bitmap_of: expected the number of partial blocks = 2 entries, got 1");
  EXPECT_EQ(refusal([](BlockList& l) {
              l.bitmap_of = {0, 2};
            }),
            "bitmap_of[1]: expected below the number of bitmaps 2, got 2");
  EXPECT_EQ(refusal([](BlockList& l) {
              l.bitmap_of = {0, 1}, l.bitmaps.pop_back();
            }),
            "bitmaps: expected a multiple of 8 bytes, got 15 bytes");
  EXPECT_EQ(refusal([](BlockList& l) {
              l.bitmaps.clear(), l.bitmap_of = {0, 0}, l.partial_expr = MaskExpr{AllKeys{}, {}};
            }),
            "bitmap_of: expected none beside partial_expr, got 2");
  EXPECT_EQ(refusal([](BlockList& l) { l.order = static_cast<BitOrder>(2); }),
            "order: expected 0..1, got 2");
  EXPECT_EQ(refusal([](BlockList& l) { l.bk = 12, l.order = BitOrder::kTile8ColumnMajor; }),
            "indices[1]: expected 1..1, ascending, got 2");
  EXPECT_EQ(refusal([](BlockList& l) {
              l.bk = 9, l.order = BitOrder::kTile8ColumnMajor, l.bitmaps.resize(18);
            }),
            "bk: expected a multiple of 8 for BIT_ORDER_TILE8_COLUMN_MAJOR, got 9");
}

TEST(ValidateMask, RefusesRuns) {
  const std::string at = "problem.mask.pattern[0].";
  EXPECT_EQ(Refusal(ColRuns{2, Integers(47), Integers(48), {}}),
            at + "col_runs.start: expected keys·m = 48 entries, got 47");
  EXPECT_EQ(Refusal(ColRuns{1, Integers(24), Integers(23), {}}),
            at + "col_runs.end: expected keys·m = 24 entries, got 23");
  EXPECT_EQ(Refusal(ColRuns{1, Integers(24, 5), Integers(24, 4), {}}),
            at + "col_runs.start[0]: expected at most its end 4, got 5");
  EXPECT_EQ(Refusal(ColRuns{1, Integers(24, 5), Integers(24, 5), {}}), "accepted");
  EXPECT_EQ(Refusal(RowRuns{1, Integers(15), Integers(16), Integers(16)}),
            at + "row_runs.first: expected rows·r = 16 entries, got 15");
  EXPECT_EQ(Refusal(RowRuns{1, Integers(16), Integers(17), Integers(16)}),
            at + "row_runs.stride: expected rows·r = 16 entries, got 17");
  EXPECT_EQ(Refusal(RowRuns{1, Integers(16), Integers(16), Integers(0)}),
            at + "row_runs.count: expected rows·r = 16 entries, got 0");
  EXPECT_EQ(Refusal(RowRuns{1, Integers(16), Integers(16), Integers(16, 2)}),
            at + "row_runs.stride[0]: expected 1 or above where count is above 1, got 0");
  EXPECT_EQ(Refusal(RowRuns{1, Integers(16, 9), Integers(16, 5), Integers(16, 4)}),
            at + "row_runs.count[0]: expected first + stride·(count − 1) below keys = 24, got 24");
  EXPECT_EQ(
      Refusal(RowRuns{1, Integers(16, ~0u), Integers(16, ~0u), Integers(16, ~0u)}).substr(0, 43),
      at + "row_runs.count[0]: ");
  EXPECT_EQ(Refusal(RowIntervals{1, Integers(16), Integers(15)}),
            at + "row_intervals.end: expected rows·r = 16 entries, got 15");
  EXPECT_EQ(Refusal(RowIntervals{1, Integers(16, 3), Integers(16, 2)}),
            at + "row_intervals.begin[0]: expected at most its end 2, got 3");
  EXPECT_EQ(Refusal(RowIntervals{1, Integers(16, 3), Integers(16, 25)}),
            at + "row_intervals.end[0]: expected at most keys = 24, got 25");
  EXPECT_EQ(Refusal(RowIntervals{2, Integers(32, 3), Integers(32, 5)}),
            at + "row_intervals.begin[1]: expected at least the end before it 5, got 3");
}

TEST(ValidateMask, RefusesRectanglesAndBits) {
  const std::string at = "problem.mask.pattern[0].";
  const auto rectangle = [](MaskRectangle r) { return Refusal(Rectangles{{{0, 1, 0, 1}, r}}); };
  EXPECT_EQ(rectangle({0, 17, 0, 4}), at + "rectangles.of[1].row_end: expected 0..16, got 17");
  EXPECT_EQ(rectangle({5, 4, 0, 4}), at + "rectangles.of[1].row_begin: expected 0..4, got 5");
  EXPECT_EQ(rectangle({0, 4, 0, 25}), at + "rectangles.of[1].key_end: expected 0..24, got 25");
  EXPECT_EQ(rectangle({0, 4, 5, 4}), at + "rectangles.of[1].key_begin: expected 0..4, got 5");
  EXPECT_EQ(rectangle({0, 4, 0, 4, static_cast<RectangleShape>(4)}),
            at + "rectangles.of[1].shape: expected 0..3, got 4");
  EXPECT_EQ(Refusal(Rectangles{std::vector<MaskRectangle>(65537)}),
            at + "rectangles.of: expected at most 65536 rectangles, got 65537");
  EXPECT_EQ(Refusal(MaskBitmap{23, std::vector<uint8_t>(46)}),
            at + "bits.row_pitch_bits: expected 24 or above, got 23");
  EXPECT_EQ(Refusal(MaskBitmap{25, std::vector<uint8_t>(49)}),
            at + "bits.data: expected ⌈rows·row_pitch_bits / 8⌉ = 50 bytes, got 49 bytes");
  EXPECT_EQ(Refusal(MaskBitmap{25, std::vector<uint8_t>(50)}), "accepted");
}

TEST(ValidateMask, RefusesMasks) {
  const MaskExpr all = {AllKeys{}, {}};
  MaskSpec spec = SpecOf({all});
  EXPECT_EQ(Refusal(spec), "accepted");
  spec.pattern_of = {0, 0, 0};
  EXPECT_EQ(Refusal(spec),
            "problem.mask.pattern_of: expected 1, q_heads = 4 or batch·q_heads = 8 entries, got 3");
  spec.pattern_of = {0, 0, 1, 0};
  EXPECT_EQ(Refusal(spec),
            "problem.mask.pattern_of[2]: expected below the number of patterns 1, got 1");
  spec = SpecOf({std::monostate{}});
  EXPECT_EQ(Refusal(spec),
            "problem.mask.pattern[0]: expected one of expr, blocks, col_runs, row_runs, bits, "
            "row_intervals, rectangles, got none");
  spec = SpecOf({all});
  spec.empty_row = static_cast<EmptyRow>(2);
  EXPECT_EQ(Refusal(spec), "problem.mask.empty_row: expected 0..1, got 2");
  spec.pattern.clear();
  EXPECT_EQ(Refusal(spec), "problem.mask.pattern: expected 1..4096 patterns, got 0");
  spec.pattern.assign(4097, all);
  EXPECT_EQ(Refusal(spec), "problem.mask.pattern: expected 1..4096 patterns, got 4097");
}

TEST(ValidateMask, RefusesPlacesBeyondTheMask) {
  MaskSpec spec = SpecOf({MaskExpr{AllKeys{}, {}}});
  spec.origin.row_begin = 1;
  EXPECT_EQ(Refusal(spec),
            "problem.mask.extents.rows: expected at least origin + the problem's = 17, got 16");
  spec.extents.rows = 17;
  EXPECT_EQ(Refusal(spec), "accepted");
  spec.origin.key_begin = -1;
  EXPECT_EQ(Refusal(spec), "problem.mask.origin.key_begin: expected 0..1048576, got -1");
  spec.origin = {0, 0, 3, 0};
  spec.extents.batch = 4;
  EXPECT_EQ(Refusal(spec),
            "problem.mask.extents.batch: expected at least origin + the problem's = 5, got 4");
  spec.origin = {};
  spec.extents = {0, 3, 0, 0};
  EXPECT_EQ(Refusal(spec),
            "problem.mask.extents.q_heads: expected at least origin + the problem's = 4, got 3");
  spec.extents = {0, 0, 0, (1 << 20) + 1};
  EXPECT_EQ(Refusal(spec), "problem.mask.extents.keys: expected 0..1048576, got 1048577");
}

TEST(ValidateMask, BoundsDepthWithWhatIsReferredTo) {
  MaskExpr chain = {AllKeys{}, {}};
  for (int n = 0; n < 15; ++n) chain = {Negate{}, {chain}};
  EXPECT_EQ(Refusal(chain), "accepted");  // 16 deep
  const MaskExpr deeper = {Negate{}, {chain}};
  EXPECT_NE(Refusal(deeper).find("negate: expected a depth of at most 16, got 17"),
            std::string::npos)
      << Refusal(deeper);
  MaskSpec spec = SpecOf({chain});
  spec.pattern.push_back(MaskExpr{PatternRef{0}, {}});
  EXPECT_EQ(Refusal(spec),
            "problem.mask.pattern[1].expr.pattern_ref: expected a depth of at most 16, got 17");
}

TEST(ValidateMask, BoundsNodesWithWhatIsReferredTo) {
  const auto many = [](size_t count) {
    return MaskExpr{AnyOf{}, std::vector<MaskExpr>(count, {AllKeys{}, {}})};
  };
  EXPECT_EQ(Refusal(many(4094)), "accepted");  // with the pattern and any_of 4096
  EXPECT_EQ(Refusal(many(4096)),
            "problem.mask.pattern[0].expr.any_of.e[4094]: expected at most 4096 nodes in a pattern "
            "with what it refers to, got more");
  // Each pattern names the one before it four times.
  MaskSpec spec = SpecOf({many(2)});
  for (uint32_t n = 0; n < 6; ++n) {
    const MaskExpr ref = {PatternRef{n}, {}};
    spec.pattern.push_back(MaskExpr{AnyOf{}, {ref, ref, ref, ref}});
  }
  EXPECT_NE(Refusal(spec).find("expected at most 4096 nodes in a pattern with what it refers to"),
            std::string::npos)
      << Refusal(spec);
  spec = SpecOf({many(3000)});
  spec.pattern.push_back(many(2000));
  EXPECT_NE(Refusal(spec).find("expected at most 4096 nodes in all patterns"), std::string::npos)
      << Refusal(spec);
}

}  // namespace
}  // namespace attnd
