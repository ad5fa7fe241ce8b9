#include "base/receive_memory.h"

#include <malloc.h>

#include <algorithm>

#include "base/held_peers.h"

namespace attnd {

void ReceiveMemory::Join(std::weak_ptr<Connection> connection) {
  absl::MutexLock lock(&mutex_);
  if (connections_.size() >= most_) {
    auto is_gone = [](const std::weak_ptr<Connection>& one) { return one.expired(); };
    connections_.erase(std::remove_if(connections_.begin(), connections_.end(), is_gone),
                       connections_.end());
    most_ = 2 * connections_.size() + 64;
  }
  connections_.push_back(std::move(connection));
}

bool ReceiveMemory::MayRead(int64_t& place, const Wants& wants,
                            const std::weak_ptr<Connection>& connection, absl::Time now) {
  absl::MutexLock lock(&mutex_);
  auto entry = queue_.find(place);
  if (entry != queue_.end() && (wants.lacking == 0 || wants.finished >= entry->second.due)) {
    Drop(place);
    entry = queue_.end();
  }
  if (entry == queue_.end()) place = 0;
  if (stopped_) return true;
  if (entry == queue_.end()) {
    if (!IsShort() || (wants.lacking <= kLittle && used_ < limit_)) return true;
    place = ++last_place_;
    entry = queue_.try_emplace(place).first;
    entry->second = {connection, wants.finished + wants.begun, 0, 0, true, now + kPatience};
    changed_.Signal();
  }
  Entry& own = entry->second;
  Promise(own, 0);
  own.lacking = wants.lacking;
  own.begun = wants.begun;
  own.address = wants.address;
  if (!IsShort()) {
    own.waits = false;
    return true;
  }
  if (!IsNext(*entry)) {
    own.waits = true;
    return false;
  }
  Promise(own, own.lacking);
  if (std::exchange(own.waits, false)) own.until = now + kPatience;
  return true;
}

// Who lacks more than can ever be promised is in nobody's way.
bool ReceiveMemory::IsNext(const Queue::value_type& entry) const {
  const Entry& own = entry.second;
  if (own.lacking > promises_end() - used_ - promised_) return false;
  const int64_t most = promises_end() - limit_ / 2;
  int64_t promised_to_address = 0;
  for (const auto& [place, other] : queue_) {
    if (place == entry.first || other.address != own.address) continue;
    if (place < entry.first && other.waits && other.lacking <= most) return false;
    if (!other.waits) promised_to_address += other.begun;
  }
  return promised_to_address == 0 || promised_to_address + own.begun <= most / 2;
}

void ReceiveMemory::Promise(Entry& entry, int64_t bytes) {
  promised_ += bytes - std::exchange(entry.promised, bytes);
}

void ReceiveMemory::Drop(int64_t place) {
  auto entry = queue_.find(place);
  if (entry == queue_.end()) return;
  Promise(entry->second, 0);
  queue_.erase(entry);
}

void ReceiveMemory::Leave(int64_t& place) {
  if (place == 0) return;
  absl::MutexLock lock(&mutex_);
  Drop(std::exchange(place, 0));
}

void ReceiveMemory::Look(absl::Time now) {
  std::vector<std::weak_ptr<Connection>> asked;
  {
    absl::MutexLock lock(&mutex_);
    asked.swap(connections_);
  }
  auto has_ended = [now](const std::weak_ptr<Connection>& one) {
    auto connection = one.lock();
    return connection == nullptr || !connection->AskAgain(now);
  };
  asked.erase(std::remove_if(asked.begin(), asked.end(), has_ended), asked.end());
  {
    absl::MutexLock lock(&mutex_);
    connections_.insert(connections_.end(), asked.begin(), asked.end());
  }
  if (trims_ && now >= told_ + absl::Seconds(1)) {
    trims_ = false;
    malloc_trim(0);
  }
  if (ForgetOld(now)) return;
  int64_t freed = 0;
  for (const auto& connection : Due(now)) {
    if (used_ - freed < limit_ / 4) break;
    const Connection::Ended ended = connection->Reset();
    freed += ended.bytes;
    ++resets_;
    trims_ = true;
    if (now < told_ + absl::Seconds(1)) continue;
    told_ = now;
    on_reset_(ended.socket, ended.bytes, resets_);
  }
}

std::vector<std::shared_ptr<ReceiveMemory::Connection>> ReceiveMemory::Due(absl::Time now) {
  std::vector<std::shared_ptr<Connection>> due;
  absl::MutexLock lock(&mutex_);
  for (auto entry = queue_.begin(); entry != queue_.end();) {
    const auto& [place, own] = *entry++;
    auto connection = own.connection.lock();
    if (connection == nullptr) {
      Drop(place);
    } else if (own.until <= now) {
      due.push_back(std::move(connection));
    }
  }
  return due;
}

// Who has not waited since memory was short.
bool ReceiveMemory::ForgetOld(absl::Time now) {
  absl::MutexLock lock(&mutex_);
  const bool is_short = IsShort();
  if (is_short) short_at_ = now;
  if (now < short_at_ + kPatience) return !is_short;
  for (auto entry = queue_.begin(); entry != queue_.end();) {
    const auto& [place, own] = *entry++;
    if (!own.waits) Drop(place);
  }
  return true;
}

int ReceiveMemory::waiting() {
  int count = 0;
  absl::MutexLock lock(&mutex_);
  for (const auto& [place, entry] : queue_) count += entry.waits ? 1 : 0;
  return count;
}

void ReceiveMemory::Start() {
  thread_ = std::thread([this] { Run(); });
}

void ReceiveMemory::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopped_ = true;
    changed_.Signal();
  }
  if (thread_.joinable()) thread_.join();
  Look(absl::InfinitePast());
}

void ReceiveMemory::Run() {
  auto stopped = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return stopped_; };
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      while (!stopped_ && queue_.empty()) changed_.Wait(&mutex_);
      if (mutex_.AwaitWithTimeout(absl::Condition(&stopped), kTick)) return;
    }
    Look(HeldPeers::Time());
  }
}

}  // namespace attnd
