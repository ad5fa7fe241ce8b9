#include "server/keep/lease_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

constexpr int64_t kBlock = 128;  // of one residual here: 64 of inputs, 64 of outputs

Problem SmallProblem() {
  Problem p;
  p.batch = p.q_heads = p.kv_heads = 1;
  p.q_len = p.kv_len = 2;
  p.qk_head_dim = p.v_head_dim = 4;
  return p;
}

LeaseLimits Limits() {
  return {.memory_bytes = 3 * kBlock,
          .caller_bytes = 2 * kBlock,
          .max_leases = 3,
          .ttl = absl::Seconds(10),
          .max_ttl = absl::Seconds(100),
          .min_hold = absl::Seconds(4)};
}

// A table on a clock that stands still, and memory that can be counted.
struct World {
  explicit World(const LeaseLimits& limits = Limits())
      : pool(*StagingPool::Create(int64_t{1} << 20)),
        table(limits, TokenIssuer{1, 7}, SharedMetrics(), clock) {}

  static Metrics& SharedMetrics() {
    static Metrics* metrics = [] {
      auto* made = new Metrics;
      for (const char* name : {"gpu0", "gpu1"}) made->AddDevice(name, BackendInfo());
      return made;
    }();
    return *metrics;
  }
  std::shared_ptr<const ResidualTensors> NewResidual(const Problem& problem = SmallProblem()) {
    StagedTensors staged{.inputs = *pool.TryAcquire(kBlock / 2),
                         .outputs = *pool.TryAcquire(kBlock / 2)};
    return std::make_shared<const ResidualTensors>(problem, std::move(staged), Ticket());
  }
  std::optional<LeaseGrant> Grant(const std::string& owner, const std::string& request = "",
                                  absl::Duration ttl = absl::ZeroDuration()) {
    return table.Grant({.owner = owner, .request = request, .ttl = ttl}, NewResidual());
  }
  absl::Status Find(const std::string& token, const std::string& owner) {
    return table.Find(token, owner, SmallProblem()).status();
  }

  FakeClock clock;
  StagingPool pool;
  LeaseTable table;
};

void ExpectLost(const absl::Status& status, absl::string_view cause) {
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_EQ(ReasonOf(status), reason::kLeaseLost) << status;
  EXPECT_NE(status.message().find(absl::StrCat("(", cause, ")")), std::string::npos) << status;
}

TEST(LeaseTable, FindsWhatItWasGiven) {
  World t;
  std::shared_ptr<const ResidualTensors> residual = t.NewResidual();
  std::optional<LeaseGrant> grant = t.table.Grant({.owner = "alice"}, residual);
  ASSERT_TRUE(grant.has_value());
  EXPECT_EQ(grant->bytes, kBlock);
  EXPECT_EQ(grant->expires, t.clock.Now() + absl::Seconds(10));
  auto found = t.table.Find(grant->token, "alice", SmallProblem());
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->get(), residual.get());
}

TEST(LeaseTable, ServesARetriedBackward) {
  World t;
  std::string token = t.Grant("alice")->token;
  for (int n = 0; n < 3; ++n) EXPECT_TRUE(t.Find(token, "alice").ok());
}

TEST(LeaseTable, ReleasesTwiceWithoutAnError) {
  World t;
  std::string token = t.Grant("alice")->token;
  EXPECT_TRUE(t.table.Release(token, "alice").ok());
  EXPECT_EQ(t.pool.used(), 0);
  EXPECT_TRUE(t.table.Release(token, "alice").ok());
  ExpectLost(t.Find(token, "alice"), "released");
}

TEST(LeaseTable, ExpiresAtItsTimeExactly) {
  World t;
  std::string token = t.Grant("alice")->token;
  t.clock.Advance(absl::Seconds(10) - absl::Nanoseconds(1));
  EXPECT_TRUE(t.table.Renew(token, "alice", absl::ZeroDuration()).ok());
  t.clock.Advance(absl::Seconds(10));
  ExpectLost(t.Find(token, "alice"), "expired");
  EXPECT_EQ(t.pool.used(), 0);
}

TEST(LeaseTable, GivesMemoryBackWhenExpireLooks) {
  World t;
  t.Grant("alice");
  t.clock.Advance(absl::Seconds(10));
  EXPECT_EQ(t.pool.used(), kBlock);
  t.table.Expire();
  EXPECT_EQ(t.pool.used(), 0);
}

TEST(LeaseTable, LivesAsLongAsWishedWithinTheLimit) {
  World t;
  absl::Time now = t.clock.Now();
  EXPECT_EQ(t.Grant("alice", "", absl::Seconds(1))->expires, now + absl::Seconds(1));
  LeaseGrant longer = *t.Grant("alice", "", absl::Hours(1));
  EXPECT_EQ(longer.expires, now + absl::Seconds(100));
  EXPECT_EQ(t.table.Renew(longer.token, "alice", absl::Seconds(3))->expires,
            now + absl::Seconds(3));
}

TEST(LeaseTable, KeepsALeasesOwnTimeWhenItIsRenewedWithoutOne) {
  World t;
  std::string token = t.Grant("alice", "", absl::Seconds(50))->token;
  t.clock.Advance(absl::Seconds(20));
  EXPECT_EQ(t.table.Renew(token, "alice", absl::ZeroDuration())->expires,
            t.clock.Now() + absl::Seconds(50));
}

TEST(LeaseTable, TellsHowALeaseEndedAsLongAsItRemembers) {
  World t;
  const std::string first = t.Grant("alice")->token;
  EXPECT_TRUE(t.table.Release(first, "alice").ok());
  ExpectLost(t.Find(first, "alice"), "released");
  for (int n = 0; n < 1 << 14; ++n) {
    EXPECT_TRUE(t.table.Release(t.Grant("alice")->token, "alice").ok());
  }
  ExpectLost(t.Find(first, "alice"), "unknown");
}

TEST(LeaseTable, KeepsTheMemoryWhileABackwardRunsOnAnExpiredLease) {
  World t;
  std::string token = t.Grant("alice")->token;
  std::shared_ptr<const ResidualTensors> running = *t.table.Find(token, "alice", SmallProblem());
  t.clock.Advance(absl::Minutes(1));
  t.table.Expire();
  ExpectLost(t.Find(token, "alice"), "expired");
  EXPECT_EQ(t.table.Use().bytes, 0);
  EXPECT_EQ(t.pool.used(), kBlock);
  running.reset();
  EXPECT_EQ(t.pool.used(), 0);
}

TEST(LeaseTable, RefusesAnotherOwnerWhetherItIsThereOrNot) {
  World t;
  std::string token = t.Grant("alice")->token;
  for (bool gone : {false, true}) {
    if (gone) (void)t.table.Release(token, "alice");
    EXPECT_EQ(ReasonOf(t.Find(token, "bob")), reason::kLeaseNotOwned);
    EXPECT_EQ(ReasonOf(t.table.Renew(token, "bob", absl::Seconds(1)).status()),
              reason::kLeaseNotOwned);
    EXPECT_EQ(ReasonOf(t.table.Release(token, "bob")), reason::kLeaseNotOwned);
  }
}

TEST(LeaseTable, RefusesAnotherProblem) {
  World t;
  std::string token = t.Grant("alice")->token;
  Problem other = SmallProblem();
  other.causal = true;
  absl::Status status = t.table.Find(token, "alice", other).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_EQ(ReasonOf(status), reason::kLeaseMismatch);
  EXPECT_TRUE(t.Find(token, "alice").ok());
}

TEST(LeaseTable, TakesAProblemThatOnlyWantsTheBiasGradientBesides) {
  World t;
  Problem p = SmallProblem();
  p.bias = Bias{ElementType::kFloat32, {1, 1, 2, 2}, false};
  std::string token = t.table.Grant({.owner = "alice"}, t.NewResidual(p))->token;
  p.bias->want_gradient = true;
  EXPECT_TRUE(t.table.Find(token, "alice", p).ok());
}

TEST(LeaseTable, ForgetsTheLeasesOfAnEarlierProcess) {
  World t;
  FakeClock clock;
  LeaseTable later(Limits(), TokenIssuer{1, 8}, World::SharedMetrics(), clock);
  std::string token = t.Grant("alice")->token;
  absl::Status status = later.Find(token, "alice", SmallProblem()).status();
  EXPECT_EQ(ReasonOf(status), reason::kEpochChanged);
  EXPECT_TRUE(later.Release(token, "alice").ok());
}

TEST(LeaseTable, GrantsUpToTheCallersQuotaAndNotOneMore) {
  World t;
  EXPECT_TRUE(t.Grant("alice").has_value());
  EXPECT_TRUE(t.Grant("alice").has_value());
  EXPECT_FALSE(t.Grant("alice").has_value());
  EXPECT_EQ(t.pool.used(), 2 * kBlock);
  EXPECT_TRUE(t.Grant("bob").has_value());
}

TEST(LeaseTable, GivesTheCallersOldestUpForANewOneBeyondHisQuota) {
  World t;
  std::string bobs = t.Grant("bob")->token, first = t.Grant("alice")->token;
  std::string second = t.Grant("alice")->token;
  t.clock.Advance(absl::Seconds(4));
  EXPECT_TRUE(t.Grant("alice").has_value());
  ExpectLost(t.Find(first, "alice"), "evicted");
  EXPECT_TRUE(t.Find(second, "alice").ok());
  EXPECT_TRUE(t.Find(bobs, "bob").ok());
}

TEST(LeaseTable, GivesTheLongestUnusedUpForANewOneBeyondTheBudget) {
  World t;
  std::string first = t.Grant("alice")->token, second = t.Grant("bob")->token;
  std::string third = t.Grant("alice")->token;
  ASSERT_TRUE(t.Find(first, "alice").ok());  // now the second is
  t.clock.Advance(absl::Seconds(4));
  EXPECT_TRUE(t.Grant("carol").has_value());
  ExpectLost(t.Find(second, "bob"), "evicted");
  EXPECT_TRUE(t.Find(first, "alice").ok());
}

TEST(LeaseTable, RefusesWhatIsLargerThanTheQuota) {
  LeaseLimits limits = Limits();
  limits.caller_bytes = kBlock - 1;
  World t(limits);
  EXPECT_FALSE(t.Grant("alice").has_value());
  limits.caller_bytes = limits.memory_bytes = 0;
  World off(limits);
  EXPECT_FALSE(off.Grant("alice").has_value());
  EXPECT_EQ(off.pool.used(), 0);
}

TEST(LeaseTable, ReclaimsTheLongestUnusedAndSparesWhatIsYoungOrRead) {
  World t;
  std::string read = t.Grant("alice")->token, old = t.Grant("alice")->token;
  std::shared_ptr<const ResidualTensors> running = *t.table.Find(read, "alice", SmallProblem());
  ASSERT_TRUE(t.Find(old, "alice").ok());
  t.clock.Advance(absl::Seconds(4));
  std::string young = t.Grant("bob")->token;
  EXPECT_EQ(t.table.Reclaim(kHostMemory, 1), kBlock);
  ExpectLost(t.Find(old, "alice"), "evicted");
  EXPECT_EQ(t.table.Reclaim(kHostMemory, 1), 0);
  EXPECT_TRUE(t.table.EvictOne(kHostMemory));  // within min_hold
  ExpectLost(t.Find(young, "bob"), "evicted");
  EXPECT_FALSE(t.table.EvictOne(kHostMemory));
  EXPECT_TRUE(t.Find(read, "alice").ok());
}

// Bytes of a device, counted.
class CountedResidual final : public DeviceResidual {
 public:
  CountedResidual(int64_t bytes, int64_t& held) : bytes_(bytes), held_(held) { held_ += bytes_; }
  ~CountedResidual() override { held_ -= bytes_; }
  int64_t bytes() const override { return bytes_; }

 private:
  const int64_t bytes_;
  int64_t& held_;
};

struct HeldBytes {
  int64_t held[2] = {0, 0};
};

// A table with room for two residuals on each of two devices and one in host memory.
struct TwoDevices : HeldBytes, World {
  static LeaseLimits Limits() {
    return {.memory_bytes = kBlock,
            .device_bytes = {2 * kBlock, 2 * kBlock},
            .caller_bytes = 4 * kBlock,
            .max_leases = 100,
            .ttl = absl::Seconds(10),
            .max_ttl = absl::Seconds(100),
            .min_hold = absl::Seconds(4)};
  }
  TwoDevices() : World(Limits()) {}
  std::optional<LeaseGrant> GrantOn(int device, const std::string& owner) {
    return table.Grant({.owner = owner},
                       std::make_shared<const ResidualTensors>(
                           SmallProblem(), std::make_unique<CountedResidual>(kBlock, held[device]),
                           device, Ticket()));
  }
};

TEST(LeaseTable, CountsEachPlaceForItself) {
  TwoDevices t;
  for (const char* owner : {"alice", "bob"}) {
    EXPECT_TRUE(t.GrantOn(0, owner).has_value());
    EXPECT_TRUE(t.GrantOn(1, owner).has_value());
  }
  EXPECT_TRUE(t.Grant("alice").has_value());
  EXPECT_EQ(t.table.Use().bytes, 5 * kBlock);
  EXPECT_EQ(t.table.Use(0).bytes, 2 * kBlock);
  EXPECT_EQ(t.table.Use(1).leases, 2);
  EXPECT_EQ(t.table.Use(kHostMemory).leases, 1);
  EXPECT_FALSE(
      t.GrantOn(0, "carol").has_value());  // full of young ones, whatever is free elsewhere
  EXPECT_TRUE(t.table.MayHold(1, 2 * kBlock));
  EXPECT_FALSE(t.table.MayHold(1, 2 * kBlock + 1));
  EXPECT_FALSE(t.table.MayHold(2, 1));
}

TEST(LeaseTable, EvictsAtThePlaceThatIsShortAndNowhereElse) {
  TwoDevices t;
  std::string host = t.Grant("alice")->token;
  std::string first = t.GrantOn(0, "alice")->token, second = t.GrantOn(1, "alice")->token;
  t.clock.Advance(absl::Seconds(4));
  EXPECT_EQ(t.table.Reclaim(1, 10 * kBlock), kBlock);
  EXPECT_EQ(t.held[1], 0);
  ExpectLost(t.Find(second, "alice"), "evicted");
  EXPECT_TRUE(t.table.EvictOne(0));
  EXPECT_EQ(t.held[0], 0);
  EXPECT_FALSE(t.table.EvictOne(0));
  ExpectLost(t.Find(first, "alice"), "evicted");
  EXPECT_TRUE(t.Find(host, "alice").ok());
  t.clock.Advance(absl::Seconds(10));
  EXPECT_EQ(t.table.Reclaim(0, kBlock), 0) << "what expired elsewhere is no use here";
}

TEST(LeaseTable, HoldsAnOwnerToHisQuotaOverAllPlaces) {
  TwoDevices t;
  std::string oldest = t.GrantOn(0, "alice")->token;
  EXPECT_TRUE(t.GrantOn(0, "alice") && t.GrantOn(1, "alice") && t.Grant("alice"));
  EXPECT_FALSE(t.GrantOn(1, "alice").has_value());  // four blocks, all young
  t.clock.Advance(absl::Seconds(4));
  EXPECT_TRUE(t.GrantOn(1, "alice").has_value());
  ExpectLost(t.Find(oldest, "alice"), "evicted");
}

TEST(LeaseTable, LosesTheLeasesOfALostDeviceOnly) {
  TwoDevices t;
  std::string lost = t.GrantOn(0, "alice")->token, read = t.GrantOn(0, "bob")->token;
  std::string kept = t.GrantOn(1, "alice")->token;
  std::shared_ptr<const ResidualTensors> running = *t.table.Find(read, "bob", SmallProblem());
  t.table.LoseDevice(0);
  ExpectLost(t.Find(lost, "alice"), "device_lost");
  ExpectLost(t.Find(read, "bob"), "device_lost");
  EXPECT_TRUE(t.Find(kept, "alice").ok());
  EXPECT_EQ(t.held[0], kBlock);  // a launch may still be on its way
  running.reset();
  EXPECT_EQ(t.held[0], 0);
  EXPECT_FALSE(t.GrantOn(0, "alice").has_value());
  EXPECT_FALSE(t.table.MayHold(0, 0));
}

TEST(LeaseTable, EvictsTheLongestUnusedOfAllPlacesWhenThereAreTooMany) {
  LeaseLimits limits = TwoDevices::Limits();
  limits.max_leases = 2;
  int64_t held = 0;
  World t(limits);
  auto on_device = [&](int device) {
    return t.table.Grant(
        {.owner = "alice"},
        std::make_shared<const ResidualTensors>(
            SmallProblem(), std::make_unique<CountedResidual>(kBlock, held), device, Ticket()));
  };
  std::string first = on_device(1)->token;
  t.clock.Advance(absl::Seconds(1));
  std::string second = t.Grant("alice")->token;
  t.clock.Advance(absl::Seconds(4));
  EXPECT_TRUE(on_device(0).has_value());
  ExpectLost(t.Find(first, "alice"), "evicted");
  EXPECT_TRUE(t.Find(second, "alice").ok());
}

TEST(LeaseTable, PutsARetriedForwardInThePlaceOfTheFirst) {
  World t;
  std::string first = t.Grant("alice", "step-1")->token;
  std::string other = t.Grant("bob", "step-1")->token;
  std::string second = t.Grant("alice", "step-1")->token;
  ExpectLost(t.Find(first, "alice"), "replaced");
  EXPECT_TRUE(t.Find(second, "alice").ok());
  EXPECT_TRUE(t.Find(other, "bob").ok());
  EXPECT_EQ(t.pool.used(), 2 * kBlock);
}

TEST(LeaseTable, LeavesNoByteAfterAMillionLeases) {
  World t;
  std::mt19937_64 random(1);
  std::vector<std::string> tokens;
  for (int n = 0; n < 1000000; ++n) {
    std::string owner = random() % 2 ? "alice" : "bob";
    std::optional<LeaseGrant> grant = t.Grant(owner);
    if (grant.has_value() && random() % 4 == 0) (void)t.table.Release(grant->token, owner);
    if (random() % 8 == 0) t.clock.Advance(absl::Seconds(1));
  }
  t.clock.Advance(absl::Hours(1));
  t.table.Expire();
  EXPECT_EQ(t.pool.used(), 0);
  EXPECT_EQ(t.table.Use().leases, 0);
  EXPECT_EQ(t.table.Use().bytes, 0);
}

// ---- Against a model: the same rules in the plainest form, a list that is searched.

struct ModelLease {
  std::string token, owner, request;
  absl::Time used, expires;
  std::string end;  // empty: held
  int readers = 0;
  int turn = 0;  // of its last use, since times may be equal
};

class Model {
 public:
  explicit Model(const LeaseLimits& limits) : limits_(limits) {}

  bool Grant(const std::string& owner, const std::string& request, absl::Time now) {
    Expire(now);
    for (ModelLease& l : leases_) {
      if (l.end.empty() && !request.empty() && l.owner == owner && l.request == request) {
        l.end = "replaced";
      }
    }
    while (Held(owner) * kBlock + kBlock > limits_.caller_bytes) {
      if (!Evict(owner, now - limits_.min_hold)) return false;
    }
    while (Held("") * kBlock + kBlock > limits_.memory_bytes || Held("") + 1 > limits_.max_leases) {
      if (!Evict("", now - limits_.min_hold)) return false;
    }
    leases_.push_back({.token = "",
                       .owner = owner,
                       .request = request,
                       .used = now,
                       .expires = now + limits_.ttl,
                       .end = "",
                       .turn = ++turns_});
    return true;
  }
  void Expire(absl::Time now) {
    for (ModelLease& l : leases_) {
      if (l.end.empty() && l.expires <= now) l.end = "expired";
    }
  }
  // "" when it may be used, else how it ended; "forbidden" for a stranger.
  std::string Use(ModelLease& l, const std::string& owner, absl::Time now, bool counts) {
    if (l.owner != owner) return "forbidden";
    Expire(now);
    if (!l.end.empty()) return l.end;
    l.expires = now + limits_.ttl;
    if (counts) {
      l.used = now;
      l.turn = ++turns_;
    }
    return "";
  }
  bool Evict(const std::string& owner, absl::Time before) {
    ModelLease* oldest = nullptr;
    for (ModelLease& l : leases_) {
      bool candidate = l.end.empty() && l.readers == 0 && l.used <= before &&
                       (owner.empty() || l.owner == owner);
      if (candidate && (oldest == nullptr || l.turn < oldest->turn)) oldest = &l;
    }
    if (oldest != nullptr) oldest->end = "evicted";
    return oldest != nullptr;
  }
  int64_t Held(const std::string& owner) const {
    return std::count_if(leases_.begin(), leases_.end(), [&](const ModelLease& l) {
      return l.end.empty() && (owner.empty() || l.owner == owner);
    });
  }
  int64_t InMemory() const {
    return std::count_if(leases_.begin(), leases_.end(),
                         [](const ModelLease& l) { return l.end.empty() || l.readers > 0; });
  }
  std::vector<ModelLease>& leases() { return leases_; }

 private:
  const LeaseLimits limits_;
  std::vector<ModelLease> leases_;
  int turns_ = 0;
};

enum Event {
  kGrantAlice,
  kGrantAliceNamed,
  kGrantBob,
  kFindFirst,
  kFindLastAndRead,
  kStopReading,
  kFindAsStranger,
  kRenewLast,
  kReleaseFirst,
  kReclaim,
  kEvictOne,
  kHoldPasses,
  kTtlPasses,
  kEvents
};

// Table and model in step. Every answer and the memory in use are compared after each event.
class Walk {
 public:
  Walk() : model_(Limits()) {}

  void Do(Event event) {
    switch (event) {
      case kGrantAlice:
        return Grant("alice", "");
      case kGrantAliceNamed:
        return Grant("alice", "step");
      case kGrantBob:
        return Grant("bob", "");
      case kFindFirst:
        return Find(0, false, false);
      case kFindLastAndRead:
        return Find(Last(), true, false);
      case kFindAsStranger:
        return Find(Last(), false, true);
      case kStopReading:
        for (ModelLease& l : model_.leases()) l.readers = 0;
        return reading_.clear();
      case kRenewLast:
        return Renew(Last());
      case kReleaseFirst:
        return Release(0);
      case kReclaim:
        return Reclaim();
      case kEvictOne:
        return EvictOne();
      case kHoldPasses:
        return world_.clock.Advance(Limits().min_hold);
      default:
        return world_.clock.Advance(Limits().ttl);
    }
  }
  void Compare() {
    LeaseUse use = world_.table.Use();
    ASSERT_EQ(use.leases, model_.Held(""));
    ASSERT_EQ(use.bytes, model_.Held("") * kBlock);
    ASSERT_EQ(world_.pool.used(), model_.InMemory() * kBlock);
  }
  void Finish() {
    Do(kStopReading);
    world_.clock.Advance(absl::Hours(1));
    world_.table.Expire();
    ASSERT_EQ(world_.pool.used(), 0);
  }

 private:
  absl::Time Now() const { return world_.clock.Now(); }
  size_t Last() { return model_.leases().empty() ? 0 : model_.leases().size() - 1; }
  bool Exists(size_t n) { return n < model_.leases().size(); }

  void Grant(const std::string& owner, const std::string& request) {
    std::optional<LeaseGrant> grant = world_.Grant(owner, request);
    ASSERT_EQ(grant.has_value(), model_.Grant(owner, request, Now()));
    if (grant.has_value()) model_.leases().back().token = grant->token;
  }
  void Check(const absl::Status& status, const std::string& expected) {
    if (expected.empty()) {
      ASSERT_TRUE(status.ok()) << status;
    } else if (expected == "forbidden") {
      ASSERT_EQ(ReasonOf(status), reason::kLeaseNotOwned) << status;
    } else {
      ExpectLost(status, expected);
    }
  }
  void Find(size_t n, bool read, bool stranger) {
    if (!Exists(n)) return;
    ModelLease& l = model_.leases()[n];
    std::string owner = stranger ? "mallory" : l.owner;
    auto found = world_.table.Find(l.token, owner, SmallProblem());
    std::string expected = model_.Use(l, owner, Now(), true);
    Check(found.status(), expected);
    if (!expected.empty() || !read || !found.ok()) return;
    ++l.readers;
    reading_.push_back(*std::move(found));
  }
  void Renew(size_t n) {
    if (!Exists(n)) return;
    ModelLease& l = model_.leases()[n];
    auto renewed = world_.table.Renew(l.token, l.owner, absl::ZeroDuration());
    Check(renewed.status(), model_.Use(l, l.owner, Now(), false));
  }
  void Release(size_t n) {
    if (!Exists(n)) return;
    ModelLease& l = model_.leases()[n];
    ASSERT_TRUE(world_.table.Release(l.token, l.owner).ok());
    model_.Expire(Now());
    if (l.end.empty()) l.end = "released";
  }
  void Reclaim() {
    model_.Expire(Now());
    world_.table.Expire();
    int64_t freed = world_.table.Reclaim(kHostMemory, 1);
    ASSERT_EQ(freed, model_.Evict("", Now() - Limits().min_hold) ? kBlock : 0);
  }
  void EvictOne() {
    bool evicted = model_.Evict("", Now() - Limits().min_hold);
    if (!evicted) evicted = model_.Evict("", absl::InfiniteFuture());
    ASSERT_EQ(world_.table.EvictOne(kHostMemory), evicted);
  }

  World world_;
  Model model_;
  std::vector<std::shared_ptr<const ResidualTensors>> reading_;
};

// Before the first grant nothing else does anything.
TEST(LeaseTable, AgreesWithTheModelOnEverySequenceOfAGrantAndFourEvents) {
  constexpr Event kGrants[] = {kGrantAlice, kGrantAliceNamed, kGrantBob};
  constexpr int64_t kSequences = int64_t{kEvents} * kEvents * kEvents * kEvents;
  for (int64_t number = 0; number < 3 * kSequences; ++number) {
    Walk walk;
    walk.Do(kGrants[number % 3]);
    std::string trace = absl::StrCat(kGrants[number % 3]);
    int64_t rest = number / 3;
    for (int n = 0; n < 4; ++n, rest /= kEvents) {
      absl::StrAppend(&trace, " ", rest % kEvents);
      walk.Do(static_cast<Event>(rest % kEvents));
      walk.Compare();
      ASSERT_FALSE(testing::Test::HasFailure()) << "events " << trace;
    }
    walk.Finish();
    ASSERT_FALSE(testing::Test::HasFailure()) << "events " << trace;
  }
}

TEST(LeaseTable, AgreesWithTheModelOnLongRandomWalks) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    std::mt19937_64 random(seed);
    Walk walk;
    for (int n = 0; n < 400; ++n) {
      walk.Do(static_cast<Event>(random() % kEvents));
      walk.Compare();
      ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed << ", event " << n;
    }
    walk.Finish();
    ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed;
  }
}

TEST(LeaseTable, MayBeUsedByManyThreadsAtOnce) {
  LeaseLimits limits = Limits();
  limits.min_hold = absl::ZeroDuration();
  World t(limits);
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n) {
    threads.emplace_back([&t, n] {
      std::string owner = absl::StrCat("caller", n % 2);
      for (int step = 0; step < 2000; ++step) {
        std::optional<LeaseGrant> grant = t.Grant(owner, step % 3 ? "" : "named");
        if (!grant.has_value()) continue;
        auto found = t.table.Find(grant->token, owner, SmallProblem());
        EXPECT_TRUE(found.ok() || absl::IsFailedPrecondition(found.status())) << found.status();
        if (step % 2) (void)t.table.Release(grant->token, owner);
        if (step % 5 == 0) t.table.Reclaim(kHostMemory, kBlock);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  t.clock.Advance(absl::Hours(1));
  t.table.Expire();
  EXPECT_EQ(t.pool.used(), 0);
}

}  // namespace
}  // namespace attnd
