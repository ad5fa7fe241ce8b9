#include "server/modules/module_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "modules/known_layers.h"
#include "modules/reference/reference_engine.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

class Modules : public ::testing::Test {
 protected:
  absl::StatusOr<std::shared_ptr<RegisteredModule>> Register(const std::string& caller,
                                                             const std::string& name,
                                                             const std::string& digest,
                                                             uint64_t owner_epoch = 0) {
    const ModuleTable::Registration wanted = {.caller = caller,
                                              .name = name,
                                              .digest = digest,
                                              .owner_epoch = owner_epoch,
                                              .ttl = absl::Seconds(10),
                                              .wait = Shortly()};
    return table_.Register(wanted, [&](uint64_t id) {
      ModuleRecord record;
      record.owner_epoch = record.history_epoch = owner_epoch;
      record.id = id;
      record.caller = caller;
      record.name = name;
      record.digest = digest;
      record.limits = {.max_rows = 8, .kept_rows = 64};
      return Make(std::move(record));
    });
  }

  absl::StatusOr<std::shared_ptr<RegisteredModule>> Make(ModuleRecord record) {
    auto description = Describe();
    auto plan = engine_.Plan(*description, record.limits, int64_t{1} << 20);
    CHECK(plan.ok()) << plan.status();
    plan->device = device_;
    auto memory = table_.memory().Reserve(record.caller, *plan);
    if (!memory.ok()) return memory.status();
    auto instance = engine_.Make(description, record.limits, *plan);
    CHECK(instance.ok()) << instance.status();
    return std::make_shared<RegisteredModule>(std::move(record), *std::move(instance),
                                              *std::move(memory), OpenState());
  }

  static std::shared_ptr<const ModuleDescription> Describe() {
    auto graph = ModuleGraph::Make(OneLinear());
    CHECK(graph.ok()) << graph.status();
    return std::make_shared<const ModuleDescription>(*std::move(graph), OptimizerSpec{});
  }
  StateRoot* MakeRoot(const char* name,
                      std::unique_ptr<StateDisk> disk = std::make_unique<StateDisk>()) {
    const std::string folder = testing::TempDir() + "/" + name;
    std::filesystem::remove_all(folder);
    std::filesystem::create_directory(folder);
    std::filesystem::permissions(folder, std::filesystem::perms::owner_all);
    root_ = *StateRoot::Open(folder, {}, std::move(disk));
    return root_.get();
  }
  // Opens the state of modules that outlive the process, where `place_` says so.
  std::unique_ptr<ModuleState> OpenState() {
    if (!place_.has_value()) return nullptr;
    auto state =
        ModuleState::Open(*place_, {"a", "m", "layout"}, 1000, [](const absl::Status&, int64_t) {});
    CHECK(state.ok()) << state.status();
    return *std::move(state);
  }
  static void Change(RegisteredModule& module, absl::Time now) {
    auto hold = module.Take(std::nullopt, Forever());
    ASSERT_TRUE(hold.ok());
    hold->WasPut(0);
    hold->Changed("digest", "reply");
    hold->Save(now);
  }

  static CallWait Forever() { return {{}, absl::InfiniteFuture()}; }
  static auto Told(std::string digest) {
    return [digest = std::move(digest)] { return digest; };
  }
  static CallWait Shortly() { return {{}, absl::Now() + absl::Milliseconds(20)}; }

  std::unique_ptr<StateRoot> root_;
  FakeClock clock_;
  ReferenceEngine engine_;
  std::optional<StatePlace> place_;
  int device_ = 0;  // of the next one
  ModuleTable table_{{.memory = {int64_t{1} << 20, int64_t{1} << 20}, .max_modules = 2},
                     {.replica = 1, .boot_epoch = 1},
                     clock_};
};

TEST_F(Modules, GivesTheSameModuleToTheSameRegistration) {
  auto first = Register("a", "m", "digest");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(*Register("a", "m", "digest"), *first);
  EXPECT_EQ(ReasonOf(Register("a", "m", "other").status()), reason::kModuleExists);
  EXPECT_NE(*Register("b", "m", "other"), *first);
  EXPECT_EQ(table_.Of("a").size(), 1);
  EXPECT_EQ(ReasonOf(Register("a", "n", "digest").status()), reason::kModuleQuota);
}

TEST_F(Modules, OpensAModuleToItsOwnerAlone) {
  const std::string token = table_.TokenOf(**Register("a", "m", "digest"));
  EXPECT_TRUE(table_.Find(token, "a").ok());
  EXPECT_EQ(ReasonOf(table_.Find(token, "b").status()), reason::kModuleNotOwned);
  EXPECT_EQ(table_.Find("nonsense", "a").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(table_.Release(token, "b")), reason::kModuleNotOwned);
  const ModuleTable restarted({}, {.replica = 1, .boot_epoch = 2}, clock_);
  EXPECT_EQ(ReasonOf(const_cast<ModuleTable&>(restarted).Find(token, "a").status()),
            reason::kEpochChanged);
}

TEST_F(Modules, GoesToALaterOwnerAndNeverBack) {
  auto first = *Register("a", "m", "digest", 1);
  const std::string token = table_.TokenOf(*first);
  Change(*first, clock_.Now());
  first->Take(1, Forever())->Added("micro-batch");
  EXPECT_EQ(*Register("a", "m", "digest"), first);  // whoever has it
  EXPECT_EQ(*Register("a", "m", "digest", 1), first);
  EXPECT_EQ(ReasonOf(Register("a", "m", "other", 2).status()), reason::kModuleExists);

  absl::Status waited;
  std::thread waiting([&] { waited = first->TakeMicroBatch(1, 2, Told("2"), Forever()).status(); });
  while (first->waiting() < 1) std::this_thread::yield();
  auto second = *Register("a", "m", "digest", 2);
  waiting.join();
  EXPECT_EQ(ReasonOf(waited), reason::kModuleLost);
  EXPECT_EQ(ReasonOf(first->Take(std::nullopt, Forever()).status()), reason::kModuleLost);
  EXPECT_EQ(table_.Find(token, "a").status().message(),
            "token: this module is gone (taken); register it again");
  const auto taken = Register("a", "m", "digest", 1).status();
  EXPECT_EQ(ReasonOf(taken), reason::kModuleTaken);
  EXPECT_NE(taken.message().find("m has been registered since by owner epoch 2, got 1"),
            std::string::npos)
      << taken;

  EXPECT_EQ(*table_.Find(table_.TokenOf(*second), "a"), second);
  const v1::ModuleStatus status = second->Status();
  EXPECT_EQ(status.sequence(), 1);
  EXPECT_EQ(status.micro_batches(1), 1);
  EXPECT_TRUE(status.weights_complete());
  EXPECT_EQ(status.owner_epoch(), 2);
  EXPECT_EQ(status.history_epoch(), 1);
  EXPECT_TRUE(second->Take(1, Forever()).ok());
  EXPECT_EQ(table_.size(), 1);
}

TEST_F(Modules, GoesToALaterOwnerOnceTheCallThatHasItEnds) {
  auto module = *Register("a", "m", "digest", 1);
  {
    auto hold = module->Take(std::nullopt, Forever());
    EXPECT_EQ(Register("a", "m", "digest", 2).status().code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(*Register("a", "m", "digest", 1), module);
  }
  EXPECT_TRUE(Register("a", "m", "digest", 2).ok());
}

TEST_F(Modules, RegistersOthersWhileOneWaitsForItsOwnersCall) {
  auto module = *Register("a", "m", "digest", 1);
  absl::Notification registered;
  absl::Status taken = absl::UnknownError("not run");
  std::thread later, other;
  {
    auto hold = module->Take(std::nullopt, Forever());
    later = std::thread([&] {
      taken = table_
                  .Register({.caller = "a",
                             .name = "m",
                             .digest = "digest",
                             .owner_epoch = 2,
                             .ttl = absl::Seconds(10),
                             .wait = Forever()},
                            [](uint64_t) { return absl::InternalError("it is there"); })
                  .status();
    });
    while (module->waiting() < 1) std::this_thread::yield();
    EXPECT_EQ(Register("a", "m", "digest", 3).status().code(),
              absl::StatusCode::kDeadlineExceeded);  // of one name one at a time
    other = std::thread([&] {
      EXPECT_TRUE(Register("b", "m", "digest").ok());
      registered.Notify();
    });
    EXPECT_TRUE(registered.WaitForNotificationWithTimeout(absl::Seconds(10)));
  }
  later.join();
  other.join();
  EXPECT_TRUE(taken.ok()) << taken;
}

TEST_F(Modules, CountsThoseThatAreBeingMadeAmongTheMost) {
  absl::Notification begun, go_on;
  std::thread first([&] {
    const auto made = table_.Register(
        {.caller = "a", .name = "m", .digest = "digest", .wait = Forever()}, [&](uint64_t) {
          begun.Notify();
          go_on.WaitForNotification();
          return absl::StatusOr<std::shared_ptr<RegisteredModule>>(absl::CancelledError());
        });
    EXPECT_EQ(made.status().code(), absl::StatusCode::kCancelled);
  });
  begun.WaitForNotification();
  EXPECT_TRUE(Register("b", "m", "digest").ok());
  EXPECT_EQ(ReasonOf(Register("b", "n", "digest").status()), reason::kModuleQuota);
  go_on.Notify();
  first.join();
  EXPECT_TRUE(Register("b", "n", "digest").ok());
}

// Its Remove takes a disk's time, in which the table has to answer.
class AskingDisk : public StateDisk {
 public:
  explicit AskingDisk(const ModuleTable& table) : table_(table) {}
  int Remove(int folder, const char* name, int flags) override {
    absl::Notification answered;
    std::thread other([&] {
      table_.size();
      answered.Notify();
    });
    if (!answered.WaitForNotificationWithTimeout(absl::Seconds(10))) ++unanswered_;
    others_.push_back(std::move(other));
    return StateDisk::Remove(folder, name, flags);
  }
  ~AskingDisk() override {
    for (std::thread& other : others_) other.join();
    EXPECT_EQ(unanswered_, 0);
  }

 private:
  const ModuleTable& table_;
  std::vector<std::thread> others_;
  int unanswered_ = 0;
};

TEST_F(Modules, AnswersWhileTheFilesOfAReleasedModuleAreRemoved) {
  place_ = StatePlace{.root = MakeRoot("removed_states", std::make_unique<AskingDisk>(table_))};
  const std::string token = table_.TokenOf(**Register("a", "m", "digest"));
  EXPECT_TRUE(table_.Release(token, "a").ok());
  place_->is_disk = false;
  ASSERT_TRUE(Register("a", "m", "digest").ok());
  clock_.Advance(absl::Seconds(10));
  table_.Expire();  // a tmpfs keeps no state of an expired module
  EXPECT_EQ(table_.size(), 0);
}

TEST_F(Modules, FinishesAStepOnceItIsAskedAgain) {
  auto module = *Register("a", "m", "digest");
  const std::string token = table_.TokenOf(*module);
  for (const uint64_t sequence : {0, 1}) {
    EXPECT_FALSE(table_.FinishesStep(token, "a"));
    EXPECT_FALSE(table_.FinishesStep(token, "a"));
    module->Take(sequence, Forever())->Added("micro-batch");
    EXPECT_FALSE(table_.FinishesStep(token, "a"));
    EXPECT_FALSE(table_.FinishesStep(token, "b"));
    EXPECT_FALSE(table_.FinishesStep("nonsense", "a"));
    EXPECT_TRUE(table_.FinishesStep(token, "a"));
    EXPECT_TRUE(table_.FinishesStep(token, "a"));
    Change(*module, clock_.Now());
  }
  clock_.Advance(absl::Seconds(6));
  EXPECT_FALSE(table_.FinishesStep(token, "a"));
  EXPECT_FALSE(table_.AnyUsedWithin(absl::Seconds(5)));
}

TEST_F(Modules, HasItsMemoryBackAfterReleaseAndExpiry) {
  const std::string token = table_.TokenOf(**Register("a", "m", "digest"));
  EXPECT_GT(table_.memory().used(), 0);
  EXPECT_TRUE(table_.Release(token, "a").ok());
  EXPECT_TRUE(table_.Release(token, "a").ok());
  EXPECT_EQ(table_.memory().used(), 0);
  EXPECT_EQ(table_.Find(token, "a").status().message(),
            "token: this module is gone (released); register it again");

  const std::string second = table_.TokenOf(**Register("a", "m", "digest"));
  clock_.Advance(absl::Seconds(9));
  table_.Expire();
  EXPECT_TRUE(table_.Find(second, "a").ok());  // a use
  clock_.Advance(absl::Seconds(9));
  table_.Expire();
  EXPECT_EQ(table_.size(), 1);
  clock_.Advance(absl::Seconds(1));
  table_.Expire();
  EXPECT_EQ(table_.size(), 0);
  EXPECT_EQ(table_.memory().used(), 0);
  EXPECT_EQ(ReasonOf(table_.Find(second, "a").status()), reason::kModuleLost);
}

TEST_F(Modules, SavesInAFifthOfTheTimeAndBeforeItExpires) {
  place_ = StatePlace{.root = MakeRoot("table_states"), .is_disk = true};
  {
    auto module = *Register("a", "m", "digest");
    Change(*module, clock_.Now());
    EXPECT_EQ(module->durable_sequence(), 1);
    Change(*module, clock_.Now());  // no time has passed since
    EXPECT_EQ(module->durable_sequence(), 1);
    EXPECT_EQ(table_.durable_lag(), 1);
    clock_.Advance(absl::Seconds(9));
    table_.Expire();
    EXPECT_EQ(module->durable_sequence(), 2);
    Change(*module, clock_.Now());
    EXPECT_EQ(module->durable_sequence(), 2);
    clock_.Advance(absl::Seconds(1));
    table_.Expire();
    EXPECT_EQ(module->durable_sequence(), 3);
    EXPECT_EQ(table_.size(), 0);
  }
  const auto description = Describe();
  const ModuleLimits limits{.max_rows = 8};
  auto plan = engine_.Plan(*description, limits, int64_t{1} << 20);
  auto instance = *engine_.Make(description, limits, *plan);
  EXPECT_EQ(OpenState()->Load(*instance)->change->sequence, 3);
}

TEST_F(Modules, SavesEachSoManyChangesWhereThatIsAskedFor) {
  place_ = StatePlace{.root = MakeRoot("counted_states"), .changes = 3};
  auto module = *Register("a", "m", "digest");
  for (const uint64_t durable : {0, 0, 3, 3, 3, 6}) {
    Change(*module, clock_.Now());  // no time passes
    EXPECT_EQ(module->durable_sequence(), durable);
  }
  Change(*module, clock_.Now());
  clock_.Advance(absl::Seconds(9));
  table_.Expire();
  EXPECT_EQ(module->durable_sequence(), 6);
}

TEST_F(Modules, CountsBytesByDeviceAndLosesThoseOfALostOne) {
  const std::string first = table_.TokenOf(**Register("a", "m", "digest"));
  EXPECT_GT(table_.UsedBytes(0).weights, 0);
  EXPECT_EQ(table_.UsedBytes(1).weights, 0);
  device_ = 1;
  const std::string second = table_.TokenOf(**Register("a", "n", "digest"));
  EXPECT_EQ(table_.UsedBytes(1).weights, table_.UsedBytes(0).weights);
  auto copy = table_.memory().Reserve("a", 100);
  EXPECT_EQ(table_.UsedBytes(0).others, 100);
  EXPECT_EQ(table_.UsedBytes(1).others, 0);
  table_.LoseDevice(1);
  EXPECT_TRUE(table_.Find(first, "a").ok());
  EXPECT_EQ(table_.Find(second, "a").status().message(),
            "token: this module is gone (device_lost); register it again");
  EXPECT_EQ(table_.UsedBytes(1).weights, 0);
}

TEST_F(Modules, HoldsTheInstanceForOneCallAtATime) {
  auto module = *Register("a", "m", "digest");
  {
    auto hold = module->Take(std::nullopt, Forever());
    ASSERT_TRUE(hold.ok());
    EXPECT_EQ(module->Take(std::nullopt, Shortly()).status().code(),
              absl::StatusCode::kDeadlineExceeded);
    std::stop_source stop;
    stop.request_stop();
    EXPECT_EQ(
        module->Take(std::nullopt, {stop.get_token(), absl::InfiniteFuture()}).status().code(),
        absl::StatusCode::kCancelled);
  }
  EXPECT_TRUE(module->Take(0, Forever()).ok());
  EXPECT_EQ(ReasonOf(module->Take(1, Forever()).status()), reason::kSequenceMismatch);
}

TEST_F(Modules, WaitsForTheStepThatMakesItsSequence) {
  auto module = *Register("a", "m", "digest");
  auto change = module->TakeChange(0, "step", Forever());
  ASSERT_TRUE(change.ok());
  absl::Status later = absl::UnknownError("not run");
  std::thread next([&] { later = module->Take(1, Forever()).status(); });
  while (module->waiting() < 1) std::this_thread::yield();
  change->hold->Changed("step", "reply");
  change->hold.reset();
  next.join();
  EXPECT_TRUE(later.ok()) << later;
  EXPECT_EQ(module->TakeChange(0, "step", Forever())->reply, "reply");
}

TEST_F(Modules, AddsMicroBatchesInTheirOrderHoweverTheyCome) {
  auto module = *Register("a", "m", "digest");
  absl::Mutex mutex;
  std::vector<int> order;
  std::vector<std::thread> threads;
  for (int n = kMaxEarlyMicroBatches; n > 0; --n) {
    threads.emplace_back([&, n] {
      auto turn = module->TakeMicroBatch(0, n, Told(std::to_string(n)), Forever());
      ASSERT_TRUE(turn.ok()) << turn.status();
      EXPECT_FALSE(turn->added);
      absl::MutexLock lock(&mutex);
      order.push_back(n);
      turn->hold.Added(std::to_string(n));
    });
  }
  while (module->waiting() < kMaxEarlyMicroBatches) std::this_thread::yield();
  const int beyond = kMaxEarlyMicroBatches + 1;
  EXPECT_EQ(ReasonOf(module->TakeMicroBatch(0, beyond, Told("beyond"), Forever()).status()),
            reason::kMicroBatchEarly);
  {
    auto first = module->TakeMicroBatch(0, 0, Told("0"), Forever());
    ASSERT_TRUE(first.ok());
    first->hold.Added("0");
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(order.size(), static_cast<size_t>(kMaxEarlyMicroBatches));
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_TRUE(module->TakeMicroBatch(0, 8, Told("8"), Forever())->added);
  EXPECT_EQ(ReasonOf(module->TakeMicroBatch(0, 8, Told("x"), Forever()).status()),
            reason::kMicroBatchConflict);
}

// Each that waits has one of the places for calls, and those that they wait for need some.
TEST_F(Modules, HaveAsManyEarlyMicroBatchesOfACallerAsOneHas) {
  const auto module = *Register("a", "m", "digest"), other = *Register("a", "n", "digest");
  std::vector<std::thread> threads;
  for (int n = 1; n <= kMaxEarlyMicroBatches; ++n) {
    threads.emplace_back([&, n] {
      RegisteredModule& one = n % 2 == 0 ? *module : *other;
      auto turn = one.TakeMicroBatch(0, (n + 1) / 2, Told(std::to_string(n)), Forever());
      ASSERT_TRUE(turn.ok()) << turn.status();
      turn->hold.Added(std::to_string(n));
    });
  }
  while (module->waiting() + other->waiting() < kMaxEarlyMicroBatches) std::this_thread::yield();
  EXPECT_EQ(ReasonOf(other->CheckMicroBatch(9)), reason::kMicroBatchEarly);
  EXPECT_EQ(ReasonOf(other->TakeMicroBatch(0, 9, Told("9"), Forever()).status()),
            reason::kMicroBatchEarly);
  EXPECT_TRUE(other->CheckMicroBatch(0).ok());
  for (const auto& one : {module, other}) {
    one->TakeMicroBatch(0, 0, Told("0"), Forever())->hold.Added("0");
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(other->CheckMicroBatch(9).ok());
}

TEST_F(Modules, EndsTheWaitsOfAModuleThatIsReleased) {
  auto module = *Register("a", "m", "digest");
  absl::Status status;
  std::thread waiting(
      [&] { status = module->TakeMicroBatch(0, 1, Told("1"), Forever()).status(); });
  while (module->waiting() < 1) std::this_thread::yield();
  EXPECT_TRUE(table_.Release(table_.TokenOf(*module), "a").ok());
  waiting.join();
  EXPECT_EQ(ReasonOf(status), reason::kModuleLost);
}

}  // namespace
}  // namespace attnd
