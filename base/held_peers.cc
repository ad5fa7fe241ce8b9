#include "base/held_peers.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace attnd {

HeldPeers::HeldPeers(const WastedWork::Limits& limits, Listener on_hold)
    : limits_(limits), on_hold_(std::move(on_hold)) {
  if (limits_.frames_per_second > 0) thread_ = std::thread([this] { LetGo(); });
}

absl::Time HeldPeers::Time() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

absl::Duration HeldPeers::Take(uint64_t address, double frames, absl::Time now) {
  const double rate = limits_.frames_per_second;
  constexpr double kMostDebtSeconds = kLongestHoldSeconds - kLeastHoldSeconds;
  absl::MutexLock lock(&mutex_);
  auto at = addresses_.find(address);
  if (at == addresses_.end()) {
    if (frames == 0) return absl::ZeroDuration();
    if (addresses_.size() == kMostAddresses) MakeRoomForAnAddress(now);
    const double full = rate * FrameBudget::kBurstSeconds;
    at = addresses_.try_emplace(address, FrameBudget(full, rate, now)).first;
  }
  FrameBudget& budget = at->second;
  budget.Grow(now);
  budget.Add(-std::min(frames, budget.frames() + rate * kMostDebtSeconds));
  if (budget.frames() >= 0) return absl::ZeroDuration();
  return absl::Seconds(kLeastHoldSeconds - budget.frames() / rate);
}

absl::Duration HeldPeers::FirstHold(uint64_t address, absl::Time now) {
  return std::min(Take(address, 0, now), absl::Seconds(kLeastHoldSeconds));
}

// Once a second; in between, or when all are in debt, any one goes.
void HeldPeers::MakeRoomForAnAddress(absl::Time now) {
  if (now >= looked_ + absl::Seconds(1)) {
    looked_ = now;
    absl::erase_if(addresses_, [now](auto& entry) {
      entry.second.Grow(now);
      return entry.second.full();
    });
  }
  if (addresses_.size() == kMostAddresses) addresses_.erase(addresses_.begin());
}

absl::optional<HeldPeers::Key> HeldPeers::Hold(int socket, absl::Duration time,
                                               std::function<void(Key)> release) {
  const absl::Time now = Time();
  absl::MutexLock lock(&mutex_);
  if (stopped_) return absl::nullopt;
  const absl::Duration due = absl::Ceil(now + time - absl::UnixEpoch(), kTick);
  const Key key(absl::UnixEpoch() + due, ++total_);
  releases_.emplace(key, std::move(release));
  ++now_;
  if (releases_.begin()->first == key) changed_.Signal();
  if (on_hold_ && now >= told_ + absl::Seconds(1)) {
    told_ = now;
    on_hold_(socket, time, total_);
  }
  return key;
}

void HeldPeers::End(Key hold) {
  absl::MutexLock lock(&mutex_);
  now_ -= static_cast<int>(releases_.erase(hold));
}

void HeldPeers::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
    changed_.Signal();
  }
  if (thread_.joinable()) thread_.join();
}

void HeldPeers::LetGo() {
  absl::MutexLock lock(&mutex_);
  while (!stopped_ || !releases_.empty()) {
    if (releases_.empty()) {
      changed_.Wait(&mutex_);
      continue;
    }
    const absl::Duration left = releases_.begin()->first.first - Time();
    if (!stopped_ && left > absl::ZeroDuration()) {
      changed_.WaitWithTimeout(&mutex_, left);
      continue;
    }
    const auto next = releases_.extract(releases_.begin());
    mutex_.Unlock();
    next.mapped()(next.key());
    --now_;
    mutex_.Lock();
  }
}

}  // namespace attnd
