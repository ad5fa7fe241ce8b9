#include "proto/attnd/v1/mask_codec.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "proto/attnd/v1/mask_data.h"

namespace attnd {
namespace {

MaskExpr Leaf(auto op) { return {.op = std::move(op), .of = {}}; }

std::vector<MaskExpr> EveryExpression() {
  std::vector<uint32_t> ids(100);
  for (size_t n = 0; n < ids.size(); ++n) ids[n] = static_cast<uint32_t>(n * 997);
  return {Leaf(AllKeys()),
          Leaf(RelativeWindow{-1, 7}),
          Leaf(Dilated{4, 16, -1}),
          Leaf(StrideRel{64, 3}),
          Leaf(StrideCol{64, 56, 64}),
          Leaf(BlockWindow{64, -1, 0, {0, -5}}),
          Leaf(Global{{0, 9}, {4, 12}, GlobalDirection::kColumns}),
          Leaf(Prefix{{7, 9}}),
          Leaf(Segment{{0, 5, 40}}),
          Leaf(Groups{ids, {1, 2, 70000}, true}),
          {.op = RandomBlocks{32, 3, uint64_t{1} << 40, true}, .of = {Leaf(RelativeWindow{8, 8})}},
          {.op = AllOf(), .of = {Leaf(AllKeys()), {.op = Negate(), .of = {Leaf(AllKeys())}}}},
          {.op = AnyOf(), .of = {}},
          Leaf(PatternRef{2})};
}

std::vector<MaskPattern> EveryPattern() {
  std::vector<MaskPattern> patterns;
  for (MaskExpr& expr : EveryExpression()) patterns.emplace_back(std::move(expr));
  const std::vector<uint32_t> many(300, 200), wide(300, 70000);
  patterns.emplace_back(BlockList{.bq = 32,
                                  .bk = 16,
                                  .indptr = many,
                                  .indices = wide,
                                  .kind = {0, 1},
                                  .bitmaps = {0, 255},
                                  .order = BitOrder::kTile8ColumnMajor,
                                  .partial_expr = Leaf(RelativeWindow{1, 2}),
                                  .bitmap_of = {0}});
  patterns.emplace_back(ColRuns{2, many, wide, Leaf(AllKeys())});
  patterns.emplace_back(RowRuns{1, many, {1}, {2}});
  patterns.emplace_back(RowIntervals{2, {0, 1}, {5, 6}});
  patterns.emplace_back(Rectangles{{{0, 1, 2, 3, RectangleShape::kBand}}});
  patterns.emplace_back(MaskBitmap{64, {1, 2, 3}});
  return patterns;
}

TEST(MaskCodec, EveryKindComesBackAsItWas) {
  const MaskSpec mask{.pattern = EveryPattern(),
                      .pattern_of = {0, 1, 5},
                      .empty_row = EmptyRow::kReject,
                      .origin = {1, 2, 3, 4},
                      .extents = {5, 6, 7, 8}};
  // Through bytes, so that what protobuf drops is lost.
  v1::MaskSpec wire;
  ASSERT_TRUE(wire.ParseFromString(EncodeMaskSpec(mask).SerializeAsString()));
  absl::StatusOr<MaskSpec> back = DecodeMask(wire);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back, mask);
}

TEST(MaskCodec, EveryKindComesBackWithItsListsOutside) {
  const MaskSpec mask{.pattern = EveryPattern(), .pattern_of = {0, 1, 5}};
  const SplitMask split = EncodeSplitMask(mask);
  v1::MaskSpec wire;
  ASSERT_TRUE(wire.ParseFromString(split.spec.SerializeAsString()));
  EXPECT_LT(split.spec.ByteSizeLong(), EncodeMaskSpec(mask).ByteSizeLong() - 1000);
  const absl::StatusOr<int64_t> bytes = MaskDataBytes(wire);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_EQ(*bytes, static_cast<int64_t>(split.data.size()));
  const absl::StatusOr<MaskSpec> back = DecodeMask(wire, split.data);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back, mask);
}

// Small lists stay inside, even of a mask that is split.
TEST(MaskCodec, ListsOutsideBeginAtMultiplesOf64) {
  const std::vector<uint32_t> many(100, 7), wide(65, 70000);
  const SplitMask split =
      EncodeSplitMask({.pattern = {RowRuns{1, many, {1, 2}, wide}}, .pattern_of = {0}});
  const v1::RowRuns& runs = split.spec.pattern(0).row_runs();
  EXPECT_EQ(runs.first().count(), 100);
  EXPECT_EQ(runs.first().entry_bytes(), 1);
  EXPECT_EQ(runs.stride().value_size(), 2);
  EXPECT_EQ(runs.count().count(), 65);
  EXPECT_EQ(runs.count().entry_bytes(), 4);
  ASSERT_EQ(split.data.size(), 128 + 65 * 4);
  EXPECT_EQ(split.data[99], 7);
  EXPECT_EQ(split.data[100], 0);
  EXPECT_EQ(static_cast<uint8_t>(split.data[128]), 70000 % 256);
}

TEST(MaskCodec, RefusesListsOutside) {
  const SplitMask good =
      EncodeSplitMask({.pattern = {BlockList{.bq = 8,
                                             .bk = 8,
                                             .indptr = std::vector<uint32_t>(100, 3),
                                             .kind = {1, 1},
                                             .bitmaps = std::vector<uint8_t>(16, 3)}},
                       .pattern_of = {0}});
  const auto refusal = [&good](const std::function<void(v1::BlockList&, std::string&)>& change) {
    SplitMask mask = good;
    change(*mask.spec.mutable_pattern(0)->mutable_blocks(), mask.data);
    return std::string(DecodeMask(mask.spec, mask.data).status().message());
  };
  const std::string at = "problem.mask.pattern[0].blocks.";
  EXPECT_EQ(refusal([](auto&, auto&) {}), "");
  EXPECT_EQ(refusal([](auto&, auto& data) { data.pop_back(); }),
            "mask_data: expected 208 bytes, got 207 bytes");
  EXPECT_EQ(refusal([](auto&, auto& data) { data.push_back(0); }),
            "mask_data: expected 208 bytes, got 209 bytes");
  EXPECT_EQ(refusal([](auto& blocks, auto&) { blocks.mutable_indptr()->set_entry_bytes(3); }),
            at + "indptr.entry_bytes: expected 1, 2 or 4, got 3");
  EXPECT_EQ(refusal([](auto& blocks, auto&) { blocks.mutable_indptr()->set_data("abc"); }),
            at + "indptr.count: expected a list inside the mask or in mask_data, got both");
  EXPECT_EQ(refusal([](auto& blocks, auto&) { blocks.set_kind("abc"); }),
            at + "kind_bytes: expected a list inside the mask or in mask_data, got both");
  EXPECT_EQ(refusal([](auto& blocks, auto&) { blocks.set_bitmaps("abc"); }),
            at + "bitmaps_bytes: expected a list inside the mask or in mask_data, got both");
  // Nothing is allocated for what is announced.
  for (const uint64_t count : {uint64_t{1} << 40, ~uint64_t{0}}) {
    EXPECT_NE(refusal([count](auto& blocks, auto&) { blocks.mutable_indptr()->set_count(count); }),
              "");
  }
  EXPECT_EQ(refusal([](auto& blocks, auto&) { blocks.set_bitmaps_bytes(~uint64_t{0}); }),
            "mask_data: expected 1152921504606846976 bytes, got 208 bytes");
}

TEST(MaskCodec, SoManyNumbersLieInside) {
  v1::MaskSpec wire;
  wire.set_version(1);
  wire.add_pattern_of(0);
  v1::RowIntervals& rows = *wire.add_pattern()->mutable_row_intervals();
  const std::vector<uint32_t> half(1 << 19);
  rows.mutable_begin()->mutable_value()->Assign(half.begin(), half.end());
  rows.mutable_end()->mutable_value()->Assign(half.begin(), half.end());
  EXPECT_TRUE(DecodeMask(wire).ok());
  rows.mutable_end()->add_value(0);
  EXPECT_EQ(DecodeMask(wire).status().message(),
            "problem.mask: expected at most 1048576 numbers as `value` of its lists, more in "
            "mask_data, got 1048577");
}

TEST(MaskCodec, ListsTravelInTheNarrowestEntries) {
  for (auto [most, width] : {std::pair{255u, 1u}, {256u, 2u}, {65535u, 2u}, {65536u, 4u}}) {
    MaskSpec mask{.pattern = {RowIntervals{1, std::vector<uint32_t>(100, 0),
                                           std::vector<uint32_t>(100, most)}}};
    const v1::MaskSpec wire = EncodeMaskSpec(mask);
    const v1::MaskArray& end = wire.pattern(0).row_intervals().end();
    EXPECT_EQ(end.entry_bytes(), width);
    EXPECT_EQ(end.data().size(), 100 * width);
  }
}

struct BadCase {
  std::string expected;
  void (*spoil)(v1::MaskSpec&);
};

v1::MaskArray* End(v1::MaskSpec& mask) {
  return mask.mutable_pattern(0)->mutable_row_intervals()->mutable_end();
}

TEST(MaskCodec, NamesWhatIsWrong) {
  const BadCase cases[] = {
      {"problem.mask.version: expected 1, got 2", [](v1::MaskSpec& m) { m.set_version(2); }},
      {"problem.mask.pattern[1]: expected a pattern, got none",
       [](v1::MaskSpec& m) { m.add_pattern(); }},
      {"problem.mask.pattern[1].expr: expected an expression, got none",
       [](v1::MaskSpec& m) { m.add_pattern()->mutable_expr(); }},
      {"problem.mask.pattern[0].row_intervals.end: expected either value or data, got both",
       [](v1::MaskSpec& m) { End(m)->set_data("x"); }},
      {"problem.mask.pattern[0].row_intervals.end.entry_bytes: expected 1, 2 or 4, got 3",
       [](v1::MaskSpec& m) {
         End(m)->clear_value();
         End(m)->set_data("xxx");
         End(m)->set_entry_bytes(3);
       }},
      {"problem.mask.pattern[0].row_intervals.end.entry_bytes: expected none without data, got 2",
       [](v1::MaskSpec& m) { End(m)->set_entry_bytes(2); }},
      {"problem.mask.pattern[0].row_intervals.end.data: expected a multiple of 4 bytes, got 3",
       [](v1::MaskSpec& m) {
         End(m)->clear_value();
         End(m)->set_data("xxx");
         End(m)->set_entry_bytes(4);
       }},
      {"expected depth 16 at most, got more",
       [](v1::MaskSpec& m) {
         v1::Expr* expr = m.add_pattern()->mutable_expr();
         for (int n = 0; n < 16; ++n) expr = expr->mutable_negate();
         expr->mutable_all();
       }},
      {"problem.mask.pattern: expected at most 4096 patterns, got 4097",
       [](v1::MaskSpec& m) {
         while (m.pattern_size() <= 4096) m.add_pattern()->mutable_expr()->mutable_all();
       }},
  };
  for (const BadCase& bad : cases) {
    v1::MaskSpec wire = EncodeMaskSpec({.pattern = {RowIntervals{1, {0}, {1}}}});
    bad.spoil(wire);
    absl::StatusOr<MaskSpec> mask = DecodeMask(wire);
    ASSERT_FALSE(mask.ok()) << bad.expected;
    EXPECT_EQ(mask.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(mask.status().message().find(bad.expected), absl::string_view::npos) << mask.status();
  }
}

}  // namespace
}  // namespace attnd
