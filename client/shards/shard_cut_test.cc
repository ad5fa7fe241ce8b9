// Cutting by rows and by keys, over the whole option set: each piece is computed by an engine as
// the problem that it is, and together they must give what the uncut call gives: bit by bit, or
// where parts are merged within rounding.
#include "client/shards/shard_cut.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/masks/mask_description.h"
#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "client/shards/shard_merger.h"
#include "client/shards/shard_plan.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/reference_backend.h"
#include "tests/fixtures/call_outputs.h"
#include "tests/masks/small_masks.h"

namespace attnd {
namespace {

// The options under test, small enough that random problems are cut into several pieces.
PlanLimits SmallPieces(bool merge) {
  return {.target_bytes = 1,
          .max_message_bytes = int64_t{1} << 40,
          .merge = merge,
          .max_extra = 1e9,
          .least_gain = 0,
          .steps = {.rows = 16, .keys = 8}};
}

AlignedBytes Part(const StridedRuns& runs, const void* whole) {
  if (whole == nullptr) return {};
  AlignedBytes part(runs.total_bytes());
  Gather(runs, static_cast<const std::byte*>(whole), part.data());
  return part;
}

void PutBack(const StridedRuns& runs, const AlignedBytes& part, AlignedBytes& whole) {
  RunCursor(runs, whole.data()).Scatter(part.data(), runs.total_bytes());
}

std::vector<std::byte> BytesOf(const AlignedBytes& tensor) {
  return {tensor.data(), tensor.data() + tensor.size()};
}

std::vector<float> FloatsOf(const AlignedBytes& tensor) {
  return {tensor.as<float>(), tensor.as<float>() + tensor.size() / 4};
}

// The whole call by its pieces, as the client does it without sending anything.
class PieceByPiece {
 public:
  PieceByPiece(Backend& engine, const Problem& p, const ProblemInputs& in, const Outputs& given)
      : engine_(engine), p_(p), in_(in), given_(given), got_(p) {}

  Outputs Run(const std::vector<ShardRange>& forward, const std::vector<ShardRange>& backward) {
    ShardMerger o(p_, forward, Direction::kForward,
                  {.o = got_.o.data(), .lse = got_.lse.as<float>()});
    for (size_t n = 0; n < forward.size(); ++n) Forward(forward, n, o);
    ShardMerger gradients(
        p_, backward, Direction::kBackward,
        {.d_k = got_.d_k.data(), .d_v = got_.d_v.data(), .d_sink = got_.d_sink.as<float>()});
    // Parts may arrive in any order.
    for (size_t n = backward.size(); n-- > 0;) Backward(backward, n, gradients);
    return std::move(got_);
  }

 private:
  struct Piece {
    Piece(const Problem& whole, const ShardRange& r, const ProblemInputs& in, const Outputs& given)
        : problem(SubProblem(whole, r)), runs(ShardRunsOf(whole, r)), out(problem) {
      inputs.q = Part(runs.q, in.q.data());
      inputs.k = Part(runs.k, in.k.data());
      inputs.v = Part(runs.v, in.v.data());
      if (whole.bool_mask) inputs.mask_bits = Part(runs.mask_bits, in.mask_bits.data());
      if (whole.bias) inputs.bias = Part(runs.bias, in.bias.data());
      inputs.d_o = Part(runs.o, in.d_o.data());
      inputs.d_lse = Part(runs.lse, in.d_lse.data());
      o = Part(runs.o, given.o.data());
      lse = Part(runs.lse, given.lse.data());
    }
    Problem problem;
    ShardRuns runs;
    ProblemInputs inputs;
    AlignedBytes o, lse;  // what backward is given
    Outputs out;
  };

  void Forward(const std::vector<ShardRange>& shards, size_t n, ShardMerger& merger) {
    const ShardRange& r = shards[n];
    const bool partial = IsPartial(r, Direction::kForward);
    Piece piece(p_, r, in_, given_);
    if (IsTrivial(p_, r)) {
      std::memset(piece.out.o.data(), 0, static_cast<size_t>(piece.out.o.size()));
      std::fill_n(piece.out.lse.as<float>(), piece.out.lse.size() / 4,
                  -std::numeric_limits<float>::infinity());
    } else {
      EXPECT_EQ(Validate(piece.problem), absl::OkStatus());
      piece.out = RunForward(engine_, piece.problem, piece.inputs);
    }
    if (partial) {
      merger.Add(static_cast<int64_t>(n),
                 {.o = BytesOf(piece.out.o), .lse = FloatsOf(piece.out.lse)});
      return;
    }
    PutBack(piece.runs.o, piece.out.o, got_.o);
    PutBack(piece.runs.lse, piece.out.lse, got_.lse);
  }

  void Backward(const std::vector<ShardRange>& shards, size_t n, ShardMerger& merger) {
    const ShardRange& r = shards[n];
    Piece piece(p_, r, in_, given_);
    const bool partial = IsPartial(r, Direction::kBackward);
    if (IsTrivial(p_, r)) {
      for (AlignedBytes* tensor :
           {&piece.out.d_q, &piece.out.d_k, &piece.out.d_v, &piece.out.d_sink}) {
        std::memset(tensor->data(), 0, static_cast<size_t>(tensor->size()));
      }
      if (partial) merger.Add(static_cast<int64_t>(n), {});
    } else {
      RunBackward(engine_, piece.problem, piece.inputs, piece.o, piece.lse, piece.out);
      if (partial) {
        merger.Add(static_cast<int64_t>(n), {.d_k = BytesOf(piece.out.d_k),
                                             .d_v = BytesOf(piece.out.d_v),
                                             .d_sink = FloatsOf(piece.out.d_sink)});
      }
    }
    PutBack(piece.runs.q, piece.out.d_q, got_.d_q);
    if (partial) return;
    PutBack(piece.runs.k, piece.out.d_k, got_.d_k);
    PutBack(piece.runs.v, piece.out.d_v, got_.d_v);
    PutBack(piece.runs.d_sink, piece.out.d_sink, got_.d_sink);
  }

  Backend& engine_;
  const Problem& p_;
  const ProblemInputs& in_;
  const Outputs& given_;
  Outputs got_;
};

// The largest difference between two tensors, relative to the largest number of the first, with
// infinities and NaN in the same places.
double Difference(ElementType element, const AlignedBytes& expected, const AlignedBytes& got) {
  double most = 0, largest = 0;
  for (int64_t n = 0; n < expected.size() / ElementBytes(element); ++n) {
    const double a = LoadElement(element, expected.data(), n);
    const double b = LoadElement(element, got.data(), n);
    if (!std::isfinite(a) || !std::isfinite(b)) {
      if (a != b && !(std::isnan(a) && std::isnan(b))) return std::numeric_limits<double>::max();
      continue;
    }
    largest = std::max(largest, std::abs(a));
    most = std::max(most, std::abs(a - b));
  }
  return most == 0 ? 0 : most / largest;
}

// Unit roundoff of the element.
double Roundoff(ElementType element) {
  return element == ElementType::kFloat16    ? 0x1p-11
         : element == ElementType::kBFloat16 ? 0x1p-8
                                             : 0x1p-24;
}

struct Cuts {
  int rows = 0, keys = 0;
  void Count(const std::vector<ShardRange>& shards) {
    for (const ShardRange& r : shards) {
      rows += r.cut == Cut::kRows;
      keys += r.cut == Cut::kKeys;
    }
  }
};

std::vector<ShardRange> Planned(const Problem& p, Direction direction, const PlanLimits& limits) {
  auto shards = PlanShards(p, direction, limits);
  CHECK(shards.ok()) << shards.status().message();
  return *std::move(shards);
}

// The gradient of a bias has a test of its own: bias_gradient_sum_test.cc.
Problem WithoutBiasGradient(Problem p) {
  if (p.bias) p.bias->want_gradient = false;
  return p;
}

TEST(CutRows, GivesTheUncutBitsForwardOverTheWholeOptionSet) {
  ReferenceBackend engine;
  Cuts cuts;
  for (uint64_t seed = 0; seed < 600; ++seed) {
    Problem p =
        WithoutBiasGradient(RandomProblem(seed, {.max_pairs = 1 << 12, .max_head_dim = 24}));
    SCOPED_TRACE(absl::StrCat("seed ", seed, ": ", ProblemText(p)));
    ProblemInputs in = RandomInputs(p, seed);
    Outputs expected = RunWhole(engine, p, in);
    auto forward = Planned(p, Direction::kForward, SmallPieces(false));
    auto backward = Planned(p, Direction::kBackward, SmallPieces(false));
    cuts.Count(forward);
    for (const ShardRange& r : backward) EXPECT_EQ(r.cut, Cut::kNone);
    Outputs got = PieceByPiece(engine, p, in, expected).Run(forward, backward);
    ASSERT_TRUE(got.o == expected.o && got.lse == expected.lse);
    ASSERT_TRUE(got.d_q == expected.d_q && got.d_k == expected.d_k && got.d_v == expected.d_v);
  }
  EXPECT_GT(cuts.rows, 1000);
  EXPECT_EQ(cuts.keys, 0);
}

// The pieces of real calls, on the engine that computes in tiles.
TEST(CutRows, GivesTheUncutBitsOfTheCpuEngineAtItsSteps) {
  auto engine = MakeCpuBackend({.threads = 2});
  PlanLimits limits = SmallPieces(false);
  limits.steps = CutSteps();
  Cuts cuts;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Problem p =
        WithoutBiasGradient(RandomProblem(seed, {.max_pairs = 1 << 12, .max_head_dim = 40}));
    if (IsPacked(p.layout)) continue;
    // Longer than some tiles, with lengths that no tile divides; lists and shapes follow.
    Random random(seed);
    const int64_t rows = random.Between(200, 700), keys = random.Between(300, 900);
    for (auto* shape :
         {p.bool_mask ? &p.bool_mask->shape : nullptr, p.bias ? &p.bias->shape : nullptr}) {
      if (shape == nullptr) continue;
      if (shape->rows != 1) shape->rows = rows;
      if (shape->columns != 1) shape->columns = keys;
    }
    for (int32_t& length : p.kv_lengths) length = static_cast<int32_t>(random.Between(0, keys));
    p.q_len = rows;
    p.kv_len = keys;
    if (p.alignment == Alignment::kUnspecified) p.alignment = Alignment::kBottomRight;
    ASSERT_EQ(Validate(p), absl::OkStatus());
    SCOPED_TRACE(absl::StrCat("seed ", seed, ": ", ProblemText(p)));
    ProblemInputs in = RandomInputs(p, seed);
    Outputs expected = RunForward(*engine, p, in);
    auto forward = Planned(p, Direction::kForward, limits);
    cuts.Count(forward);
    Outputs got = PieceByPiece(*engine, p, in, expected).Run(forward, {});
    ASSERT_TRUE(got.o == expected.o && got.lse == expected.lse);
  }
  EXPECT_GT(cuts.rows, 100);
}

// Merged parts: twice rounded numbers, each within its roundoff, and float32 sums of a few.
TEST(MergedCuts, GiveTheUncutResultWithinRoundingOverTheWholeOptionSet) {
  ReferenceBackend engine;
  Cuts forward_cuts, backward_cuts;
  for (uint64_t seed = 0; seed < 600; ++seed) {
    Problem p =
        WithoutBiasGradient(RandomProblem(seed, {.max_pairs = 1 << 12, .max_head_dim = 24}));
    SCOPED_TRACE(absl::StrCat("seed ", seed, ": ", ProblemText(p)));
    ProblemInputs in = RandomInputs(p, seed);
    Outputs expected = RunWhole(engine, p, in);
    std::vector<ShardRange> forward;
    for (const ShardRange& r : Planned(p, Direction::kForward, SmallPieces(false))) {
      ShardRange whole = r;
      whole.cut = Cut::kNone;
      bool first = r.cut != Cut::kRows || r.row_begin == 0;
      if (!first) continue;
      if (!MayCut(p, whole, Direction::kForward, Cut::kKeys)) {
        forward.push_back(whole);
        continue;
      }
      for (const ShardRange& piece : CutShard(p, whole, Cut::kKeys, 3, {.rows = 16, .keys = 8})) {
        forward.push_back(piece);
      }
    }
    auto backward = Planned(p, Direction::kBackward, SmallPieces(true));
    forward_cuts.Count(forward);
    backward_cuts.Count(backward);
    Outputs got = PieceByPiece(engine, p, in, expected).Run(forward, backward);
    const double unit = Roundoff(p.element);
    ASSERT_LE(Difference(p.element, expected.o, got.o), 4 * unit + 0x1p-20);
    ASSERT_LE(Difference(ElementType::kFloat32, expected.lse, got.lse), 0x1p-20);
    ASSERT_TRUE(got.d_q == expected.d_q);
    ASSERT_LE(Difference(p.element, expected.d_k, got.d_k), 6 * unit + 0x1p-20);
    ASSERT_LE(Difference(p.element, expected.d_v, got.d_v), 6 * unit + 0x1p-20);
    if (p.denominator == DenominatorKind::kSink) {
      ASSERT_LE(Difference(ElementType::kFloat32, expected.d_sink, got.d_sink), 0x1p-18);
    }
  }
  EXPECT_GT(forward_cuts.keys, 1000);
  EXPECT_GT(backward_cuts.rows, 1000);
}

// exp of the sink relative to any key would be infinite.
TEST(MergedCuts, TakeASinkThatOutweighsEveryKey) {
  ReferenceBackend engine;
  Problem p;
  p.batch = p.q_heads = p.kv_heads = 1;
  p.q_len = 4;
  p.kv_len = 48;
  p.qk_head_dim = p.v_head_dim = 8;
  p.denominator = DenominatorKind::kSink;
  p.sink_logits = {2000};
  ProblemInputs in = RandomInputs(p, 1);
  Outputs expected = RunWhole(engine, p, in);
  auto keys = CutShard(p, {0, 1, 0, 1}, Cut::kKeys, 3, {.rows = 16, .keys = 8});
  EXPECT_EQ(keys.size(), 3u);
  Outputs got = PieceByPiece(engine, p, in, expected).Run(keys, {});
  EXPECT_TRUE(got.o == expected.o);
  EXPECT_TRUE(got.lse == expected.lse);
}

// With a strided mask each residue class has tiles of its own.
TEST(CutShard, BeginsWhereTilesOfResidueClassesDo) {
  Problem p = PlainProblem(1, 1, 4096, 64);
  p.window_left = p.window_right = 900;
  SetMask(Leaf(StrideRel{3, 1}), p);
  const ShardRange whole{0, 1, 0, 1};
  const auto rows = CutShard(p, whole, Cut::kRows, 4, {});
  ASSERT_EQ(rows.size(), 4u);
  const auto keys = CutShard(p, whole, Cut::kKeys, 4, {});
  ASSERT_EQ(keys.size(), 3u);
  for (const auto& shards : {rows, keys}) {
    for (const ShardRange& r : shards) {
      EXPECT_EQ(r.row_begin % (3 * CutSteps().rows), 0) << r.row_begin;
      EXPECT_EQ(r.key_begin % (3 * CutSteps().keys), 0) << r.key_begin;
    }
  }
  EXPECT_GT(rows[2].key_begin, 0);
  p.dropout.threshold = 26;  // no engine then goes by classes
  EXPECT_EQ(CutShard(p, whole, Cut::kRows, 4, {})[2].row_begin, 2048);
}

TEST(CutShard, SendsOnlyTheKeysThatItsRowsSee) {
  Problem p = PlainProblem(1, 1, 4096, 64);
  p.causal = true;
  const ShardRange whole{0, 1, 0, 1};
  auto causal = CutShard(p, whole, Cut::kRows, 4, {});
  ASSERT_EQ(causal.size(), 4u);
  EXPECT_EQ(causal[0].row_count, 2048);  // of 4096 rows the first half has a quarter of the scores
  EXPECT_EQ(causal[0].key_count, 2048);
  EXPECT_EQ(causal[3].key_count, 4096);
  p.window_left = 100;
  auto window = CutShard(p, whole, Cut::kRows, 4, {});
  ASSERT_EQ(window.size(), 4u);
  EXPECT_EQ(window[3].row_begin, 3072);
  EXPECT_EQ(window[3].key_begin, 2816);  // 3072 − 100, at a step
  EXPECT_EQ(window[3].key_count, 4096 - 2816);
  auto keys = CutShard(p, whole, Cut::kKeys, 4, {});
  ASSERT_EQ(keys.size(), 4u);
  EXPECT_EQ(keys[1].row_begin, 1024);
  EXPECT_EQ(keys[1].row_count, 1024 + 100);
}

TEST(MayCut, RefusesWhatAPieceCannotSay) {
  Problem p = PlainProblem(2, 2, 1024, 8);
  const ShardRange one{0, 1, 0, 1};
  EXPECT_TRUE(MayCut(p, one, Direction::kForward, Cut::kRows));
  EXPECT_TRUE(MayCut(p, one, Direction::kForward, Cut::kKeys));
  EXPECT_TRUE(MayCut(p, one, Direction::kBackward, Cut::kRows));
  EXPECT_FALSE(MayCut(p, one, Direction::kBackward, Cut::kKeys));
  EXPECT_FALSE(MayCut(p, {0, 2, 0, 1}, Direction::kForward, Cut::kRows));
  Problem dropout = p, rest = p, bias = p, far = p;
  dropout.dropout.threshold = 10;
  EXPECT_FALSE(MayCut(dropout, one, Direction::kForward, Cut::kRows));
  rest.denominator = DenominatorKind::kZeroRest;
  EXPECT_TRUE(MayCut(rest, one, Direction::kForward, Cut::kRows));
  EXPECT_FALSE(MayCut(rest, one, Direction::kForward, Cut::kKeys));
  bias.bias = Bias{ElementType::kFloat32, {1, 1, 1024, 1024}, true};
  EXPECT_TRUE(MayCut(bias, one, Direction::kForward, Cut::kRows));
  EXPECT_FALSE(MayCut(bias, one, Direction::kBackward, Cut::kRows));
  far.alignment = Alignment::kOffsets;
  far.offsets = {static_cast<int32_t>(kMaxLength)};
  EXPECT_FALSE(MayCut(far, one, Direction::kForward, Cut::kRows));
}

// Many query heads on one KV head: rows outweigh the keys that each piece brings again.
TEST(PlanShards, CutsRowsWhereHeadsAreTooCoarse) {
  Problem p;
  p.batch = p.kv_heads = 1;
  p.q_heads = 8;
  p.q_len = p.kv_len = 4096;
  p.qk_head_dim = p.v_head_dim = 64;
  MessageSizes whole = MessageSizesOf(p, Direction::kForward);
  PlanLimits limits{.target_bytes = whole.request / 4, .max_message_bytes = int64_t{1} << 40};
  auto shards = Planned(p, Direction::kForward, limits);
  EXPECT_GE(shards.size(), 4u);
  for (const ShardRange& r : shards) EXPECT_EQ(r.cut, Cut::kRows);
  EXPECT_EQ(Planned(p, Direction::kBackward, limits).size(), 1u);  // its sums would be others
  limits.merge = true;
  EXPECT_GT(Planned(p, Direction::kBackward, limits).size(), 1u);
  // With a KV head for each, every piece would bring as many keys as it saves rows.
  p.q_heads = 1;
  EXPECT_EQ(Planned(p, Direction::kForward, limits).size(), 1u);
  // Few rows on very many keys: only keys can be cut.
  p.q_len = 64;
  p.kv_len = 65536;
  auto keys = Planned(p, Direction::kForward, limits);
  EXPECT_GT(keys.size(), 1u);
  EXPECT_EQ(keys.front().cut, Cut::kKeys);
  limits.merge = false;
  EXPECT_EQ(Planned(p, Direction::kForward, limits).size(), 1u);
}

}  // namespace
}  // namespace attnd
