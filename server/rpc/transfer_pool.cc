#include "server/rpc/transfer_pool.h"

#include <utility>

namespace attnd {

TransferPool::TransferPool(int threads) {
  for (int n = 0; n < threads; ++n) threads_.emplace_back([this] { Main(); });
}

TransferPool::~TransferPool() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void TransferPool::Run(std::function<void()> send) {
  absl::MutexLock lock(&mutex_);
  queue_.push_back(std::move(send));
}

void TransferPool::Main() {
  auto ready = [this]()
                   ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || !queue_.empty(); };
  while (true) {
    std::function<void()> send;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&ready));
      if (queue_.empty()) return;
      send = std::move(queue_.front());
      queue_.pop_front();
    }
    send();
  }
}

}  // namespace attnd
