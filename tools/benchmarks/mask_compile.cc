// mask_compile: what a mask's tiles cost to make, both directions, on one core: closed forms and
// lists over N keys, in tiles of 128 × 32. Labels: listed tiles, distinct bitmaps, bytes.
//
// Also what it takes to say that a mask is too complex.
//
//   bazel-bin/tools/benchmarks/mask_compile
#include <benchmark/benchmark.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/masks/compiled_mask.h"
#include "attention/random_problem.h"
#include "base/check.h"

namespace attnd {
namespace {

MaskExpr Window(int32_t left, int32_t right) { return {RelativeWindow{left, right}, {}}; }
MaskExpr FirstTokens(uint32_t count) { return {Global{{0}, {count}, GlobalDirection::kBoth}, {}}; }

MaskPattern Documents(int64_t n) {
  Segment documents;
  for (int64_t d = 0; d <= 64; ++d) documents.cu.push_back(static_cast<uint32_t>(n * d / 64));
  return MaskExpr{AllOf{}, {{std::move(documents), {}}, Window(-1, 0)}};
}
MaskPattern Longformer(int64_t) { return MaskExpr{AnyOf{}, {Window(256, 256), FirstTokens(64)}}; }
MaskPattern BigBird(int64_t) {
  const MaskExpr fixed = {AnyOf{}, {Window(64, 64), FirstTokens(64)}};
  return MaskExpr{AnyOf{}, {fixed, {RandomBlocks{64, 3, 7, false}, {fixed}}}};
}
// One block of 64 × 64 in twenty.
MaskPattern Blocks(int64_t n) {
  BlockList list = {.bq = 64, .bk = 64, .indptr = {0}};
  Random random(1);
  for (int64_t row = 0; row < n / 64; ++row) {
    for (uint32_t column = 0; column < n / 64; ++column) {
      if (random.Chance(0.05)) list.indices.push_back(column);
    }
    list.indptr.push_back(static_cast<uint32_t>(list.indices.size()));
  }
  return list;
}
MaskPattern Bits(int64_t n) {
  MaskBitmap bits = {.row_pitch_bits = static_cast<uint32_t>(n)};
  bits.data.resize(static_cast<size_t>(n * n / 8));
  Random random(1);
  for (uint8_t& byte : bits.data) byte = static_cast<uint8_t>(random.Bits() & random.Bits());
  return bits;
}

void Run(benchmark::State& state, MaskPattern (*pattern_of)(int64_t)) {
  const int64_t n = state.range(0);
  const MaskCall call = {1, 1, n, n, {0}};
  MaskSpec spec;
  spec.pattern = {pattern_of(n)};
  spec.pattern_of = {0};
  auto mask = MaskDescription::Make(spec, call);
  CHECK(mask.ok()) << mask.status();
  for (auto _ : state) {
    auto compiled = CompiledMask::Make(**mask, {}, call, {.tile = {128, 32}});
    CHECK(compiled.ok()) << compiled.status();
    const MaskPlan& plan = compiled->PlanAt(0, 0);
    state.SetLabel(absl::StrCat(plan.full_tiles + plan.partial_tiles, " tiles, ",
                                plan.bitmap_count(), " bitmaps, ", compiled->bytes(), " bytes"));
  }
}

void Describe(benchmark::State& state, MaskPattern (*pattern_of)(int64_t)) {
  const int64_t n = state.range(0);
  MaskSpec spec;
  spec.pattern = {pattern_of(n)};
  spec.pattern_of = {0};
  for (auto _ : state) {
    auto mask = MaskDescription::Make(spec, {1, 1, n, n, {0}});
    CHECK(mask.ok()) << mask.status();
  }
}

// Strides of primes: every tile is mixed, of a hundred nodes.
MaskPattern Primes(int64_t) {
  MaskExpr any = {AnyOf{}, {}};
  for (uint32_t n = 0; n < 100; ++n) any.of.push_back({StrideRel{1009 + 2 * n, 3}, {}});
  return any;
}

void Refuse(benchmark::State& state, MaskPattern (*pattern_of)(int64_t)) {
  const int64_t n = state.range(0);
  const MaskCall call = {1, 1, n, n, {0}};
  MaskSpec spec;
  spec.pattern = {pattern_of(n)};
  spec.pattern_of = {0};
  auto mask = MaskDescription::Make(spec, call);
  CHECK(mask.ok()) << mask.status();
  for (auto _ : state) {
    CHECK(!CompiledMask::Make(**mask, {}, call, {.tile = {128, 32}}).ok());
  }
}

constexpr int64_t kLong = 131072, kLongest = int64_t{1} << 20;

BENCHMARK_CAPTURE(Run, window, [](int64_t) { return MaskPattern(Window(256, 0)); })
    ->Arg(kLong)
    ->Arg(kLongest);
BENCHMARK_CAPTURE(Run, documents, Documents)->Arg(kLong);
BENCHMARK_CAPTURE(Run, longformer, Longformer)->Arg(kLong);
BENCHMARK_CAPTURE(Run, blocked, [](int64_t) {
  return MaskPattern(MaskExpr{BlockWindow{64, -1, 0, {}}, {}});
})->Arg(kLong);
BENCHMARK_CAPTURE(Run, bigbird, BigBird)->Arg(kLong);
BENCHMARK_CAPTURE(Run, blocks, Blocks)->Arg(kLong);
BENCHMARK_CAPTURE(Run, bits, Bits)->Arg(8192);
BENCHMARK_CAPTURE(Refuse, primes, Primes)->Arg(kLongest);
BENCHMARK_CAPTURE(Describe, blocks, Blocks)->Arg(kLong);
BENCHMARK_CAPTURE(Describe, bits, Bits)->Arg(8192);

}  // namespace
}  // namespace attnd

BENCHMARK_MAIN();
