#include "server/app/lend_rule.h"

#include <gtest/gtest.h>

namespace attnd {
namespace {

using Uses = std::vector<GpuUse>;
constexpr unsigned kDaemon = 41, kOwner = 42;
const std::vector<std::string> kUuids = {"GPU-aa11", "GPU-ab22", "GPU-cc33"};

TEST(LendRule, TakesGpusThatNobodyHasUsedForAWhile) {
  LendRule rule(absl::Seconds(60));
  absl::Time now;
  auto after = [&](int seconds, const Uses& uses) {
    now += absl::Seconds(seconds);
    return rule.MayTake(uses, now);
  };
  const Uses idle = {{.utilisation_percent = LendRule::kIdlePercent}, {}};
  EXPECT_FALSE(after(1000, idle));  // seen idle for the first time
  EXPECT_FALSE(after(59, idle));
  EXPECT_FALSE(after(1, {{}, {.process_ids = {kOwner}}}));
  EXPECT_FALSE(after(1, idle));
  EXPECT_FALSE(after(59, {{.utilisation_percent = LendRule::kIdlePercent + 1}, {}}));
  EXPECT_FALSE(after(1, idle));
  EXPECT_FALSE(after(59, idle));
  EXPECT_TRUE(after(1, idle));
  rule.Taken(kDaemon, now);
  EXPECT_FALSE(after(100, idle));  // given back: it counts anew
}

TEST(LendRule, GivesBackWhenAnotherProcessComputes) {
  LendRule rule(absl::ZeroDuration());
  absl::Time now;
  rule.Taken(kDaemon, now);
  EXPECT_FALSE(*rule.MustGiveBack({{}, {}}, now));  // the daemon is about to start
  EXPECT_FALSE(
      *rule.MustGiveBack({{.utilisation_percent = 100, .process_ids = {kDaemon}}, {}}, now));
  EXPECT_FALSE(*rule.MustGiveBack({{}, {}}, now + absl::Hours(1)));
  EXPECT_TRUE(*rule.MustGiveBack({{.process_ids = {kDaemon}}, {.process_ids = {kOwner}}}, now));
}

TEST(LendRule, GivesBackToAnOwnerWhoComesWhileTheDaemonStarts) {
  LendRule rule(absl::ZeroDuration());
  const absl::Time now;
  for (int loan = 0; loan < 3; ++loan) {
    rule.Taken(kDaemon, now);
    if (loan == 1) {
      EXPECT_FALSE(*rule.MustGiveBack({{.process_ids = {kDaemon}}}, now));
    }
    EXPECT_TRUE(*rule.MustGiveBack({{.process_ids = {kOwner}}}, now));
  }
}

// In a container without the host's process ids the daemon looks like somebody else.
TEST(LendRule, RefusesProcessIdsOfAnotherKind) {
  LendRule rule(absl::ZeroDuration());
  const absl::Time now;
  rule.Taken(kDaemon, now);
  EXPECT_TRUE(*rule.MustGiveBack({{.process_ids = {70001}}}, now));
  rule.Taken(kDaemon, now);
  EXPECT_EQ(rule.MustGiveBack({{.process_ids = {70002}}}, now).status().code(),
            absl::StatusCode::kFailedPrecondition);
  LendRule hidden(absl::ZeroDuration());
  hidden.Taken(kDaemon, now);
  EXPECT_FALSE(*hidden.MustGiveBack({{}}, now + LendRule::kShown - absl::Seconds(1)));
  EXPECT_FALSE(hidden.MustGiveBack({{}}, now + LendRule::kShown).ok());
}

TEST(LentGpus, AreThoseThatTheDaemonWillUse) {
  using Gpus = std::vector<std::string>;
  EXPECT_EQ(*LentGpus(kUuids, {}, nullptr, nullptr), kUuids);
  EXPECT_EQ(*LentGpus(kUuids, {2, 0}, nullptr, nullptr), (Gpus{"GPU-cc33", "GPU-aa11"}));
  EXPECT_EQ(*LentGpus(kUuids, {1}, "2,1", "PCI_BUS_ID"), Gpus{"GPU-ab22"});
  EXPECT_EQ(*LentGpus(kUuids, {}, "GPU-cc,GPU-ab22", "FASTEST_FIRST"),
            (Gpus{"GPU-cc33", "GPU-ab22"}));
}

TEST(LentGpus, RefusesWhatItCannotName) {
  auto message = [](const std::vector<int>& devices, const char* visible, const char* order) {
    return std::string(LentGpus(kUuids, devices, visible, order).status().message());
  };
  EXPECT_EQ(message({3}, nullptr, nullptr), "lend: devices: expected 0..2, got 3");
  EXPECT_EQ(message({}, "", nullptr), "lend: GPUs: expected one at least, got none");
  EXPECT_EQ(
      message({}, "0", "FASTEST_FIRST"),
      "lend: CUDA_DEVICE_ORDER: expected PCI_BUS_ID, or GPUs named by UUID, got FASTEST_FIRST");
  EXPECT_EQ(message({0}, nullptr, "FASTEST_FIRST"), message({}, "0", "FASTEST_FIRST"));
  for (const char* visible : {"MIG-1", "3", "-1", "GPU-dd", "all"}) {
    EXPECT_EQ(message({}, visible, nullptr),
              std::string("lend: CUDA_VISIBLE_DEVICES: expected ordinals or UUIDs of whole GPUs, "
                          "got ") +
                  visible);
  }
}

}  // namespace
}  // namespace attnd
