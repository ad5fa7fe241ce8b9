// HeldPeers: the connections of a server that are not read for a while, since they make it work for
// nothing (wasted_work.h); how long, how many, and who lets them go again.
//
// What a connection wastes beyond its own is taken from its address (IPv6: the first 64 bits),
// which has as much again. When that is in debt, the connection is held for as long as the debt
// takes to grow over. A new connection of an address in debt is held for kLeastHoldSeconds from its
// start, since a peer may close one and open another; no longer, since it may be a neighbour's.
// Other connections of that address, which have what is their own, go on.
//
// Threads: any; a thread of its own lets go, so Stop comes before the last owner goes.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "base/wasted_work.h"

namespace attnd {

class HeldPeers {
 public:
  // Tells of who is held, once a second at most: a socket's number, for how long, and how often
  // anybody was.
  using Listener = std::function<void(int socket, absl::Duration time, int64_t total)>;

  HeldPeers(const WastedWork::Limits& limits, Listener on_hold);
  ~HeldPeers() { Stop(); }

  static constexpr double kLeastHoldSeconds = 0.5, kLongestHoldSeconds = 5;
  // Those that wasted something lately, the others are full.
  static constexpr size_t kMostAddresses = 4096;

  const WastedWork::Limits& limits() const { return limits_; }
  // `frames` from what an address has; how long who wasted them is to be held, zero unless it is in
  // debt then.
  absl::Duration Take(uint64_t address, double frames, absl::Time now);
  // How long a new connection of that address is to be held.
  absl::Duration FirstHold(uint64_t address, absl::Time now);
  // One hold: when it ends, and its number.
  using Key = std::pair<absl::Time, int64_t>;
  // Those who are due within so long are let go together: one wake-up serves them all.
  static constexpr absl::Duration kTick = absl::Milliseconds(100);
  // Calls `release` after `time`, or up to a tick later. None when it has stopped: nobody is to be
  // held any more.
  absl::optional<Key> Hold(int socket, absl::Duration time, std::function<void(Key)> release);
  // Before its time; it may be about to be released just now.
  void End(Key hold);
  // Lets go of all and returns. The listener is not called any more.
  void Stop();

  size_t addresses() {
    absl::MutexLock lock(&mutex_);
    return addresses_.size();
  }
  int now() const { return now_; }
  int64_t total() const { return total_; }

  // Of a clock that does not go back.
  static absl::Time Time();

 private:
  void LetGo();
  void MakeRoomForAnAddress(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const WastedWork::Limits limits_;
  const Listener on_hold_;
  std::atomic<int> now_{0};
  std::atomic<int64_t> total_{0};
  absl::Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_map<uint64_t, FrameBudget> addresses_ ABSL_GUARDED_BY(mutex_);
  std::map<Key, std::function<void(Key)>> releases_ ABSL_GUARDED_BY(mutex_);
  absl::Time told_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  absl::Time looked_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // for full addresses
  absl::CondVar changed_;
  std::thread thread_;
};

}  // namespace attnd
