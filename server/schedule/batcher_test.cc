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
  // Due in `milliseconds`.
  AdmittedCall DueIn(int64_t milliseconds, uint64_t id, const std::string& caller = "a") {
    auto call = admission_.Admit(
        DecodedCall(SmallProblem()),
        {.id = id, .caller = caller, .deadline = Now() + absl::Milliseconds(milliseconds)});
    CHECK(call.ok()) << call.status();
    return *std::move(call);
  }
  absl::Time Now() const { return clock_.Now(); }
  static std::vector<uint64_t> Ids(const Batch& batch) {
    std::vector<uint64_t> ids;
    for (const AdmittedCall& call : batch.calls()) ids.push_back(call.context().id);
    return ids;
  }
  // The order in which calls leave, batch by batch.
  std::vector<uint64_t> Drain(Batcher& batcher) const {
    std::vector<uint64_t> order;
    while (std::optional<Batch> batch = batcher.Take(Now())) {
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
  EXPECT_FALSE(batcher.Take(Now()).has_value());
}

TEST_F(BatcherTest, PutsCallsOfOneKeyIntoOneBatchAndOthersIntoAnother) {
  Batcher batcher({});
  batcher.Add(Call(1));
  batcher.Add(Call(2, "a", 16, Priority::kNormal, /*causal=*/true));
  batcher.Add(Call(3));
  batcher.Add(Call(4, "b", 24));  // another length may share the launch
  EXPECT_EQ(Ids(*batcher.Take(Now())), (IdList{1, 3, 4}));
  EXPECT_EQ(Ids(*batcher.Take(Now())), (IdList{2}));
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
    EXPECT_EQ(Ids(*batcher.Take(Now())), (IdList{1}));
    EXPECT_EQ(Ids(*batcher.Take(Now())), (IdList{2, 3}));
  }
  const v1::ForwardResponse forward = ComputeForward(backend_, plain, MakeForward(plain, 1));
  Batcher batcher({});
  batcher.Add(Call(1, DecodedCall(plain)));
  batcher.Add(Call(2, DecodedRequest(MakeBackward(plain, 1, forward), Direction::kBackward)));
  EXPECT_EQ(Ids(*batcher.Take(Now())), (IdList{1}));
}

TEST_F(BatcherTest, ClosesABatchAtItsLimitOfCalls) {
  Batcher batcher({.max_calls = 2});
  for (uint64_t id = 1; id <= 5; ++id) batcher.Add(Call(id));
  EXPECT_EQ(Ids(*batcher.Take(Now())), (IdList{1, 2}));
  EXPECT_EQ(Ids(*batcher.Take(Now())), (IdList{3, 4}));
  EXPECT_EQ(Ids(*batcher.Take(Now())), (IdList{5}));
}

TEST_F(BatcherTest, LeavesOtherFreeSlotsTheirShare) {
  Batcher batcher({});
  for (uint64_t id = 1; id <= 24; ++id) batcher.Add(Call(id));
  EXPECT_EQ(Ids(*batcher.Take(Now(), /*slots=*/4)).size(), 6u);
  EXPECT_EQ(Ids(*batcher.Take(Now(), 3)).size(), 6u);
  EXPECT_EQ(Ids(*batcher.Take(Now(), 2)).size(), 6u);
  EXPECT_EQ(Ids(*batcher.Take(Now(), 1)).size(), 6u);
  EXPECT_TRUE(batcher.empty());
}

TEST_F(BatcherTest, CutsNoHandfulOfCalls) {
  Batcher batcher({});
  for (uint64_t id = 1; id <= 5; ++id) batcher.Add(Call(id));
  EXPECT_EQ(Ids(*batcher.Take(Now(), /*slots=*/4)), (IdList{1, 2, 3, 4}));
  EXPECT_EQ(Ids(*batcher.Take(Now(), 3)), (IdList{5}));
}

TEST_F(BatcherTest, ClosesABatchAtItsLimitOfBytes) {
  int64_t one = Call(0).bytes();
  Batcher exact({.max_bytes = 2 * one});
  Batcher below({.max_bytes = 2 * one - 1});
  for (uint64_t id = 1; id <= 2; ++id) {
    exact.Add(Call(id));
    below.Add(Call(id));
  }
  EXPECT_EQ(Ids(*exact.Take(Now())), (IdList{1, 2}));
  EXPECT_EQ(Ids(*below.Take(Now())), (IdList{1}));
}

TEST_F(BatcherTest, ClosesABatchAtItsLimitOfSeconds) {
  Batcher batcher({.max_seconds = 2 * Call(0).seconds()});
  for (uint64_t id = 1; id <= 3; ++id) batcher.Add(Call(id));
  EXPECT_EQ(Ids(*batcher.Take(Now())), (IdList{1, 2}));
  EXPECT_EQ(Ids(*batcher.Take(Now())), (IdList{3}));
}

TEST_F(BatcherTest, LetsNoCallPassAnotherOfItsFlowThatDoesNotFit) {
  Batcher batcher({.max_bytes = 2 * Call(0).bytes()});
  batcher.Add(Call(1));
  batcher.Add(Call(2, "a", 64));
  batcher.Add(Call(3));
  EXPECT_EQ(Ids(*batcher.Take(Now())), (IdList{1}));
  EXPECT_EQ(Drain(batcher), (IdList{2, 3}));
}

TEST_F(BatcherTest, RunsACallAboveEveryLimitAlone) {
  Batcher batcher({.max_bytes = 1, .max_seconds = 0});
  batcher.Add(Call(1));
  batcher.Add(Call(2));
  EXPECT_EQ(Ids(*batcher.Take(Now())), (IdList{1}));
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

TEST_F(BatcherTest, RunsACallersCallsAsTheyAreDue) {
  Batcher batcher({.max_calls = 1});
  batcher.Add(DueIn(9000, 1));
  batcher.Add(DueIn(200, 2));
  batcher.Add(DueIn(1000, 3));
  batcher.Add(DueIn(200, 4));
  EXPECT_EQ(Drain(batcher), (IdList{2, 4, 3, 1}));
}

// Whoever sends deadlines of an hour, or none, waits behind those that keep coming, but not longer.
TEST_F(BatcherTest, RunsACallWithoutDeadlineOnceItHasWaitedForTheLongestQueue) {
  Admission admission({.max_queue_seconds = 30}, backend_, cost_, clock_);
  auto add = [&](Batcher& batcher, uint64_t id, absl::Time deadline) {
    auto call = admission.Admit(DecodedCall(SmallProblem()),
                                {.id = id, .caller = "a", .deadline = deadline});
    ASSERT_TRUE(call.ok()) << call.status();
    batcher.Add(*std::move(call));
  };
  Batcher batcher({.max_calls = 1});
  add(batcher, 1, absl::InfiniteFuture());
  clock_.Advance(absl::Seconds(29));
  add(batcher, 2, Now() + absl::Milliseconds(900));
  clock_.Advance(absl::Milliseconds(200));
  add(batcher, 3, Now() + absl::Milliseconds(900));
  EXPECT_EQ(Drain(batcher), (IdList{2, 1, 3}));
}

TEST_F(BatcherTest, RunsACallThatCannotBeMetAnyMoreAfterThoseThatCan) {
  Batcher batcher({.max_calls = 1});
  batcher.Add(DueIn(10, 1));
  batcher.Add(DueIn(20, 2));
  batcher.Add(DueIn(500, 3));
  batcher.Add(DueIn(900, 4, "b"));
  clock_.Advance(absl::Milliseconds(20));
  EXPECT_EQ(Drain(batcher), (IdList{3, 4, 1, 2}));
}

// An estimate that is too long by less than two does not put a call behind.
TEST_F(BatcherTest, BelievesThatACallMayTakeHalfOfItsEstimate) {
  const double seconds = Call(0, "a", 1024).seconds();
  for (const auto& [left, order] :
       std::vector<std::pair<double, IdList>>{{0.51 * seconds, {1, 2}}, {0.49 * seconds, {2, 1}}}) {
    Batcher batcher({.max_calls = 1});
    auto tight = admission_.Admit(DecodedCall(SmallProblem(1024)),
                                  {.id = 1, .caller = "a", .deadline = Now() + absl::Seconds(9)});
    ASSERT_TRUE(tight.ok()) << tight.status();
    batcher.Add(*std::move(tight));
    batcher.Add(DueIn(60000, 2));
    clock_.Advance(absl::Seconds(9 - left));
    EXPECT_EQ(Drain(batcher), order);
  }
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
    done = batcher.Take(Now())->calls().front().context().caller == "large";
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
  for (int n = 0; n < 420; ++n) ++served[batcher.Take(Now())->calls().front().context().caller];
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
  for (int n = 0; n < 85; ++n) high += batcher.Take(Now())->calls().front().context().id < 1000;
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
    std::optional<Batch> batch = batcher.Take(Now());
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
      std::optional<Batch> batch = batcher.Take(Now());
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
