#include "server/shared_memory/shared_session.h"

namespace attnd {

bool SharedSession::Begin(uint64_t use) {
  absl::MutexLock lock(&mutex_);
  if (on_ended_ == nullptr || ended_.erase(use) > 0) return false;
  return running_.insert(use).second;
}

void SharedSession::Finish(uint64_t use) {
  absl::MutexLock lock(&mutex_);
  running_.erase(use);
  if (awaited_.erase(use) > 0 && on_ended_ != nullptr) on_ended_(use);
}

SharedSession::End SharedSession::EndUse(uint64_t use) {
  absl::MutexLock lock(&mutex_);
  if (running_.contains(use)) {
    awaited_.insert(use);
    return End::kRuns;
  }
  if (ended_.size() >= kMaxEndedUses) return End::kTooMany;
  ended_.insert(use);  // it may still be on its way
  return End::kEnded;
}

void SharedSession::Close() {
  absl::MutexLock lock(&mutex_);
  on_ended_ = nullptr;
}

}  // namespace attnd
