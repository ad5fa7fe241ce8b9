#include "server/masks/mask_workers.h"

namespace attnd {

MaskWorkers::MaskWorkers(int threads) {
  for (int n = 0; n < threads; ++n) threads_.emplace_back([this] { Main(); });
}

MaskWorkers::~MaskWorkers() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void MaskWorkers::Run(absl::string_view caller, std::function<void()> work) {
  absl::MutexLock lock(&mutex_);
  const auto [found, is_new] = callers_.try_emplace(std::string(caller));
  found->second.waiting.push_back(std::move(work));
  if (is_new) turns_.push_back(found->first);
}

bool MaskWorkers::Take(std::string& caller, std::function<void()>& work) {
  auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return !turns_.empty() || (stopping_ && callers_.empty());
  };
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&ready));
  if (turns_.empty()) return false;
  caller = std::move(turns_.front());
  turns_.pop_front();
  auto& waiting = callers_.find(caller)->second.waiting;
  work = std::move(waiting.front());
  waiting.pop_front();
  return true;
}

void MaskWorkers::GiveBack(const std::string& caller) {
  absl::MutexLock lock(&mutex_);
  auto found = callers_.find(caller);
  if (found->second.waiting.empty()) {
    callers_.erase(found);
  } else {
    turns_.push_back(caller);
  }
}

void MaskWorkers::Main() {
  std::string caller;
  std::function<void()> work;
  while (Take(caller, work)) {
    work();
    work = nullptr;
    GiveBack(caller);
  }
}

}  // namespace attnd
