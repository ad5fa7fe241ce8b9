// ComputeTurns: which module call computes on one device next. One at a time. Callers share the
// device's time by start-time fair queuing (Goyal, Vin and Cheng, 1996): the caller that has had
// the least is next, and one that was idle begins where the others are. Of one caller's calls the
// one that is due first is next. A long call gives its turn up between ops, once it has had kSlice
// of time and a caller that has had less waits. Any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/work_watch.h"

namespace attnd {

// A call that wants turns.
struct TurnWish {
  std::string caller;
  std::stop_token stop;
  absl::Time deadline = absl::InfiniteFuture();
  double seconds = 0;  // estimated; 0: nobody knows
};

class ComputeTurns {
 public:
  // A turn that begins is not taken back sooner, so that changing hands costs little.
  static constexpr double kSlice = 0.02;

  // Seconds of a clock that is never set; tests have their own.
  using Now = double (*)();
  static double MonotonicNow() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(now).count();
  }
  explicit ComputeTurns(Now now = &MonotonicNow) : now_(now) {}

  // A call's place among those that want this device, and its turn while it has one. Its thread's.
  class Place {
   public:
    Place(ComputeTurns& turns, const TurnWish& wish);
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    // Waits for the call's turn. False: the call was stopped, or its deadline has passed.
    bool Take();
    // The turn should be given up now.
    bool IsWanted() const;
    void Give();
    // Waits for another turn of a call that has begun: whatever happens to it, it has to end.
    void TakeAgain();
    double computed_seconds() const;  // in all turns

   private:
    friend class ComputeTurns;
    ComputeTurns& turns_;
    const TurnWish wish_;
    // Guarded by turns_.mutex_.
    uint64_t number_ = 0;  // in the order in which they came
    bool waits_ = false;
    double began_ = 0;                     // its turn
    double computed_ = 0;                  // in the turns before
    std::optional<WorkWatch::Work> work_;  // while it has the turn
  };

  int waiting() const;
  // Estimated, of all calls that have a place.
  double QueueSeconds() const;
  // Estimated until a call of `seconds` that this caller sends now ends: behind the caller's other
  // calls, and as much of each other caller's.
  double SecondsUntilDone(const std::string& caller, double seconds) const;
  // When the call that has the device counts as stuck: it was to end by its deadline.
  absl::Time stuck_at() const { return watch_.stuck_at(); }

 private:
  struct Caller {
    double had = 0;  // seconds
    std::vector<Place*> places;
  };
  void CallNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndTurn(Place& place) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static Place* NextOf(const Caller& caller);  // null: none waits
  double ComputedBy(const Place& place) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  double LeftOf(const Caller& caller) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  const Now now_;
  WorkWatch watch_;
  mutable absl::Mutex mutex_;
  const Place* holder_ ABSL_GUARDED_BY(mutex_) = nullptr;
  double start_ ABSL_GUARDED_BY(mutex_) = 0;  // what the last turn's caller had had before it
  uint64_t last_number_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, Caller> callers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
