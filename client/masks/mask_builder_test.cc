// Each constructor and operator against its definition, written here again, and what the compiler
// makes of it against the oracle.
#include "client/masks/mask_builder.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "attention/masks/mask_description.h"
#include "attention/masks/mask_oracle.h"
#include "attention/random_problem.h"
#include "base/floor.h"
#include "tests/masks/mask_comparison.h"

namespace attnd::masks {
namespace {

constexpr int64_t kRows = 37, kKeys = 45;
const MaskCall kCall{.batch = 2, .q_heads = 3, .rows = kRows, .keys = kKeys, .offsets = {3, -5}};

// One score: batch entry, head, query position, row and key.
struct Score {
  int64_t b, h, q, i, j;
};
using Predicate = std::function<bool(const Score&)>;

bool In(int64_t at, int64_t begin, int64_t end) { return begin <= at && at < end; }

void ForEachScore(const std::function<void(const Score&)>& visit) {
  for (int64_t b = 0; b < kCall.batch; ++b) {
    for (int64_t h = 0; h < kCall.q_heads; ++h) {
      for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t j = 0; j < kKeys; ++j) visit({b, h, i + kCall.OffsetAt(b), i, j});
      }
    }
  }
}

void ExpectShows(const std::string& name, const MaskSpec& spec, const Predicate& shows) {
  SCOPED_TRACE(name);
  ASSERT_EQ(CompareWithOracle(spec, kCall, {{16, 8}, {64, 64}}), "");
  const MaskOracle oracle(spec, kCall);
  int64_t differences = 0;
  ForEachScore([&](const Score& s) {
    if (oracle.IsVisible(s.b, s.h, s.i, s.j) == shows(s)) return;
    if (++differences > 3) return;
    ADD_FAILURE() << "b" << s.b << " h" << s.h << " i" << s.i << " j" << s.j << ": expected "
                  << shows(s);
  });
}

std::vector<uint32_t> SomeIds(int64_t count, uint32_t seed) {
  std::vector<uint32_t> ids;
  for (int64_t n = 0; n < count; ++n) {
    ids.push_back(static_cast<uint32_t>((n * 7 + seed) / 9 % 4));
  }
  return ids;
}

std::vector<std::vector<bool>> SomeBits(size_t rows, size_t columns) {
  Random random(5);
  std::vector<std::vector<bool>> bits(rows, std::vector<bool>(columns));
  for (auto& row : bits) {
    for (size_t n = 0; n < columns; ++n) row[n] = random.Chance(0.4);
  }
  return bits;
}

// A list that is empty, short or long.
template <class Item>
std::vector<std::vector<Item>> Lists(int64_t count, const std::function<Item(uint32_t n)>& make) {
  std::vector<std::vector<Item>> lists(static_cast<size_t>(count));
  for (size_t n = 0; n < lists.size(); ++n) {
    for (uint32_t k = 0; k < n % 3; ++k) lists[n].push_back(make(k * 15 + n % 7));
  }
  return lists;
}
const auto kIntervals = [](uint32_t n) { return Interval{n, n + 5}; };

struct Case {
  std::string name;
  Mask mask;
  Predicate shows;
};

std::vector<Case> Expressions() {
  return {
      {"all", All(), [](const Score&) { return true; }},
      {"nothing", Nothing(), [](const Score&) { return false; }},
      {"causal", Causal(), [](const Score& s) { return s.j <= s.q; }},
      {"window", Window(6, 2), [](const Score& s) { return In(s.j, s.q - 6, s.q + 3); }},
      {"window_left", Window(6, -1), [](const Score& s) { return s.j >= s.q - 6; }},
      {"dilated", Dilated(4, 2, 3),
       [](const Score& s) { return FloorModulo(s.q - s.j, 4) == 0 && In(s.j - s.q, -8, 13); }},
      {"stride", Stride(7, 3), [](const Score& s) { return FloorModulo(s.q - s.j, 7) == 3; }},
      {"stride_columns", StrideColumns(8, 2, 5), [](const Score& s) { return In(s.j % 8, 2, 5); }},
      {"block_window", BlockWindow(6, -1, 1, {0, 4}),
       [](const Score& s) {
         const int64_t shift = s.b == 0 ? 0 : 4;
         return In(FloorDivide(s.j + shift, 6) - FloorDivide(s.q + shift, 6), -1, 2);
       }},
      {"global", Global({{0, 3}, {20, 22}}),
       [](const Score& s) {
         return In(s.q, 0, 3) || In(s.q, 20, 22) || In(s.j, 0, 3) || In(s.j, 20, 22);
       }},
      {"global_rows", Global({{4, 9}}, GlobalDirection::kRows),
       [](const Score& s) { return In(s.q, 4, 9); }},
      {"global_columns", Global({{4, 9}}, GlobalDirection::kColumns),
       [](const Score& s) { return In(s.j, 4, 9); }},
      {"prefix", Prefix({7, 30}), [](const Score& s) { return s.j < (s.b == 0 ? 7 : 30); }},
      {"documents", Documents({0, 11, 11, 30}),
       [](const Score& s) {
         return (In(s.q, 0, 11) && In(s.j, 0, 11)) || (In(s.q, 11, 30) && In(s.j, 11, 30));
       }},
  };
}

std::vector<Case> SomeLists() {
  const auto rows = SomeIds(kRows, 0), keys = SomeIds(kKeys, 4);
  const auto batch_rows = SomeIds(2 * kRows, 2), batch_keys = SomeIds(2 * kKeys, 1);
  const auto layout = SomeBits(5, 4), dense = SomeBits(kRows, kKeys);
  const auto intervals = Lists<Interval>(kRows, kIntervals);
  const auto hidden = Lists<Interval>(kKeys, kIntervals);
  const auto runs = Lists<Progression>(kRows, [](uint32_t n) { return Progression{n, 3, 4}; });
  return {
      {"groups", Groups(rows, keys),
       [=](const Score& s) { return rows[s.i] != 0 && rows[s.i] == keys[s.j]; }},
      {"groups_per_batch", Groups(batch_rows, batch_keys, true),
       [=](const Score& s) {
         const uint32_t id = batch_rows[s.b * kRows + s.i];
         return id != 0 && id == batch_keys[s.b * kKeys + s.j];
       }},
      {"blocks", Blocks(layout, 8, 13),
       [=](const Score& s) { return bool{layout[s.i / 8][s.j / 13]}; }},
      {"intervals", Intervals(intervals),
       [=](const Score& s) {
         for (const Interval& r : intervals[s.i]) {
           if (In(s.j, r.begin, r.end)) return true;
         }
         return false;
       }},
      {"hidden_rows", HiddenRows(hidden),
       [=](const Score& s) {
         for (const Interval& r : hidden[s.j]) {
           if (In(s.i, r.begin, r.end)) return false;
         }
         return true;
       }},
      {"runs", Runs(runs),
       [=](const Score& s) {
         for (const Progression& r : runs[s.i]) {
           const int64_t from = s.j - r.first;
           if (from >= 0 && from % 3 == 0 && from / 3 < 4) return true;
         }
         return false;
       }},
      {"rectangles",
       Rectangles({{2, 9, 3, 10, RectangleShape::kFull}, {9, 30, 0, 21, RectangleShape::kCausal}}),
       [](const Score& s) {
         return (In(s.i, 2, 9) && In(s.j, 3, 10)) ||
                (In(s.i, 9, 30) && In(s.j, 0, 21) && 21 - s.j >= 30 - s.i);
       }},
      {"bits", Bits(dense), [=](const Score& s) { return bool{dense[s.i][s.j]}; }},
  };
}

std::vector<Case> AllCases() {
  std::vector<Case> cases = Expressions();
  for (Case& c : SomeLists()) cases.push_back(std::move(c));
  return cases;
}

TEST(MaskBuilder, ShowsWhatEachConstructorSays) {
  for (const Case& c : AllCases()) ExpectShows(c.name, c.mask.Spec(), c.shows);
}

TEST(MaskBuilder, OperatorsAreThoseOfSets) {
  const std::vector<Case> cases = AllCases();
  for (size_t a = 0; a < cases.size(); ++a) {
    const Case& x = cases[a];
    const Case& y = cases[(a * 5 + 3) % cases.size()];
    const Case& z = cases[(a * 3 + 7) % cases.size()];
    ExpectShows(x.name + " | ~" + y.name + " & " + z.name, (x.mask | (~y.mask & z.mask)).Spec(),
                [&](const Score& s) { return x.shows(s) || (!y.shows(s) && z.shows(s)); });
    ExpectShows("~(" + x.name + " & " + y.name + ")", (~(x.mask & y.mask)).Spec(),
                [&](const Score& s) { return !(x.shows(s) && y.shows(s)); });
  }
}

TEST(MaskBuilder, HasAMaskForEachHeadAndBatchEntry) {
  const std::vector<Case> cases = AllCases();
  for (const int64_t entries : {kCall.q_heads, kCall.batch * kCall.q_heads}) {
    std::vector<Mask> masks;
    for (int64_t n = 0; n < entries; ++n) masks.push_back(cases[n * 5 % cases.size()].mask);
    ExpectShows("per head", PerHead(masks), [&](const Score& s) {
      const int64_t n = entries == kCall.q_heads ? s.h : s.b * kCall.q_heads + s.h;
      return cases[n * 5 % cases.size()].shows(s);
    });
  }
}

// A block is drawn unless its scores are all excluded, so that the band keeps its own beside them.
TEST(MaskBuilder, DrawsRandomBlocksAmongThoseThatAreNotExcluded) {
  const Mask layout = Blocks(SomeBits(3, 3), 16, 16);
  const Mask drawn = RandomBlocks(8, 1, 3, true, layout);
  const MaskSpec spec = (drawn | layout).Spec();
  ASSERT_EQ(CompareWithOracle(spec, kCall, {{16, 8}}), "");
  const MaskSpec listed = layout.Spec();
  const MaskOracle both(spec, kCall), alone(listed, kCall);
  int64_t more = 0;
  ForEachScore([&](const Score& s) {
    const bool is_listed = alone.IsVisible(s.b, s.h, s.i, s.j);
    EXPECT_TRUE(both.IsVisible(s.b, s.h, s.i, s.j) || !is_listed);
    more += both.IsVisible(s.b, s.h, s.i, s.j) && !is_listed;
  });
  EXPECT_GT(more, 0);
}

TEST(MaskBuilder, EqualMasksOfHeadsAreOnePattern) {
  const Mask list = Bits(SomeBits(kRows, kKeys)), band = Window(3, 3);
  const MaskSpec spec = PerHead({list, list & band, list});
  EXPECT_EQ(spec.pattern.size(), 2);
  EXPECT_EQ(spec.pattern_of, (std::vector<uint32_t>{0, 1, 0}));
  EXPECT_EQ((list & list & band).Spec().pattern.size(), 2);
}

TEST(MaskBuilder, LongChainsAreNotDeep) {
  Mask chain = Window(0, 0);
  for (int32_t n = 0; n < 1000; ++n) chain = chain | Dilated(2 + n, 1, 1);
  EXPECT_TRUE(MaskDescription::Make(chain.Spec(), kCall).ok());
}

TEST(SetMask, GivesTheProblemItsMaskOrTellsWhatIsWrong) {
  Problem p = PlainProblem(1, 2, 64, 16);
  const absl::Status wrong = SetMask(Window(-2, 0).Spec(), p);
  EXPECT_EQ(wrong.message(),
            "problem.mask.pattern[0].expr.window.left: expected -1 or above, got -2");
  EXPECT_EQ(p.mask, nullptr);
  const absl::Status ragged = SetMask(Blocks({{true}, {true, false, true}}, 32, 32).Spec(), p);
  EXPECT_EQ(ragged.message(),
            "problem.mask.pattern[0].blocks.indices[2]: expected 1..1, ascending, got 2");
  ASSERT_TRUE(SetMask(Window(7, 0).Spec(EmptyRow::kReject), p).ok());
  EXPECT_EQ(p.mask->spec().empty_row, EmptyRow::kReject);
  EXPECT_TRUE(Validate(p).ok());
}

}  // namespace
}  // namespace attnd::masks
