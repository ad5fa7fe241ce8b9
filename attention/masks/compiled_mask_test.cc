// Known answers, sharing, limits and cost of compiled masks. random_mask_test compares all kinds
// with the oracle.
#include "attention/masks/compiled_mask.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <ctime>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "tests/masks/small_masks.h"

namespace {
thread_local int64_t allocated_bytes = 0;
}

// Counts what the thread takes. Inlined they would look mismatched to GCC.
[[gnu::noinline]] void* operator new(size_t size) {
  allocated_bytes += static_cast<int64_t>(size);
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace attnd {
namespace {

using Numbers = std::vector<uint32_t>;

MaskExpr FirstTokens(uint32_t g) { return {Global{{0}, {g}, GlobalDirection::kBoth}, {}}; }
MaskExpr Documents(Numbers cu) { return {Segment{std::move(cu)}, {}}; }

absl::StatusOr<CompiledMask> Compile(const MaskSpec& spec, const MaskCall& call,
                                     MaskCompileOptions options = {.tile = {128, 32}}) {
  auto mask = MaskDescription::Make(spec, call);
  if (!mask.ok()) return mask.status();
  return CompiledMask::Make(**mask, spec.origin, call, options);
}

MaskPlan PlanOf(MaskPattern pattern, int64_t rows, int64_t keys, int64_t offset = 0) {
  auto compiled = Compile(SpecOf({std::move(pattern)}), {1, 1, rows, keys, {offset}});
  EXPECT_TRUE(compiled.ok()) << compiled.status();
  return compiled->PlanAt(0, 0);
}

TEST(CompiledMask, CountsTheKnownPairs) {
  const int64_t n = 1000, w = 37, g = 20, p = 40;
  EXPECT_EQ(PlanOf(CausalMask(), n, n).visible, n * (n + 1) / 2);
  EXPECT_EQ(PlanOf(Window(w, w), n, n).visible, n * (2 * w + 1) - w * (w + 1));
  EXPECT_EQ(PlanOf(Window(w, 0), n, n).visible, n * (w + 1) - w * (w + 1) / 2);
  EXPECT_EQ(PlanOf(FirstTokens(g), n, n).visible, n * n - (n - g) * (n - g));
  EXPECT_EQ(PlanOf(MaskExpr{StrideRel{40, 7}, {}}, n, n).visible, n * n / p);
  EXPECT_EQ(PlanOf(MaskExpr{BlockWindow{40, -1, 0, {}}, {}}, n, n).visible,
            p * p + 2 * p * p * (n / p - 1));
  const Numbers cu = {0, 300, 301, 800, 1000};
  int64_t whole = 0, causal = 0;
  for (size_t d = 1; d < cu.size(); ++d) {
    const int64_t len = cu[d] - cu[d - 1];
    whole += len * len;
    causal += len * (len + 1) / 2;
  }
  EXPECT_EQ(PlanOf(Documents(cu), n, n).visible, whole);
  EXPECT_EQ(PlanOf(All({Documents(cu), CausalMask()}), n, n).visible, causal);
}

TEST(CompiledMask, FollowsTheDiagonalOfTheCall) {
  const int64_t rows = 300, keys = 1000;
  const MaskPlan bottom_right = PlanOf(CausalMask(), rows, keys, keys - rows);
  EXPECT_EQ(bottom_right.visible, rows * (keys - rows) + rows * (rows + 1) / 2);
  EXPECT_EQ(PlanOf(CausalMask(), rows, keys).visible, rows * (rows + 1) / 2);
  // With more queries than keys the first ones see nothing.
  const MaskPlan plan = PlanOf(CausalMask(), keys, rows, rows - keys);
  EXPECT_EQ(plan.empty_rows, keys - rows);
  EXPECT_EQ(plan.first_empty_row, 0);
  EXPECT_EQ(plan.visible, rows * (rows + 1) / 2);
  EXPECT_EQ(bottom_right.first_empty_row, -1);
}

TEST(CompiledMask, MovesExpressionsAndNeverLists) {
  RowIntervals list = {1, {}, {}};
  for (uint32_t row = 0; row < 64; ++row) {
    list.begin.push_back(row);
    list.end.push_back(row + 1);
  }
  for (int64_t offset : {-20, 0, 30}) {
    const MaskPlan fixed = PlanOf(list, 64, 64, offset),
                   moved = PlanOf(Window(0, 0), 64, 64, offset);
    EXPECT_EQ(fixed.CountVisible(40, 40, 41), 1) << offset;
    EXPECT_EQ(moved.CountVisible(30, 30 + offset, 31 + offset), 1) << offset;
    EXPECT_EQ(moved.CountVisible(30, 0, 64), 1) << offset;
  }
}

// FlashMask's examples of ten tokens (arXiv 2410.01359): the first masked row of each column.
TEST(CompiledMask, ReadsColumnsAsFlashMaskDoes) {
  const auto columns = [](Numbers start, MaskExpr base) {
    return PlanOf(ColRuns{1, std::move(start), Numbers(10, 10), std::move(base)}, 10, 10);
  };
  const MaskPlan documents = columns({4, 4, 4, 4, 7, 7, 7, 10, 10, 10}, CausalMask());
  const MaskPlan same = PlanOf(All({Documents({0, 4, 7, 10}), CausalMask()}), 10, 10);
  EXPECT_EQ(documents.bitmaps, same.bitmaps);
  EXPECT_EQ(documents.visible, 10 + 6 + 6);
  // A question of four tokens, two answers of three.
  const MaskPlan shared = columns({10, 10, 10, 10, 7, 7, 7, 10, 10, 10}, CausalMask());
  EXPECT_EQ(shared.visible, 55 - 9);
  EXPECT_EQ(shared.CountVisible(8, 0, 10), 4 + 2);
  const MaskPlan window = columns({10, 4, 5, 6, 7, 8, 9, 10, 10, 10}, CausalMask());
  const MaskPlan global = PlanOf(
      All({Any({Window(2, 0), {Global{{0}, {1}, GlobalDirection::kColumns}, {}}}), CausalMask()}),
      10, 10);
  EXPECT_EQ(window.bitmaps, global.bitmaps);
}

TEST(CompiledMask, FindsTheTilesOfTheKnownMasks) {
  const MaskPlan causal = PlanOf(CausalMask(), 4096, 4096);
  EXPECT_EQ(causal.full_tiles + causal.partial_tiles, 32 * 33 / 2 * 4);  // 51.6 %
  EXPECT_EQ(causal.full_tiles, 32 * 31 / 2 * 4);
  EXPECT_EQ(causal.bitmap_count(), 4);
  for (int64_t line = 0; line < 32; ++line) EXPECT_EQ(causal.by_rows.Visits(line), 4 * line + 4);
  for (int64_t line = 0; line < 128; ++line) {
    EXPECT_EQ(causal.by_keys.Visits(line), 32 - line / 4);
  }
  EXPECT_EQ(PlanOf(Window(256, 0), 4096, 4096).bitmap_count(), 8);
  EXPECT_EQ(PlanOf(Any({Window(64, 64), FirstTokens(64)}), 4096, 4096).bitmap_count(), 11);
  EXPECT_EQ(PlanOf(MaskExpr{StrideRel{64, 0}, {}}, 4096, 4096).bitmap_count(), 2);
  EXPECT_EQ(PlanOf(MaskExpr{BlockWindow{64, -1, 0, {}}, {}}, 4096, 4096).bitmap_count(), 2);
}

TEST(CompiledMask, GivesTheSamePlanToThoseWhoSeeTheSame) {
  const MaskCall call = {3, 4, 64, 64, {0, 5, 0}};
  auto heads = Compile(SpecOf({Window(4, 0), Window(8, 0)}, {0, 1, 1, 0}), call);
  ASSERT_TRUE(heads.ok());
  EXPECT_EQ(heads->plans().size(), 4);  // two windows at two diagonals
  EXPECT_EQ(heads->PlanIndex(0, 1), heads->PlanIndex(2, 2));
  EXPECT_NE(heads->PlanIndex(0, 1), heads->PlanIndex(1, 1));
  EXPECT_NE(heads->PlanIndex(0, 1), heads->PlanIndex(0, 0));

  auto list = Compile(SpecOf({RowIntervals{0, {}, {}}}), call);  // which no diagonal moves
  ASSERT_TRUE(list.ok());
  EXPECT_EQ(list->plans().size(), 1);
  EXPECT_FALSE(list->varies_by_batch() || list->varies_by_head());
  EXPECT_EQ(list->PlanIndex(2, 3), 0);

  auto prefix = Compile(SpecOf({MaskExpr{Prefix{{9, 9, 30}}, {}}}), call);
  ASSERT_TRUE(prefix.ok());
  EXPECT_EQ(prefix->plans().size(), 2);
  EXPECT_EQ(prefix->PlanIndex(0, 0), prefix->PlanIndex(1, 3));

  auto random = Compile(SpecOf({MaskExpr{RandomBlocks{4, 2, 1, true}, {}}}), {3, 4, 64, 64, {0}});
  ASSERT_TRUE(random.ok());
  EXPECT_EQ(random->plans().size(), 4);
}

TEST(CompiledMask, IsTheSamePartOfAWhole) {
  MaskSpec spec = SpecOf({Any({All({Window(40, 3), {StrideRel{3, 1}, {}}}),
                               {RandomBlocks{16, 2, 5, false}, {Window(20, 20)}}})});
  const MaskCall whole = {1, 1, 200, 300, {100}};
  const MaskPlan all = Compile(spec, whole)->PlanAt(0, 0);
  spec.extents = {1, 1, 200, 300};
  spec.origin = {50, 70, 0, 0};
  const MaskCall part = {1, 1, 60, 110, {100 + 50 - 70}};
  const MaskPlan some = Compile(spec, part)->PlanAt(0, 0);
  for (int64_t i = 0; i < part.rows; ++i) {
    for (int64_t j = 0; j < part.keys; ++j) {
      ASSERT_EQ(some.CountVisible(i, j, j + 1), all.CountVisible(i + 50, j + 70, j + 71))
          << i << ", " << j;
    }
  }
}

TEST(CompiledMask, LeavesOutWhatNobodyAskedFor) {
  const MaskSpec spec = SpecOf({CausalMask()});
  const MaskCall call = {1, 1, 500, 500, {0}};
  auto rows = Compile(spec, call, {.tile = {64, 128}, .by_keys = false});
  EXPECT_TRUE(rows->PlanAt(0, 0).by_keys.tiles.empty());
  EXPECT_TRUE(rows->PlanAt(0, 0).row_keys.empty());
  auto keys = Compile(spec, call, {.tile = {64, 128}, .by_rows = false, .row_keys = true});
  EXPECT_TRUE(keys->PlanAt(0, 0).by_rows.tiles.empty());
  EXPECT_EQ(keys->PlanAt(0, 0).by_keys.lines(), 4);
  EXPECT_EQ(keys->PlanAt(0, 0).row_keys[123], 124);
}

// ---- Memory and work.

TEST(CompiledMask, TakesALittleForAWindowOverAMillionKeys) {
  const int64_t n = int64_t{1} << 20;
  auto compiled = Compile(SpecOf({Window(256, 0)}), {1, 1, n, n, {0}});
  ASSERT_TRUE(compiled.ok()) << compiled.status();
  const MaskPlan& plan = compiled->PlanAt(0, 0);
  EXPECT_LE(plan.by_rows.bytes() + 4 * static_cast<int64_t>(plan.bitmaps.size()), 1 << 20);
  EXPECT_LE(plan.by_keys.bytes() + 4 * static_cast<int64_t>(plan.bitmaps.size()), 1 << 20);
  EXPECT_EQ(plan.visible, n * 257 - 256 * 257 / 2);
}

TEST(CompiledMask, WorksByTheBordersAndNotByTheArea) {
  const auto steps = [](MaskPattern pattern, int64_t n) {
    auto compiled = Compile(SpecOf({std::move(pattern)}), {1, 1, n, n, {0}});
    EXPECT_TRUE(compiled.ok()) << compiled.status();
    return static_cast<double>(compiled->steps());
  };
  const MaskExpr longformer = Any({Window(256, 256), FirstTokens(64)});
  const MaskExpr bigbird = Any({longformer, {RandomBlocks{64, 3, 7, false}, {}}});
  EXPECT_LT(steps(Window(256, 0), 1 << 17), 2.5 * steps(Window(256, 0), 1 << 16));
  EXPECT_LT(steps(longformer, 1 << 17), 2.5 * steps(longformer, 1 << 16));
  EXPECT_LT(steps(bigbird, 1 << 17), 2.7 * steps(bigbird, 1 << 16));
  EXPECT_LT(steps(Window(256, 0), 1 << 17), 1e5);
  EXPECT_LT(steps(longformer, 1 << 17), 5e5);
  EXPECT_LT(steps(bigbird, 1 << 17), 3e6);
}

// ---- Refusals.

double ThreadMilliseconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
}

// Nothing but odd strides: mixed everywhere.
MaskExpr Primes(size_t count, bool negated) {
  std::vector<MaskExpr> strides;
  for (uint32_t p = 1001; strides.size() < count; p += 2) {
    const MaskExpr stride = {StrideRel{p, 3}, {}};
    strides.push_back(negated ? MaskExpr{Negate{}, {stride}} : stride);
  }
  return negated ? All(std::move(strides)) : Any(std::move(strides));
}

TEST(CompiledMask, RefusesTooMuchWorkBeforeItBegins) {
  const int64_t n = int64_t{1} << 20;
  const MaskCall call = {1, 1, n, n, {0}};
  const std::pair<const char*, MaskExpr> cases[] = {
      {"negated strides", Primes(2000, true)},
      {"strides", Primes(4000, false)},
      {"two strides", Primes(2, false)},
      {"random single keys", {RandomBlocks{1, 1 << 20, 1, false}, {}}},
      {"causal in lists of tiles", CausalMask()},
  };
  for (const auto& [name, expr] : cases) {
    auto mask = MaskDescription::Make(SpecOf({expr}), call);
    ASSERT_TRUE(mask.ok()) << mask.status();
    double best_ms = 1e9;
    for (int turn = 0; turn < 20; ++turn) {
      const double begin_ms = ThreadMilliseconds();
      const int64_t before = allocated_bytes;
      auto compiled = CompiledMask::Make(**mask, {}, call, {.tile = {128, 32}});
      best_ms = std::min(best_ms, ThreadMilliseconds() - begin_ms);
      EXPECT_LT(allocated_bytes - before, 1 << 21) << name;  // its nodes; tiles would be gigabytes
      ASSERT_EQ(compiled.status().code(), absl::StatusCode::kOutOfRange) << name;
      EXPECT_EQ(compiled.status().message().rfind("problem.mask.pattern[0]: expected at most ", 0),
                0)
          << compiled.status();
    }
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    EXPECT_LT(best_ms, 1.0) << name;
#else
    EXPECT_LT(best_ms, 50.0) << name;
#endif
  }
}

TEST(CompiledMask, EndsAtItsLimitsWhereTheEstimateLetItPass) {
  const MaskSpec spec = SpecOf({Any({Window(64, 64), FirstTokens(64)})});
  const MaskCall call = {1, 1, 1 << 15, 1 << 15, {0}};
  const int64_t steps = Compile(spec, call)->steps();
  auto enough = Compile(spec, call, {.tile = {128, 32}, .max_steps = steps});
  EXPECT_TRUE(enough.ok()) << enough.status();
  auto one_less = Compile(spec, call, {.tile = {128, 32}, .max_steps = steps - 1});
  EXPECT_EQ(one_less.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_NE(one_less.status().message().find("steps to compile"), std::string::npos);
  auto bytes = Compile(spec, call, {.tile = {128, 32}, .max_bytes = 40000});
  EXPECT_EQ(bytes.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_NE(bytes.status().message().find("bytes to compile"), std::string::npos);
}

TEST(CompiledMask, RefusesMorePlacesThanItCanTell) {
  // Lengths by batch entry and patterns by head: a million entries of a thousand heads.
  MaskSpec spec =
      SpecOf({MaskExpr{Prefix{Numbers(1 << 20, 1)}, {}}, CausalMask()}, Numbers(1024, 0));
  std::get<Prefix>(std::get<MaskExpr>(spec.pattern[0]).op).len[5] = 0;
  spec.pattern_of[3] = 1;
  auto compiled = Compile(spec, {1 << 20, 1024, 1, 2, {0}});
  EXPECT_EQ(compiled.status().code(), absl::StatusCode::kOutOfRange) << compiled.status();
}

TEST(CompiledMask, RefusesAPlaceBeyondTheMask) {
  auto mask = MaskDescription::Make(SpecOf({CausalMask()}), {1, 1, 64, 64, {0}});
  auto compiled = CompiledMask::Make(**mask, {1, 0, 0, 0}, {1, 1, 64, 64, {0}}, {.tile = {8, 8}});
  EXPECT_EQ(compiled.status().message(),
            "problem.mask.extents.rows: expected at least origin + the problem's = 65, got 64");
  EXPECT_TRUE(CompiledMask::Make(**mask, {1, 0, 0, 0}, {5, 9, 63, 64, {0}}, {.tile = {8, 8}}).ok());
}

TEST(MaskRuns, GivesEachRow) {
  const MaskCall call = {1, 2, 6, 8, {0}};
  auto mask =
      MaskDescription::Make(SpecOf({MaskExpr{StrideRel{4, 0}, {}}, Window(1, 1)}, {0, 1}), call);
  auto first = MaskRuns(**mask, {}, call, 0, 0, 1000),
       second = MaskRuns(**mask, {}, call, 0, 1, 1000);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ((*first)[5], (std::vector<KeyRun>{{1, 2}, {5, 6}}));
  EXPECT_EQ((*second)[5], (std::vector<KeyRun>{{4, 7}}));
  EXPECT_EQ(MaskRuns(**mask, {}, call, 0, 0, 5).status().code(), absl::StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace attnd
