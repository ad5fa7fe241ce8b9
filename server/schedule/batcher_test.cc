#include "server/schedule/batcher.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "tests/fixtures/gated_backend.h"
#include "tests/fixtures/pipeline_fixture.h"

namespace attnd {
namespace {

class BatcherTest : public testing::Test {
 protected:
  BatcherTest()
      : cost_(1e9),
        admission_({.max_calls = 1 << 20, .max_queue_seconds = 1e9, .caller_max_calls = 1 << 20},
                   backend_, cost_, clock_) {}

  AdmittedCall Call(uint64_t id, AttentionCall decoded) {
    auto call = admission_.Admit(std::move(decoded), {.id = id, .caller = "a"});
    CHECK(call.ok()) << call.status();
    return *std::move(call);
  }
  AdmittedCall Call(uint64_t id, const std::string& caller = "a", int64_t length = 16,
                    Priority priority = Priority::kNormal, bool causal = false) {
    Problem problem = SmallProblem(length);
    problem.causal = causal;
    auto call = admission_.Admit(DecodedCall(problem, priority), {.id = id, .caller = caller});
    CHECK(call.ok()) << call.status();
    return *std::move(call);
  }
  static std::vector<uint64_t> Ids(const Batch& batch) {
    std::vector<uint64_t> ids;
    for (const AdmittedCall& call : batch.calls()) ids.push_back(call.context().id);
    return ids;
  }
  // The order in which calls leave, batch by batch.
  static std::vector<uint64_t> Drain(Batcher& batcher) {
    std::vector<uint64_t> order;
    while (std::optional<Batch> batch = batcher.Take()) {
      for (uint64_t id : Ids(*batch)) order.push_back(id);
    }
    return order;
  }

  GatedBackend backend_;
  CostModel cost_;
  FakeClock clock_;
  Admission admission_;
};

using IdList = std::vector<uint64_t>;

TEST_F(BatcherTest, GivesNothingWhenEmpty) {
  Batcher batcher({});
  EXPECT_FALSE(batcher.Take().has_value());
}

TEST_F(BatcherTest, PutsCallsOfOneKeyIntoOneBatchAndOthersIntoAnother) {
  Batcher batcher({});
  batcher.Add(Call(1));
  batcher.Add(Call(2, "a", 16, Priority::kNormal, /*causal=*/true));
  batcher.Add(Call(3));
  batcher.Add(Call(4, "b", 24));  // another length may share the launch
  EXPECT_EQ(Ids(*batcher.Take()), (IdList{1, 3, 4}));
  EXPECT_EQ(Ids(*batcher.Take()), (IdList{2}));
  EXPECT_TRUE(batcher.empty());
}

// Kernels and their tiles are chosen for a launch by all of these.
TEST_F(BatcherTest, PutsWhatNeedsAnotherKernelIntoAnotherBatch) {
  const Problem plain = SmallProblem();
  const std::pair<const char*, void (*)(Problem&)> cases[] = {
      {"element", [](Problem& p) { p.element = ElementType::kBFloat16; }},
      {"qk_head_dim", [](Problem& p) { p.qk_head_dim = 16; }},
      {"v_head_dim", [](Problem& p) { p.v_head_dim = 16; }},
      {"causal", [](Problem& p) { p.causal = true; }},
      {"mask",
       [](Problem& p) {
         p.bool_mask = BoolMask{{1, 1, p.q_len, p.kv_len}};
       }},
      {"bias",
       [](Problem& p) {
         p.bias = Bias{p.element, {1, 1, p.q_len, p.kv_len}, false};
       }},
      {"alibi", [](Problem& p) { p.alibi_slopes.assign(static_cast<size_t>(p.q_heads), 0.5f); }},
      {"dropout", [](Problem& p) { p.dropout.threshold = 64; }},
      {"softcap", [](Problem& p) { p.softcap = 30; }},
      {"denominator", [](Problem& p) { p.denominator = DenominatorKind::kZeroRest; }},
      {"nondeterministic", [](Problem& p) { p.allow_nondeterministic = true; }},
  };
  for (const auto& [name, change] : cases) {
    SCOPED_TRACE(name);
    Problem other = plain;
    change(other);
    Batcher batcher({});
    batcher.Add(Call(1, DecodedCall(plain)));
    batcher.Add(Call(2, DecodedCall(other)));
    batcher.Add(Call(3, DecodedCall(other)));
    EXPECT_EQ(Ids(*batcher.Take()), (IdList{1}));
    EXPECT_EQ(Ids(*batcher.Take()), (IdList{2, 3}));
  }
  const v1::ForwardResponse forward = ComputeForward(backend_, plain, MakeForward(plain, 1));
  Batcher batcher({});
  batcher.Add(Call(1, DecodedCall(plain)));
  batcher.Add(Call(2, DecodedRequest(MakeBackward(plain, 1, forward), Direction::kBackward)));
  EXPECT_EQ(Ids(*batcher.Take()), (IdList{1}));
}

TEST_F(BatcherTest, ClosesABatchAtItsLimitOfCalls) {
  Batcher batcher({.max_calls = 2});
  for (uint64_t id = 1; id <= 5; ++id) batcher.Add(Call(id));
  EXPECT_EQ(Ids(*batcher.Take()), (IdList{1, 2}));
  EXPECT_EQ(Ids(*batcher.Take()), (IdList{3, 4}));
  EXPECT_EQ(Ids(*batcher.Take()), (IdList{5}));
}

TEST_F(BatcherTest, LeavesOtherFreeSlotsTheirShare) {
  Batcher batcher({});
  for (uint64_t id = 1; id <= 24; ++id) batcher.Add(Call(id));
  EXPECT_EQ(Ids(*batcher.Take(/*slots=*/4)).size(), 6u);
  EXPECT_EQ(Ids(*batcher.Take(3)).size(), 6u);
  EXPECT_EQ(Ids(*batcher.Take(2)).size(), 6u);
  EXPECT_EQ(Ids(*batcher.Take(1)).size(), 6u);
  EXPECT_TRUE(batcher.empty());
}

TEST_F(BatcherTest, CutsNoHandfulOfCalls) {
  Batcher batcher({});
  for (uint64_t id = 1; id <= 5; ++id) batcher.Add(Call(id));
  EXPECT_EQ(Ids(*batcher.Take(/*slots=*/4)), (IdList{1, 2, 3, 4}));
  EXPECT_EQ(Ids(*batcher.Take(3)), (IdList{5}));
}

TEST_F(BatcherTest, ClosesABatchAtItsLimitOfBytes) {
  int64_t one = Call(0).bytes();
  Batcher exact({.max_bytes = 2 * one});
  Batcher below({.max_bytes = 2 * one - 1});
  for (uint64_t id = 1; id <= 2; ++id) {
    exact.Add(Call(id));
    below.Add(Call(id));
  }
  EXPECT_EQ(Ids(*exact.Take()), (IdList{1, 2}));
  EXPECT_EQ(Ids(*below.Take()), (IdList{1}));
}

TEST_F(BatcherTest, ClosesABatchAtItsLimitOfSeconds) {
  Batcher batcher({.max_seconds = 2 * Call(0).seconds()});
  for (uint64_t id = 1; id <= 3; ++id) batcher.Add(Call(id));
  EXPECT_EQ(Ids(*batcher.Take()), (IdList{1, 2}));
  EXPECT_EQ(Ids(*batcher.Take()), (IdList{3}));
}

TEST_F(BatcherTest, LetsNoCallPassAnotherOfItsFlowThatDoesNotFit) {
  Batcher batcher({.max_bytes = 2 * Call(0).bytes()});
  batcher.Add(Call(1));
  batcher.Add(Call(2, "a", 64));
  batcher.Add(Call(3));
  EXPECT_EQ(Ids(*batcher.Take()), (IdList{1}));
  EXPECT_EQ(Drain(batcher), (IdList{2, 3}));
}

TEST_F(BatcherTest, RunsACallAboveEveryLimitAlone) {
  Batcher batcher({.max_bytes = 1, .max_seconds = 0});
  batcher.Add(Call(1));
  batcher.Add(Call(2));
  EXPECT_EQ(Ids(*batcher.Take()), (IdList{1}));
}

TEST_F(BatcherTest, KeepsTheOrderOfOneCallersCallsOfOneKey) {
  Batcher batcher({.max_calls = 3});
  IdList expected;
  for (uint64_t id = 1; id <= 20; ++id) {
    batcher.Add(Call(id, "a", 8 + static_cast<int64_t>(id % 5)));
    expected.push_back(id);
  }
  EXPECT_EQ(Drain(batcher), expected);
}

TEST_F(BatcherTest, LetsSmallCallsPassALargeOneOfAnotherCaller) {
  Batcher batcher({.max_calls = 1});
  batcher.Add(Call(100, "large", 2048));
  for (uint64_t id = 1; id <= 10; ++id) batcher.Add(Call(id, "small"));
  IdList order = Drain(batcher);
  ASSERT_EQ(order.size(), 11u);
  EXPECT_EQ(order.back(), 100u);
}

TEST_F(BatcherTest, RunsALargeCallAlthoughSmallOnesKeepComing) {
  Batcher batcher({.max_calls = 1});
  AdmittedCall large = Call(1000000, "large", 1024);
  double large_seconds = large.seconds(), small_seconds = Call(0).seconds();
  batcher.Add(std::move(large));
  uint64_t id = 1;
  batcher.Add(Call(id++, "small"));
  // The small caller always has another call waiting; shares are equal, so the large call's turn
  // comes after about as much work as it is itself.
  double served = 0;
  for (bool done = false; !done;) {
    batcher.Add(Call(id++, "small"));
    done = batcher.Take()->calls().front().context().caller == "large";
    served += small_seconds;
    ASSERT_LT(served, 2 * large_seconds + 0.01);
  }
}

TEST_F(BatcherTest, SharesByWeightOfPriority) {
  Batcher batcher({.max_calls = 1});
  for (uint64_t n = 0; n < 400; ++n) {
    batcher.Add(Call(n, "high", 256, Priority::kHigh));
    batcher.Add(Call(1000 + n, "normal", 256, Priority::kNormal));
    batcher.Add(Call(2000 + n, "low", 256, Priority::kLow));
  }
  std::map<std::string, int> served;
  for (int n = 0; n < 420; ++n) ++served[batcher.Take()->calls().front().context().caller];
  // 16 : 4 : 1 of 420 are 320, 80 and 20.
  EXPECT_NEAR(served["high"], 320, 20);
  EXPECT_NEAR(served["normal"], 80, 12);
  EXPECT_NEAR(served["low"], 20, 8);
}

TEST_F(BatcherTest, SharesByWeightOfPriorityAmongOneCallersCallsToo) {
  Batcher batcher({.max_calls = 1});
  for (uint64_t n = 0; n < 100; ++n) {
    batcher.Add(Call(1000 + n, "a", 256, Priority::kLow));
    batcher.Add(Call(n, "a", 256, Priority::kHigh));
  }
  int high = 0;
  for (int n = 0; n < 85; ++n) high += batcher.Take()->calls().front().context().id < 1000;
  EXPECT_NEAR(high, 80, 4);  // 16 : 1
}

TEST_F(BatcherTest, SharesEquallyBetweenCallersWhateverTheirCallsCost) {
  Batcher batcher({.max_calls = 1});
  for (uint64_t n = 0; n < 600; ++n) {
    batcher.Add(Call(n, "long", 512));
    batcher.Add(Call(1000 + n, "short", 128));
  }
  double served_long = 0, served_short = 0;
  for (int n = 0; n < 300; ++n) {
    std::optional<Batch> batch = batcher.Take();
    const AdmittedCall& call = batch->calls().front();
    (call.context().caller == "long" ? served_long : served_short) += call.seconds();
  }
  EXPECT_NEAR(served_long / served_short, 1, 0.2);
}

TEST_F(BatcherTest, RemovesACallThatWaits) {
  Batcher batcher({});
  batcher.Add(Call(1));
  batcher.Add(Call(2));
  std::optional<AdmittedCall> gone = batcher.Remove(1);
  ASSERT_TRUE(gone.has_value());
  EXPECT_EQ(gone->context().id, 1u);
  EXPECT_FALSE(batcher.Remove(1).has_value());
  EXPECT_EQ(Drain(batcher), (IdList{2}));
}

TEST_F(BatcherTest, KeepsItsInvariantsWhenCallsAreRandom) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    BatcherLimits limits{.max_calls = 1 + static_cast<int>(random() % 5),
                         .max_bytes = 4000 + static_cast<int64_t>(random() % 40000),
                         .max_seconds = 1e-4 * (1 + random() % 20)};
    Batcher batcher(limits);
    std::vector<uint64_t> seen;
    uint64_t added = 0;
    for (int step = 0; step < 200; ++step) {
      if (random() % 3 != 0) {
        std::string caller(1, static_cast<char>('a' + random() % 4));
        batcher.Add(Call(added++, caller, 1 + static_cast<int64_t>(random() % 64),
                         static_cast<Priority>(random() % 3), random() % 2));
        continue;
      }
      size_t waiting = batcher.size();
      std::optional<Batch> batch = batcher.Take();
      ASSERT_EQ(batch.has_value(), waiting > 0);
      if (!batch.has_value()) continue;
      int64_t bytes = 0;
      for (const AdmittedCall& call : batch->calls()) {
        bytes += call.bytes();
        seen.push_back(call.context().id);
        EXPECT_EQ(BatchKey::Of(call.call()), BatchKey::Of(batch->calls().front().call()));
      }
      EXPECT_LE(static_cast<int>(batch->calls().size()), limits.max_calls);
      if (batch->calls().size() > 1) {
        EXPECT_LE(bytes, limits.max_bytes);
      }
      EXPECT_EQ(batcher.size() + batch->calls().size(), waiting);
    }
    for (uint64_t id : Drain(batcher)) seen.push_back(id);
    std::sort(seen.begin(), seen.end());
    ASSERT_EQ(seen.size(), added);
    for (uint64_t id = 0; id < added; ++id) EXPECT_EQ(seen[id], id);
  }
}

}  // namespace
}  // namespace attnd
