#include "client/channels/reconnector.h"

#include <utility>

#include "base/clock.h"
#include "client/channels/grpc_time.h"

namespace attnd {
namespace {

constexpr absl::Duration kLongest = absl::Minutes(1);
// A watch cannot be taken back: so long may the destructor wait.
constexpr absl::Duration kOneWatch = absl::Milliseconds(100);

}  // namespace

Reconnector::~Reconnector() {
  std::thread thread;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    thread = std::move(thread_);
  }
  queue_.Shutdown();
  if (thread.joinable()) {
    thread.join();  // it leaves an empty queue
    return;
  }
  void* tag = nullptr;
  bool ok = false;
  queue_.Next(&tag, &ok);  // nothing was asked of it: it ends at once
}

void Reconnector::Drive(const std::shared_ptr<grpc::Channel>& channel) {
  absl::MutexLock lock(&mutex_);
  Driven& driven = driven_[channel.get()];
  driven.until = SteadyNow() + kLongest;
  if (driven.channel != nullptr) return;
  driven.channel = channel;
  if (!Watch(driven)) {
    driven_.erase(channel.get());
  } else if (!thread_.joinable()) {
    thread_ = std::thread([this] { Main(); });
  }
}

bool Reconnector::Watch(const Driven& driven) {
  grpc_connectivity_state state = driven.channel->GetState(/*try_to_connect=*/true);
  if (state == GRPC_CHANNEL_READY || state == GRPC_CHANNEL_SHUTDOWN) return false;
  driven.channel->NotifyOnStateChange(state, GrpcTime(SteadyNow() + kOneWatch), &queue_,
                                      driven.channel.get());
  return true;
}

void Reconnector::Main() {
  void* tag = nullptr;
  for (bool ok = false; queue_.Next(&tag, &ok);) {
    absl::MutexLock lock(&mutex_);
    auto driven = driven_.find(tag);
    bool over = stopping_ || SteadyNow() >= driven->second.until;
    if (over || !Watch(driven->second)) driven_.erase(driven);
  }
}

}  // namespace attnd
