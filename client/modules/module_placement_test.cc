// Modules of many clients that are placed on a few daemons at the same time, on simulated time:
// each client's PlaceModule runs on a thread of its own, one thread at a time, the one whose time
// is next. Messages and registrations take as long as they do in a network.
#include "client/modules/module_placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"

namespace attnd {
namespace {

// Threads that take turns: each runs until it waits for a later time, and then the one whose time
// is next. Of equal times the lower number comes first.
class Turns {
 public:
  // Runs all of them from time 0 on.
  void Run(const std::vector<std::function<void(int thread)>>& works) {
    std::vector<std::thread> threads;
    {
      absl::MutexLock lock(&mutex_);
      now_ = absl::ZeroDuration();
      for (size_t n = 0; n < works.size(); ++n) waiting_.emplace(now_, static_cast<int>(n));
      running_ = TakeNext();
    }
    for (size_t n = 0; n < works.size(); ++n) {
      threads.emplace_back([this, &works, thread = static_cast<int>(n)] {
        AwaitTurn(thread);
        works[thread](thread);
        absl::MutexLock lock(&mutex_);
        running_ = TakeNext();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void Wait(int thread, absl::Duration delay) {
    {
      absl::MutexLock lock(&mutex_);
      waiting_.emplace(now_ + delay, thread);
      running_ = TakeNext();
    }
    AwaitTurn(thread);
  }

 private:
  int TakeNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (waiting_.empty()) return -1;
    const auto [at, thread] = *waiting_.begin();
    waiting_.erase(waiting_.begin());
    now_ = at;
    return thread;
  }
  void AwaitTurn(int thread) {
    auto is_mine = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return running_ == thread; };
    absl::MutexLock lock(&mutex_, absl::Condition(&is_mine));
  }

  absl::Mutex mutex_;
  absl::Duration now_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<absl::Duration, int>> waiting_ ABSL_GUARDED_BY(mutex_);
  int running_ ABSL_GUARDED_BY(mutex_) = -1;
};

// Daemons that have room for 100 modules each, and clients of one module each.
class Fleet {
 public:
  Fleet(int daemons, int clients, absl::Duration round_trip, uint64_t seed)
      : modules_(daemons, 0), at_(clients, -1), round_trip_(round_trip), seed_(seed) {}

  // The clients whose module is at `from` place it at the same moment; −1: those without one.
  void Place(int from) {
    std::vector<std::function<void(int)>> works;
    for (int client = 0; client < static_cast<int>(at_.size()); ++client) {
      if (at_[client] != from) continue;
      works.push_back([this, client, from](int thread) { PlaceOne(client, from, thread); });
    }
    turns_.Run(works);
    if (from < 0) return;
    modules_[from] = 0;
    ++drained_;
  }

  double MostOverMean() const {
    const auto modules = static_cast<double>(at_.size());
    return *absl::c_max_element(modules_) * static_cast<double>(modules_.size() - drained_) /
           modules;
  }

 private:
  // As long as a daemon plans a module.
  static constexpr absl::Duration kPlanning = absl::Milliseconds(1);

  void PlaceOne(int client, int from, int thread) {
    std::mt19937_64 random(seed_ * at_.size() + static_cast<uint64_t>(client));
    std::map<int, ReportedLoad> loads;
    PlacementCalls calls;
    for (int daemon = 0; daemon < static_cast<int>(modules_.size()); ++daemon) {
      calls.addresses.push_back(daemon);
    }
    calls.each = [&](const std::vector<int>& daemons, const std::string&, const std::string&) {
      turns_.Wait(thread, round_trip_ / 2 + kPlanning);
      for (int daemon : daemons) loads[daemon] = {.memory = modules_[daemon] / 100.0};
      turns_.Wait(thread, round_trip_ / 2);
      return std::vector<absl::StatusOr<std::string>>(daemons.size(), "");
    };
    calls.load_of = [&](int daemon) { return loads[daemon]; };
    calls.wait = [&](absl::Duration delay) {
      turns_.Wait(thread, delay);
      return absl::OkStatus();
    };
    v1::RegisterModuleRequest request;
    request.set_name(absl::StrCat("module", client));
    const absl::StatusOr<Placement> place = PlaceModule(calls, request, from, random);
    ASSERT_TRUE(place.ok()) << place.status();
    turns_.Wait(thread, round_trip_ / 2 + kPlanning);
    at_[client] = place->address;
    ++modules_[place->address];
  }

  Turns turns_;
  std::vector<int> modules_;  // of each daemon
  std::vector<int> at_;       // where each client's is
  size_t drained_ = 0;        // daemons, which all clients leave
  const absl::Duration round_trip_;
  const uint64_t seed_;
};

TEST(PlaceModule, SpreadsModulesOfClientsThatRegisterAtTheSameMoment) {
  for (const absl::Duration round_trip :
       {absl::Microseconds(500), absl::Milliseconds(5), absl::Milliseconds(20)}) {
    double placed = 0, moved = 0;
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      Fleet fleet(4, 40, round_trip, seed);
      fleet.Place(-1);
      placed = std::max(placed, fleet.MostOverMean());
      fleet.Place(0);
      moved = std::max(moved, fleet.MostOverMean());
    }
    std::cout << "round trip " << round_trip << ": most loaded of 4 " << placed
              << " of the mean, of the 3 left when one has drained " << moved << "\n";
    EXPECT_LE(placed, 1.3) << round_trip;
    EXPECT_LE(moved, 1.3) << round_trip;
  }
}

}  // namespace
}  // namespace attnd
