#include "client/call/lease_book.h"

#include <algorithm>

namespace attnd {
namespace {

// Releases come in bursts (a training step's graph): so long the first waits for the others.
constexpr absl::Duration kGather = absl::Milliseconds(5);
constexpr size_t kTokensOfACall = 512;  // the server takes 1024
constexpr absl::Duration kRenewAgain = absl::Seconds(5);

}  // namespace

LeaseBook::~LeaseBook() { Close(); }

LeaseBook::Id LeaseBook::Add(HeldLease lease) {
  absl::MutexLock lock(&mutex_);
  if (closed_) return 0;
  Id id = next_id_++;
  absl::Duration half = lease.life / 2;
  Entry& entry = held_[id];
  entry = {std::move(lease), absl::InfinitePast()};
  SetDue(id, entry, half);
  if (!thread_.joinable()) thread_ = std::thread([this] { Main(); });
  return id;
}

std::optional<HeldLease> LeaseBook::Find(Id id) {
  absl::MutexLock lock(&mutex_);
  auto found = held_.find(id);
  if (found == held_.end()) return std::nullopt;
  return found->second.lease;
}

void LeaseBook::Lost(Id id) {
  absl::MutexLock lock(&mutex_);
  Forget(id);
}

void LeaseBook::Release(Id id) {
  absl::MutexLock lock(&mutex_);
  auto found = held_.find(id);
  if (found == held_.end()) return;
  bool first = returned_.empty();
  returned_[found->second.lease.address].push_back(std::move(found->second.lease.token));
  Forget(id);
  if (first) changed_.Signal();
}

void LeaseBook::Close() {
  {
    absl::MutexLock lock(&mutex_);
    if (closed_) return;
    closed_ = true;
    for (auto& [id, entry] : held_) {
      returned_[entry.lease.address].push_back(std::move(entry.lease.token));
    }
    held_.clear();
    due_.clear();
    changed_.Signal();
  }
  if (thread_.joinable()) thread_.join();
}

void LeaseBook::Forget(Id id) {
  auto found = held_.find(id);
  if (found == held_.end()) return;
  due_.erase({found->second.due, id});
  held_.erase(found);
}

void LeaseBook::SetDue(Id id, Entry& entry, absl::Duration after) {
  due_.erase({entry.due, id});
  entry.due = clock_.Now() + after;
  bool earliest = due_.empty() || entry.due < due_.begin()->first;
  due_.insert({entry.due, id});
  if (earliest) changed_.Signal();
}

void LeaseBook::Main() {
  bool closed = false;
  while (!closed) {
    Returned returned;
    {
      absl::MutexLock lock(&mutex_);
      while (!closed_ && returned_.empty()) {
        absl::Duration wait =
            due_.empty() ? absl::InfiniteDuration() : due_.begin()->first - clock_.Now();
        if (wait <= absl::ZeroDuration()) break;
        changed_.WaitFor(mutex_, wait);
      }
      if (!closed_ && !returned_.empty()) changed_.WaitFor(mutex_, kGather);
      returned.swap(returned_);
      closed = closed_;
    }
    GiveBack(std::move(returned));
    if (!closed) RenewDue();
  }
}

void LeaseBook::GiveBack(Returned returned) {
  for (auto& [address, tokens] : returned) {
    for (size_t begin = 0; begin < tokens.size(); begin += kTokensOfACall) {
      size_t end = std::min(begin + kTokensOfACall, tokens.size());
      calls_.release(address, {tokens.begin() + static_cast<std::ptrdiff_t>(begin),
                               tokens.begin() + static_cast<std::ptrdiff_t>(end)});
    }
  }
}

void LeaseBook::RenewDue() {
  while (true) {
    Id id;
    HeldLease lease;
    {
      absl::MutexLock lock(&mutex_);
      if (closed_ || due_.empty() || due_.begin()->first > clock_.Now()) return;
      id = due_.begin()->second;
      lease = held_.find(id)->second.lease;
    }
    absl::StatusOr<absl::Duration> life = calls_.renew(lease.address, lease.token);
    absl::MutexLock lock(&mutex_);
    auto found = held_.find(id);
    if (found == held_.end()) continue;
    bool later = absl::IsUnavailable(life.status()) || absl::IsDeadlineExceeded(life.status());
    if (life.ok()) found->second.lease.life = *life;
    if (life.ok() || later) {
      SetDue(id, found->second, life.ok() ? *life / 2 : kRenewAgain);
    } else {
      Forget(id);
    }
  }
}

}  // namespace attnd
