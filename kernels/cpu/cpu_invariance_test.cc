// The CPU engine's promises about bits and cancellation: the same result for any number of threads,
// in any launch, and from any shard by batch entry or KV-head group; a cancelled call writes
// nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention/problem_text.h"
#include "attention/random_problem.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/matrix_tiles.h"
#include "kernels/cpu/tiles.h"
#include "tests/cpu_tiles/emulated_tiles.h"
#include "tests/masks/small_masks.h"

namespace attnd {
namespace {

// One problem with inputs, and the outputs of both directions. Outputs start as NaN bytes.
class Trial {
 public:
  Trial(const Problem& problem, uint64_t seed) : Trial(problem, RandomInputs(problem, seed)) {}
  Trial(const Problem& problem, ProblemInputs inputs) : p_(problem), in_(std::move(inputs)) {
    const int64_t bytes = ElementBytes(p_.element);
    o_ = Nan(p_.OutputElements() * bytes);
    lse_ = Nan(p_.LseElements() * 4);
    d_q_ = Nan(p_.QueryElements() * bytes);
    d_k_ = Nan(p_.KeyElements() * bytes);
    d_v_ = Nan(p_.ValueElements() * bytes);
    d_bias_ = Nan(p_.bias && p_.bias->want_gradient ? p_.bias->shape.elements() * 4 : 0);
    d_sink_ = Nan(p_.denominator == DenominatorKind::kSink ? p_.batch * p_.q_heads * 4 : 0);
  }

  ForwardCall Forward(Backend& backend, std::stop_token stop = {}) {
    workspace_ = Nan(backend.WorkspaceBytes(p_, Direction::kForward));
    ForwardCall call;
    call.problem = &p_;
    call.q = in_.q.data(), call.k = in_.k.data(), call.v = in_.v.data();
    call.mask_bits = in_.mask_bits.as<uint8_t>(), call.bias = in_.bias.data();
    call.o = o_.data(), call.lse = lse_.as<float>();
    call.workspace = workspace_.data(), call.stop = stop;
    return call;
  }

  BackwardCall Backward(Backend& backend, std::stop_token stop = {}) {
    workspace_ = Nan(backend.WorkspaceBytes(p_, Direction::kBackward));
    BackwardCall call;
    call.problem = &p_;
    call.q = in_.q.data(), call.k = in_.k.data(), call.v = in_.v.data();
    call.mask_bits = in_.mask_bits.as<uint8_t>(), call.bias = in_.bias.data();
    call.o = o_.data(), call.lse = lse_.as<float>();
    call.d_o = in_.d_o.data(), call.d_lse = in_.d_lse.as<float>();
    call.d_q = d_q_.data(), call.d_k = d_k_.data(), call.d_v = d_v_.data();
    if (d_bias_.size() > 0) call.d_bias = d_bias_.as<float>();
    if (d_sink_.size() > 0) call.d_sink = d_sink_.as<float>();
    call.workspace = workspace_.data(), call.stop = stop;
    return call;
  }

  void Both(Backend& backend) {
    ForwardCall forward = Forward(backend);
    ASSERT_TRUE(backend.Forward({&forward, 1}).ok());
    BackwardCall backward = Backward(backend);
    ASSERT_TRUE(backend.Backward({&backward, 1}).ok());
  }

  const Problem& problem() const { return p_; }
  ProblemInputs& inputs() { return in_; }
  std::vector<const AlignedBytes*> Results() const {
    return {&o_, &lse_, &d_q_, &d_k_, &d_v_, &d_bias_, &d_sink_};
  }
  AlignedBytes& o() { return o_; }
  AlignedBytes& lse() { return lse_; }

 private:
  static AlignedBytes Nan(int64_t size) {
    AlignedBytes bytes(size);
    std::fill_n(bytes.data(), size, std::byte{0xff});
    return bytes;
  }

  Problem p_;
  ProblemInputs in_;
  AlignedBytes o_, lse_, d_q_, d_k_, d_v_, d_bias_, d_sink_, workspace_;
};

const char* const kResultNames[] = {"o", "lse", "d_q", "d_k", "d_v", "d_bias", "d_sink"};

bool SameBytes(const AlignedBytes& a, const AlignedBytes& b) {
  return std::equal(a.data(), a.data() + a.size(), b.data(), b.data() + b.size());
}

void ExpectSameResults(const Trial& a, const Trial& b, const std::string& what) {
  for (size_t n = 0; n < a.Results().size(); ++n) {
    EXPECT_TRUE(SameBytes(*a.Results()[n], *b.Results()[n]))
        << what << ": " << kResultNames[n] << " of " << ProblemText(a.problem());
  }
}

// Long enough for several tiles of each kind and several gradient slots.
Problem Long() {
  Problem p;
  p.batch = 2;
  p.q_heads = 4;
  p.kv_heads = 2;
  p.q_len = p.kv_len = 700;
  p.qk_head_dim = 24;
  p.v_head_dim = 40;
  return p;
}

std::vector<Problem> LongProblems() {
  Problem causal = Long();
  causal.causal = true;
  causal.dropout = {.threshold = 26, .seed = 5, .offset = 7};
  Problem biased = Long();
  biased.element = ElementType::kBFloat16;
  biased.bias = Bias{ElementType::kFloat32, {1, 1, 700, 700}, true};
  biased.softcap = 20;
  biased.denominator = DenominatorKind::kSink;
  biased.sink_logits = {0.5f, -1, 2, 0};
  Problem strided = Long();  // in residue classes
  strided.causal = true;
  SetMask(Leaf(StrideRel{2, 1}), strided);
  return {Long(), causal, biased, strided};
}

// The parameter: what multiplies tiles of 16-bit tensors, if anything does.
class CpuInvariance : public testing::TestWithParam<const TileUnit*> {
 protected:
  void SetUp() override { ChooseMatrixTiles(GetParam()); }
  void TearDown() override { ChooseMatrixTiles(own_); }

 private:
  const TileUnit* const own_ = MatrixTiles();
};

std::vector<const TileUnit*> TileUnits() {
  std::vector<const TileUnit*> units = {nullptr};
  for (const TileUnit* unit : {MatrixTiles(), EmulatedTiles()}) {
    if (unit != nullptr) units.push_back(unit);
  }
  return units;
}
INSTANTIATE_TEST_SUITE_P(On, CpuInvariance, testing::ValuesIn(TileUnits()), [](const auto& info) {
  return std::string(info.param == nullptr ? "vectors" : info.param->name);
});

TEST_P(CpuInvariance, GivesTheSameBitsForAnyNumberOfThreads) {
  for (const Problem& problem : LongProblems()) {
    ASSERT_GT(GradientSlots(problem, problem.q_len), 1) << "the test must cover several slots";
    std::unique_ptr<Backend> one = MakeCpuBackend({.threads = 1});
    Trial expected(problem, 1);
    expected.Both(*one);
    for (int threads : {2, 3, 8}) {
      std::unique_ptr<Backend> several = MakeCpuBackend({.threads = threads});
      Trial got(problem, 1);
      got.Both(*several);
      ExpectSameResults(expected, got, std::to_string(threads) + " threads");
    }
  }
}

TEST_P(CpuInvariance, GivesTheSameBitsForRandomProblemsInOneLaunch) {
  constexpr uint64_t kFirstSeed = 20;
  std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 3});
  std::vector<Trial> alone, together;
  for (uint64_t seed = kFirstSeed; seed < kFirstSeed + 12; ++seed) {
    Problem problem = RandomProblem(seed);
    alone.emplace_back(problem, seed);
    alone.back().Both(*backend);
    together.emplace_back(problem, seed);
  }
  std::vector<ForwardCall> forward;
  for (Trial& run : together) forward.push_back(run.Forward(*backend));
  ASSERT_TRUE(backend->Forward(forward).ok());
  std::vector<BackwardCall> backward;
  for (Trial& run : together) backward.push_back(run.Backward(*backend));
  ASSERT_TRUE(backend->Backward(backward).ok());
  for (size_t n = 0; n < alone.size(); ++n) {
    ExpectSameResults(alone[n], together[n], "seed " + std::to_string(kFirstSeed + n));
  }
}

// Bytes [part·size/parts, +size/parts) of a tensor.
AlignedBytes Part(const AlignedBytes& whole, int64_t part, int64_t parts) {
  AlignedBytes out(whole.size() / parts);
  std::copy_n(whole.data() + part * out.size(), out.size(), out.data());
  return out;
}

void ExpectPart(const AlignedBytes& whole, int64_t part, int64_t parts, const AlignedBytes& got,
                const std::string& what) {
  EXPECT_TRUE(SameBytes(Part(whole, part, parts), got)) << what;
}

// Entry (b, KV group g) of a bhld problem whose bias, mask and slopes stand for all entries, run
// alone.
Trial Shard(Trial& whole, int64_t part) {
  const Problem& p = whole.problem();
  const int64_t parts = p.batch * p.kv_heads, group = part % p.kv_heads;
  Problem shard = p;
  shard.batch = 1;
  shard.q_heads = p.group_size();
  shard.kv_heads = 1;
  shard.shard = {.batch_offset = part / p.kv_heads,
                 .q_head_offset = group * p.group_size(),
                 .total_q_heads = p.q_heads};
  if (!p.sink_logits.empty()) {
    auto first = p.sink_logits.begin() + group * p.group_size();
    shard.sink_logits = {first, first + p.group_size()};
  }
  ProblemInputs& in = whole.inputs();
  ProblemInputs part_in = {Part(in.q, part, parts),    Part(in.k, part, parts),
                           Part(in.v, part, parts),    Part(in.mask_bits, 0, 1),
                           Part(in.bias, 0, 1),        Part(in.d_o, part, parts),
                           Part(in.d_lse, part, parts)};
  return Trial(shard, std::move(part_in));
}

TEST_P(CpuInvariance, GivesTheSameBitsFromShards) {
  std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 2});
  for (const Problem& problem : LongProblems()) {
    Trial whole(problem, 3);
    whole.Both(*backend);
    const int64_t parts = problem.batch * problem.kv_heads;
    for (int64_t part = 0; part < parts; ++part) {
      Trial shard = Shard(whole, part);
      shard.Both(*backend);
      for (size_t n = 0; n < whole.Results().size(); ++n) {
        if (kResultNames[n] == std::string("d_bias")) continue;  // a sum over the shards
        ExpectPart(*whole.Results()[n], part, parts, *shard.Results()[n],
                   std::string(kResultNames[n]) + " of shard " + std::to_string(part) + " of " +
                       ProblemText(problem));
      }
    }
  }
}

// The docs promise this to a client that splits by batch entry: the sum over entries, in order.
TEST_P(CpuInvariance, BiasGradientIsTheSumOverEntriesInOrder) {
  std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 2});
  Problem problem = LongProblems()[2];
  problem.batch = 3;
  problem.kv_heads = 1;
  Trial whole(problem, 4);
  whole.Both(*backend);
  std::vector<float> sum(problem.bias->shape.elements());
  for (int64_t part = 0; part < problem.batch; ++part) {
    Trial shard = Shard(whole, part);
    shard.Both(*backend);
    const float* d_bias = shard.Results()[5]->as<float>();
    for (size_t n = 0; n < sum.size(); ++n) sum[n] += d_bias[n];
  }
  EXPECT_EQ(0, std::memcmp(sum.data(), whole.Results()[5]->data(), sum.size() * 4));
}

bool IsUntouched(const AlignedBytes& bytes) {
  for (int64_t n = 0; n < bytes.size(); ++n) {
    if (bytes.data()[n] != std::byte{0xff}) return false;
  }
  return true;
}

TEST(CpuCancellation, LeavesACancelledCallOutAndRunsTheOthers) {
  std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 2});
  std::stop_source stop;
  stop.request_stop();
  Trial cancelled(Long(), 1), wanted(Long(), 1), expected(Long(), 1);
  expected.Both(*backend);
  ForwardCall forward[] = {cancelled.Forward(*backend, stop.get_token()), wanted.Forward(*backend)};
  ASSERT_TRUE(backend->Forward(forward).ok());
  BackwardCall backward[] = {cancelled.Backward(*backend, stop.get_token()),
                             wanted.Backward(*backend)};
  ASSERT_TRUE(backend->Backward(backward).ok());
  for (const AlignedBytes* result : cancelled.Results()) EXPECT_TRUE(IsUntouched(*result));
  ExpectSameResults(expected, wanted, "beside a cancelled call");
}

TEST(CpuWorkspace, GrowsNoFasterThanTheLengths) {
  std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 2});
  for (Problem problem : LongProblems()) {
    problem.bias.reset();
    problem.q_len = problem.kv_len = 4096;
    const int64_t bytes = backend->WorkspaceBytes(problem, Direction::kBackward);
    problem.q_len = problem.kv_len = 32768;
    EXPECT_LE(backend->WorkspaceBytes(problem, Direction::kBackward), 8 * bytes);
    EXPECT_GT(bytes, 0);
    EXPECT_EQ(backend->WorkspaceBytes(problem, Direction::kForward), 0);
  }
}

}  // namespace
}  // namespace attnd
