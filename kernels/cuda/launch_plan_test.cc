// Admission is told beforehand what a launch takes; its plan then takes as much.
#include "kernels/cuda/launch_plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "attention/cost.h"
#include "attention/problem.h"
#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "gtest/gtest.h"
#include "tests/masks/small_masks.h"

namespace attnd::cuda {
namespace {

int64_t Taken(const LaunchPlan& plan) {
  int64_t bytes = plan.arena.bytes();
  for (const ArenaLayout& held : plan.held) bytes += held.bytes();
  return bytes;
}

// Rows' padding, regions' alignment and descriptors allow for some more, but not for a tensor.
void ExpectTakesWhatIsTold(const std::vector<KernelRow>& rows, const Problem& p) {
  const Problem* problem = &p;
  const int64_t slack = 8192 + 256 * p.batch * p.q_heads;
  auto forward = SelectForward(rows, p);
  if (forward.ok()) {
    const Travel travel = TravelOf(forward->forward);
    const int64_t told = ForwardArenaBytes(p, *forward), keeping = KeptForwardBytes(p, travel);
    const int64_t taken = Taken(PlanForward({&problem, 1}, *forward, {false}));
    const int64_t kept = Taken(PlanForward({&problem, 1}, *forward, {true}));
    EXPECT_LE(taken, told);
    // Nobody is told how much of dropout's decisions lengths and windows spare.
    if (!forward->dropout_bits) {
      EXPECT_GE(taken + slack + told / 8, told);
    }
    EXPECT_LE(kept, told + keeping);
    EXPECT_EQ(keeping > 0, p.element == ElementType::kBFloat16 && travel == Travel::kAsHalves);
  }
  auto backward = SelectBackward(rows, p);
  if (backward.ok()) {
    const int64_t told = BackwardArenaBytes(p, *backward);
    const int64_t taken = Taken(PlanBackward({&problem, 1}, *backward, {false}));
    EXPECT_LE(taken, told);
    EXPECT_LE(Taken(PlanBackward({&problem, 1}, *backward, {true})), told);
  }
}

// Checks what is told of p, without scores of its own, by classes of a stride.
void ExpectClassesTakeWhatIsTold(const std::vector<KernelRow>& rows, Problem p, int64_t period) {
  p.bias.reset();
  p.bool_mask.reset();
  p.denominator = DenominatorKind::kSoftmax;
  p.sink_logits.clear();
  const Problem* problem = &p;
  const std::vector<CallMask> masks = {{.classes = ResidueClasses{.p = period}}};
  const auto forward = SelectForward(rows, p);
  if (forward.ok()) {
    const int64_t told = ForwardArenaBytes(p, *forward, &masks[0]);
    const int64_t keeping = KeptForwardBytes(p, TravelOf(forward->forward), masks[0].classes);
    EXPECT_LE(Taken(PlanForward({&problem, 1}, *forward, {false}, masks)), told);
    EXPECT_LE(Taken(PlanForward({&problem, 1}, *forward, {true}, masks)), told + keeping);
  }
  const auto backward = SelectBackward(rows, p);
  if (backward.ok()) {
    const int64_t told = BackwardArenaBytes(p, *backward, &masks[0]);
    EXPECT_LE(Taken(PlanBackward({&problem, 1}, *backward, {false}, masks)), told);
  }
}

TEST(LaunchPlan, TakesWhatAdmissionIsTold) {
  for (const ArchitectureInfo& info : Architectures()) {
    const std::vector<KernelRow> rows = KernelRowsOfGpu(info.compute_capability);
    for (uint64_t seed = 0; seed < 400; ++seed) {
      const Problem p = RandomProblem(seed);
      SCOPED_TRACE(testing::Message() << info.name << ", seed " << seed << ": " << ProblemText(p));
      ExpectTakesWhatIsTold(rows, p);
      ExpectClassesTakeWhatIsTold(rows, p, 2 + static_cast<int64_t>(seed % 7));
    }
  }
}

// sm_90's backward zeroes them, but where no call has keys it does not run.
TEST(LaunchPlan, ZeroesSumsOfDqWhereNoKernelDoes) {
  for (int32_t keys : {0, 40}) {
    Problem p;
    p.batch = p.q_heads = p.kv_heads = 1;
    p.q_len = p.kv_len = p.qk_head_dim = p.v_head_dim = 64;
    p.element = ElementType::kFloat16;
    p.kv_lengths = {keys};
    const auto kernels = SelectBackward(KernelRowsOfGpu(90), p);
    ASSERT_TRUE(kernels.ok()) << kernels.status();
    const Problem* problem = &p;
    const LaunchPlan plan = PlanBackward({&problem, 1}, *kernels, {false});
    const auto sums = std::find_if(plan.arena.regions().begin(), plan.arena.regions().end(),
                                   [](const Region& r) { return r.name == "dq_sums"; });
    ASSERT_NE(sums, plan.arena.regions().end());
    EXPECT_EQ(sums->use, keys == 0 ? RegionUse::kZeroed : RegionUse::kOutput);
  }
}

// A large one, whose small things do not count: q, k, v and o, and once more v and o if it is kept
// as halves.
TEST(LaunchPlan, ReservesVAndOTwiceOnlyWhereABFloat16ForwardIsKeptAsHalves) {
  Problem p = PlainProblem(4, 8, 2048, 64);
  for (const ArchitectureInfo& info : Architectures()) {
    for (ElementType element : {ElementType::kFloat16, ElementType::kBFloat16}) {
      p.element = element;
      const double tensor = 4 * 8 * 2048 * 64 * 2;
      auto forward = SelectForward(KernelRowsOfGpu(info.compute_capability), p);
      ASSERT_TRUE(forward.ok()) << forward.status();
      EXPECT_NEAR(static_cast<double>(ForwardArenaBytes(p, *forward)) / tensor, 4, 0.1);
      const bool twice =
          element == ElementType::kBFloat16 && info.architecture == Architecture::kSm70;
      EXPECT_NEAR(static_cast<double>(KeptForwardBytes(p, TravelOf(forward->forward))) / tensor,
                  twice ? 2 : 0, 0.05);
    }
  }
}

// A few rows and keys that all see, beside a narrow window: blocks differ by 50 times.
Problem Longformer(int64_t length, int64_t heads = 4) {
  Problem p = PlainProblem(1, heads, length, 64);
  p.element = ElementType::kFloat16;
  SetMask(Any({Window(40, 40), Leaf(Global{{0}, {20}, GlobalDirection::kBoth})}), p);
  return p;
}

CallMask MaskOf(const Problem& p, const MaskTiling& tiling) {
  auto compiled = CompiledMask::Make(*p.mask, {}, MaskCallOf(p), OptionsOf(tiling));
  EXPECT_TRUE(compiled.ok()) << compiled.status();
  CallMask mask;
  mask.compiled = std::make_shared<const CompiledMask>(*std::move(compiled));
  mask.layout = LayOutMask(*mask.compiled, p, tiling);
  return mask;
}

// Visits of the main kernel's tiles, in their order.
std::vector<int64_t> WorkOf(const LaunchPlan& plan) {
  for (const PlannedKernel& kernel : plan.kernels) {
    if (kernel.work.empty()) continue;
    std::vector<int64_t> each;
    for (size_t n = 1; n < kernel.work.size(); ++n) {
      each.push_back(kernel.work[n] - kernel.work[n - 1]);
    }
    return each;
  }
  return {};
}

TEST(LaunchPlan, OrdersAndCountsBlocksByWhatAMaskLeaves) {
  const Problem p = Longformer(4096);
  const Problem* problem = &p;
  const auto forward = SelectForward(KernelRowsOf(Architecture::kSm70), p);
  const auto backward = SelectBackward(KernelRowsOf(Architecture::kSm70), p);
  ASSERT_TRUE(forward.ok() && backward.ok());
  const CallMask by_rows = MaskOf(p, TilingOf(*forward)), by_keys = MaskOf(p, TilingOf(*backward));
  for (const LaunchPlan& plan : {PlanForward({&problem, 1}, *forward, {false}, {&by_rows, 1}),
                                 PlanBackward({&problem, 1}, *backward, {false}, {&by_keys, 1})}) {
    const std::vector<int64_t> work = WorkOf(plan);
    EXPECT_TRUE(std::is_sorted(work.rbegin(), work.rend()));
    EXPECT_GT(work.front(), 10 * work.back());
    EXPECT_EQ(work[3], work.front()) << "one a head";
    EXPECT_LT(work[4], work.front() / 5);
  }
  const int64_t tiles = static_cast<int64_t>(by_rows.compiled->plans()[0].by_rows.tiles.size());
  EXPECT_EQ(PlanForward({&problem, 1}, *forward, {false}, {&by_rows, 1}).flops,
            static_cast<double>(4 * tiles * 128 * 32) * ScoreFlops(p, Direction::kForward));
}

TEST(LaunchPlan, SlicesHaveLikeSharesOfTheWork) {
  const Problem p = Longformer(8192);
  const Problem* problem = &p;
  const auto forward = SelectForward(KernelRowsOf(Architecture::kSm70), p);
  ASSERT_TRUE(forward.ok());
  const CallMask mask = MaskOf(p, TilingOf(*forward));
  LaunchPlan plan = PlanForward({&problem, 1}, *forward, {false}, {&mask, 1});
  const std::vector<int64_t> work = WorkOf(plan);
  const int64_t all = std::accumulate(work.begin(), work.end(), int64_t{0});
  for (int slices : {1, 2, 7, 1000}) {
    plan.Cut(slices, 1);
    EXPECT_LE(plan.slices(), slices);
    size_t next = 0;
    for (int slice = 0; slice < plan.slices(); ++slice) {
      int64_t share = 0;
      for (const KernelStep& step : plan.Slice(0, slice)) {
        for (int n = 0; n < step.params.tile_count; ++n) share += work.at(next++);
      }
      EXPECT_LE(share, all / slices + work.front()) << slice << " of " << slices;
    }
    EXPECT_EQ(next, work.size()) << "all tiles, once";
  }
}

// A slice of fewer tiles would take as long as one that fills the device.
TEST(LaunchPlan, NoSliceButTheLastHasFewerTilesThanFillTheDevice) {
  Problem p;
  p.batch = p.q_heads = p.kv_heads = 1;
  p.q_len = p.kv_len = 1 << 18;
  p.qk_head_dim = p.v_head_dim = 128;
  p.causal = true;
  const Problem* problem = &p;
  const auto backward = SelectBackward(KernelRowsOfGpu(90), p);
  ASSERT_TRUE(backward.ok());
  LaunchPlan plan = PlanBackward({&problem, 1}, *backward, {false});
  const auto tiles = static_cast<int64_t>(WorkOf(plan).size());
  for (const int most : {2, 10, 1 << 16}) {
    plan.Cut(most, 132);
    EXPECT_LE(plan.slices(), std::min<int64_t>(most, (tiles + 131) / 132));
    int64_t next = 0;
    for (int slice = 0; slice < plan.slices(); ++slice) {
      for (const KernelStep& step : plan.Slice(0, slice)) {
        if (step.row.kind != KernelKind::kBackward) continue;
        EXPECT_TRUE(step.params.tile_count >= 132 || slice == plan.slices() - 1) << slice;
        next += step.params.tile_count;
      }
    }
    EXPECT_EQ(next, tiles);
  }
}

TEST(LaunchPlan, CountsAMaskThatIsNotHeld) {
  const Problem p = Longformer(4096);
  const Problem* problem = &p;
  const auto forward = SelectForward(KernelRowsOf(Architecture::kSm70), p);
  ASSERT_TRUE(forward.ok());
  const CallMask mask = MaskOf(p, TilingOf(*forward));
  const int64_t told = ForwardArenaBytes(p, *forward, &mask);
  EXPECT_LE(Taken(PlanForward({&problem, 1}, *forward, {false}, {&mask, 1})), told);
  EXPECT_GE(told, ForwardArenaBytes(p, *forward) + mask.layout.bytes);
}

// With 64 heads, which take turns at the L2, none begins its long block so late that it would still
// be at work when all others have ended.
TEST(LaunchPlan, LongBlocksBeginInTime) {
  const Problem p = Longformer(4096, 64);
  const Problem* problem = &p;
  const std::vector<KernelRow> rows = KernelRowsOfGpu(90);
  const auto forward = SelectForward(rows, p);
  const auto backward = SelectBackward(rows, p);
  ASSERT_TRUE(forward.ok() && backward.ok());
  const CallMask by_rows = MaskOf(p, TilingOf(*forward)), by_keys = MaskOf(p, TilingOf(*backward));
  for (const LaunchPlan& plan : {PlanForward({&problem, 1}, *forward, {false}, {&by_rows, 1}),
                                 PlanBackward({&problem, 1}, *backward, {false}, {&by_keys, 1})}) {
    const std::vector<int64_t> work = WorkOf(plan);
    const int64_t all = std::accumulate(work.begin(), work.end(), int64_t{0});
    const int64_t longest = *std::max_element(work.begin(), work.end());
    constexpr int64_t kSms = 132;
    ASSERT_GT(all, longest * kSms) << "or there is no time to begin in";
    int64_t before = 0, last = -1, longs = 0;
    for (const int64_t of : work) {
      if (of == longest) last = before, ++longs;
      before += of;
    }
    EXPECT_EQ(longs, 64);
    EXPECT_LE(last, all - longest * kSms + 64 * longest);
    EXPECT_GT(last, all / 8) << "not all ahead of the others, or the L2 would not hold their keys";
  }
}

// Under the causal triangle tiles of few heads, of which the L2 holds one at a time, end at about
// the same time: given out in order to whoever is free, as a GPU does.
TEST(LaunchPlan, FewCausalHeadsEndTogether) {
  Problem p = PlainProblem(1, 32, 4096, 64);
  p.kv_heads = 8;
  p.element = ElementType::kFloat16;
  p.causal = true;
  const Problem* problem = &p;
  const auto backward = SelectBackward(KernelRowsOfGpu(90), p);
  ASSERT_TRUE(backward.ok());
  const std::vector<int64_t> work = WorkOf(PlanBackward({&problem, 1}, *backward, {false}));
  constexpr size_t kSms = 132;
  ASSERT_GT(work.size(), kSms);
  std::vector<int64_t> ends(kSms);
  for (const int64_t of : work) *std::min_element(ends.begin(), ends.end()) += of;
  const int64_t all = std::accumulate(work.begin(), work.end(), int64_t{0});
  EXPECT_LE(*std::max_element(ends.begin(), ends.end()) * int64_t{kSms}, all * 21 / 20);
}

TEST(LaunchPlan, CutLinesAreRunsOfProblemsOfTheirOwn) {
  Problem p = Longformer(16384);
  const Problem* problem = &p;
  for (const int gpu : {70, 80, 90}) {
    for (const ElementType element : {ElementType::kFloat16, ElementType::kBFloat16}) {
      p.element = element;
      const std::vector<KernelRow> rows = KernelRowsOfGpu(gpu);
      const auto forward = SelectForward(rows, p);
      const auto backward = SelectBackward(rows, p);
      ASSERT_TRUE(forward.ok() && backward.ok());
      CallMask by_rows = MaskOf(p, TilingOf(*forward)), by_keys = MaskOf(p, TilingOf(*backward));
      by_rows.cuts = CutsOf(*by_rows.compiled, *by_rows.compiled, TilingOf(*forward));
      by_keys.cuts = CutsOf(*by_keys.compiled, *by_keys.compiled, TilingOf(*backward));
      EXPECT_EQ(by_rows.cuts.lines, std::vector<int32_t>{0});
      EXPECT_EQ(by_keys.cuts.lines, std::vector<int32_t>{0});
      const LaunchPlan plans[] = {PlanForward({&problem, 1}, *forward, {false}, {&by_rows, 1}),
                                  PlanBackward({&problem, 1}, *backward, {false}, {&by_keys, 1})};
      EXPECT_LE(Taken(plans[0]), ForwardArenaBytes(p, *forward, &by_rows));
      EXPECT_LE(Taken(plans[1]), BackwardArenaBytes(p, *backward, &by_keys));
      for (const LaunchPlan& plan : plans) {
        // Each run of each head once, and each head's merged.
        std::map<int64_t, int> runs;
        for (const PlannedKernel& kernel : plan.kernels) {
          if (kernel.work.empty()) continue;
          for (const TileWork& tile : plan.tiles[kernel.tiles]) {
            if (tile.problem < static_cast<int>(plan.parts.size())) {
              EXPECT_NE(tile.tile, 0);
            } else {
              EXPECT_EQ(tile.tile, 0);
              ++runs[tile.problem];
            }
          }
        }
        EXPECT_EQ(runs.size(), plan.cut_lines.size() * kListRuns);
        EXPECT_EQ(runs.begin()->first, plan.parts.size());
        EXPECT_EQ(runs.rbegin()->first, plan.problem_count() - 1);
        EXPECT_EQ(plan.tiles.back().size() * kMergedRows, 4u * plan.cut_rows);
      }
    }
  }
}

int64_t BytesOf(const LaunchPlan& plan, const std::string& name) {
  for (const Region& region : plan.arena.regions()) {
    if (region.name == name) return region.bytes;
  }
  return -1;
}

// With 16 heads both integers of dQ together take 2^31 bytes and more; so many rows are visited
// too.
TEST(LaunchPlan, CountsBeyond32BitsAt131072Rows) {
  constexpr int64_t kLength = 131072;
  for (const ArchitectureInfo& info : Architectures()) {
    for (int64_t heads : {1, 16}) {
      for (int64_t head_dim : {128, 256}) {
        SCOPED_TRACE(testing::Message() << info.name << " " << heads << " " << head_dim);
        Problem p = PlainProblem(1, heads, kLength, head_dim);
        p.element = ElementType::kFloat16;
        p.causal = true;
        p.dropout.threshold = 25;
        const Problem* problem = &p;
        const std::vector<KernelRow> rows = KernelRowsOfGpu(info.compute_capability);
        ExpectTakesWhatIsTold(rows, p);
        const auto backward = SelectBackward(rows, p);
        ASSERT_TRUE(backward.ok()) << backward.status();
        LaunchPlan plan = PlanBackward({&problem, 1}, *backward, {false});
        EXPECT_EQ(BytesOf(plan, "dq_sums"), heads * kLength * head_dim * 4);
        EXPECT_EQ(BytesOf(plan, "dq_rests"), heads * kLength * head_dim * 4);
        const ProblemDesc desc = Describe(plan.layouts[0], plan.parts[0], uint64_t{1} << 40);
        EXPECT_EQ(desc.dq_head, kLength * head_dim);
        EXPECT_EQ(desc.dq_rest, heads * kLength * head_dim);

        // A block sees on average half of the rows.
        const std::vector<int64_t> work = WorkOf(plan);
        const int64_t all = std::accumulate(work.begin(), work.end(), int64_t{0});
        const auto blocks = static_cast<double>(heads * kLength / backward->backward.tile.kv_rows);
        ASSERT_EQ(static_cast<double>(work.size()), blocks);
        EXPECT_NEAR(static_cast<double>(all) / (blocks * kLength / 2), 1, 0.01);
        plan.Cut(100, 1);
        ASSERT_EQ(plan.slices(), 100);
        size_t next = 0;
        for (int slice = 0; slice < 100; ++slice) {
          int64_t share = 0;
          for (const KernelStep& step : plan.Slice(0, slice)) {
            if (step.row.kind != KernelKind::kBackward) continue;
            for (int n = 0; n < step.params.tile_count; ++n) share += work.at(next++);
          }
          EXPECT_LE(share, all / 100 + work.front()) << slice;
        }
        EXPECT_EQ(next, work.size());
      }
    }
  }
}

// Each part of the main kernel stands after the kernel that decides ahead of the same tiles, whose
// decisions find room.
void ExpectDecidesAhead(LaunchPlan plan, KernelKind bits, KernelKind main_kind,
                        const DropoutRound& round) {
  const int64_t room = BytesOf(plan, "dropout_bits");
  EXPECT_LE(room, kMaxDropoutBytes);
  EXPECT_GE(room, kMaxDropoutBytes * 3 / 4);
  const std::vector<int64_t> work = WorkOf(plan);
  const uint64_t arena = uint64_t{1} << 40;
  const auto first_rounds = reinterpret_cast<const uint32_t*>(
      arena + static_cast<uint64_t>(plan.dropout->first_rounds_offset));
  for (const int slices : {1, 7, 1000}) {
    plan.Cut(slices, 1);
    size_t next = 0;
    for (int slice = 0; slice < plan.slices(); ++slice) {
      const std::vector<KernelStep> steps = plan.Slice(arena, slice);
      for (size_t n = 0; n < steps.size(); ++n) {
        if (steps[n].row.kind != main_kind) continue;
        const LaunchParams &main = steps[n].params, &ahead = steps[n - 1].params;
        ASSERT_EQ(steps[n - 1].row.kind, bits);
        EXPECT_EQ(ahead.tiles, main.tiles);
        EXPECT_EQ(ahead.tile_count, main.tile_count);
        EXPECT_EQ(main.taken_before, next);
        ASSERT_EQ(static_cast<size_t>(main.first_rounds - first_rounds), next);
        for (int tile = 0; tile < main.tile_count; ++tile, ++next) {
          const int64_t before = plan.dropout->parts.first_rounds.at(next);
          const auto rounds_of = [&](size_t at) { return (work[at] - 64) / round.visited; };
          EXPECT_LE((before + rounds_of(next)) * round.bytes, room);
          if (tile == 0) continue;
          EXPECT_EQ(before, plan.dropout->parts.first_rounds[next - 1] + rounds_of(next - 1));
        }
      }
    }
    EXPECT_EQ(next, work.size());
  }
}

// Decisions on all scores would take 2 GiB.
TEST(LaunchPlan, DecidesDropoutAheadOfAsManyTilesAsThereIsRoomFor) {
  Problem p;
  p.batch = 1;
  p.q_heads = 2;
  p.kv_heads = 1;
  p.q_len = p.kv_len = 131072;
  p.qk_head_dim = p.v_head_dim = 128;
  p.element = ElementType::kFloat16;
  p.causal = true;
  p.dropout.threshold = 25;
  const Problem* problem = &p;
  const auto forward = SelectForward(KernelRowsOfGpu(90), p);
  ASSERT_TRUE(forward.ok() && forward->dropout_bits);
  ExpectDecidesAhead(PlanForward({&problem, 1}, *forward, {false}), KernelKind::kForwardDropoutBits,
                     KernelKind::kForward, ForwardRound(forward->forward.tile));
  const auto backward = SelectBackward(KernelRowsOfGpu(90), p);
  ASSERT_TRUE(backward.ok() && backward->dropout_bits);
  ExpectDecidesAhead(PlanBackward({&problem, 1}, *backward, {false}), KernelKind::kDropoutBits,
                     KernelKind::kBackward, BackwardRound(backward->backward.tile));
}

}  // namespace
}  // namespace attnd::cuda
