// Admission and Batcher over a simulated device and a clock of its own, at twice its capacity:
// callers' deadlines of 0.1 to 10 s get about the same share of answers, and the device is busy
// with calls that are answered in time.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/clock.h"
#include "server/schedule/batcher.h"
#include "tests/fixtures/gated_backend.h"
#include "tests/fixtures/pipeline_fixture.h"

namespace attnd {
namespace {

constexpr int64_t kLength = 512;  // far below 0.1 s of work each
constexpr double kSeconds = 25;

struct Load {
  const char* name;
  std::vector<double> deadlines;
  double factor;  // of the capacity
  double spread;  // a call takes its estimate by 1/spread to spread
  double wrong;   // all estimates, until the pace is learned
};

struct Share {
  int sent = 0, answered = 0, late = 0;
  double Answered() const { return double(answered) / sent; }
};

class OverloadedDevice {
 public:
  explicit OverloadedDevice(const Load& load)
      : load_(load), cost_(1e9), admission_({}, backend_, cost_, clock_) {
    auto one = admission_.Admit(DecodedCall(SmallProblem(kLength)), {.id = 1, .caller = "a"});
    CHECK(one.ok()) << one.status();
    estimate_ = one->seconds();
  }

  void Run() {
    const double capacity = 1 / (estimate_ * load_.wrong * MeanSpread());
    std::exponential_distribution<double> gap(load_.factor * capacity);
    for (double at = gap(random_); at < kSeconds; at += gap(random_)) {
      ServeUntil(begin_ + absl::Seconds(at));
      Send();
    }
  }
  const std::map<double, Share>& shares() const { return shares_; }
  double goodput() const { return good_seconds_ / kSeconds; }

 private:
  double MeanSpread() const {
    return load_.spread == 1 ? 1 : (load_.spread - 1 / load_.spread) / 2 / std::log(load_.spread);
  }
  void MoveTo(absl::Time time) {
    if (time > clock_.Now()) clock_.Advance(time - clock_.Now());
  }

  void Send() {
    const double deadline = load_.deadlines[random_() % load_.deadlines.size()];
    const absl::Time due = clock_.Now() + absl::Seconds(deadline);
    const bool counts = due < begin_ + absl::Seconds(kSeconds);  // else nobody sees its end
    if (counts) ++shares_[deadline].sent;
    auto call = admission_.Admit(DecodedCall(SmallProblem(kLength)),
                                 {.id = ++id_, .caller = "a", .deadline = due});
    if (!call.ok()) return;
    if (counts) deadlines_[id_] = deadline;
    batcher_.Add(*std::move(call));
  }

  // One launch at a time, as DeviceWorker would: late calls are dropped before and after.
  void ServeUntil(absl::Time end) {
    while (true) {
      if (running_.has_value()) {
        if (free_at_ > end) break;
        MoveTo(free_at_);
        Finish();
      }
      running_ = batcher_.Take(clock_.Now());
      if (!running_.has_value()) break;
      Begin();
    }
    MoveTo(end);
  }
  void Begin() {
    std::uniform_real_distribution<double> exponent(-1, 1);
    took_ = estimated_ = 0;
    for (AdmittedCall& call : running_->calls()) {
      call.ticket().StartWork();
      if (call.context().deadline <= clock_.Now()) continue;
      estimated_ += call.seconds();
      took_ += call.seconds() * load_.wrong * std::pow(load_.spread, exponent(random_));
    }
    free_at_ = clock_.Now() + absl::Seconds(took_);
  }
  void Finish() {
    int good = 0;
    for (const AdmittedCall& call : running_->calls()) {
      const bool in_time = clock_.Now() < call.context().deadline;
      good += in_time;
      const auto counted = deadlines_.find(call.context().id);
      if (counted == deadlines_.end()) continue;
      Share& share = shares_[counted->second];
      ++(in_time ? share.answered : share.late);
    }
    good_seconds_ += took_ * good / double(running_->calls().size());
    if (!batcher_.empty() && estimated_ > 0) cost_.Served(estimated_, took_);
    running_.reset();
  }

  const Load load_;
  GatedBackend backend_;
  CostModel cost_;
  FakeClock clock_;
  const absl::Time begin_ = clock_.Now();
  Admission admission_;
  Batcher batcher_{{}};
  std::mt19937 random_{1};
  double estimate_ = 0;
  uint64_t id_ = 1;
  std::map<uint64_t, double> deadlines_;
  std::map<double, Share> shares_;
  std::optional<Batch> running_;
  absl::Time free_at_;
  double took_ = 0, estimated_ = 0, good_seconds_ = 0;
};

TEST(Overload, GivesEachDeadlineItsShareAndKeepsTheDeviceBusy) {
  const std::vector<double> mixed = {0.1, 0.2, 0.5, 1, 2, 5, 10};
  const Load loads[] = {
      {"mixed deadlines", mixed, 2, 1, 1},
      {"four times the capacity", mixed, 4, 1, 1},
      {"two deadlines", {0.2, 10}, 2, 1, 1},
      {"mostly long ones", {0.2, 10, 10, 10, 10}, 2, 1, 1},
      {"one deadline", {1}, 2, 1, 1},
      {"each call up to twice or half its estimate", mixed, 2, 2, 1},
      {"all calls twice their estimate", mixed, 2, 1, 2},
      {"all calls half their estimate", mixed, 2, 1, 0.5},
  };
  for (const Load& load : loads) {
    SCOPED_TRACE(load.name);
    OverloadedDevice device(load);
    device.Run();
    EXPECT_GE(device.goodput(), 0.95);
    for (const auto& [deadline, share] : device.shares()) {
      SCOPED_TRACE("deadline " + std::to_string(deadline));
      EXPECT_GE(share.Answered(), 0.7 / load.factor);
      EXPECT_LE(share.Answered(), 1.5 / load.factor);
      EXPECT_LE(share.late, share.sent / 50);
    }
  }
}

TEST(Overload, RefusesNothingBelowTheCapacity) {
  OverloadedDevice device({"four fifths", {0.5, 1, 10}, 0.8, 1, 1});
  device.Run();
  for (const auto& [deadline, share] : device.shares()) {
    EXPECT_GE(share.Answered(), 0.99) << deadline;
  }
}

}  // namespace
}  // namespace attnd
