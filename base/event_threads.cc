#include "base/event_threads.h"

#include <grpc/grpc.h>
#include <grpc/support/cpu.h>
#include <grpc/support/time.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/version_info.h>
#include <unistd.h>

#include <algorithm>

#include "absl/time/clock.h"
#include "base/check.h"

static_assert(GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR == 51,
              "compare with this gRPC's src/cpp/common/completion_queue_cc.cc");

namespace attnd {
namespace {

constexpr int kOfGrpc = 2;  // its least
// How long a thread waits for an event before it looks whether it is still wanted.
constexpr int kLookMs = 100;
constexpr int kLingerMs = 20;

thread_local unsigned cores_told = 0;  // 0: the truth

// Private members of grpc::CompletionQueue: take and give back the queue of all callbacks.
grpc::CompletionQueue* TakeCallbackQueue() __asm__(
    "_ZN4grpc15CompletionQueue21CallbackAlternativeCQEv");
void GiveCallbackQueue(grpc::CompletionQueue* queue) __asm__(
    "_ZN4grpc15CompletionQueue28ReleaseCallbackAlternativeCQEPS0_");

grpc::CompletionQueue* TakeQueue() {
  cores_told = 2 * kOfGrpc;  // it takes half of them
  grpc::CompletionQueue* queue = TakeCallbackQueue();
  cores_told = 0;
  return queue;
}

}  // namespace

EventThreads::EventThreads(int most) : queue_(TakeQueue()) {
  CHECK(most >= kLeast && most <= kMost) << most;
  threads_.emplace_back([this] { Drive(); });
  for (int n = kLeast; n < most; ++n) threads_.emplace_back([this] { DriveWhileThereIsMuch(); });
}

EventThreads::~EventThreads() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
  GiveCallbackQueue(queue_);
}

void EventThreads::Add(int weight) {
  const int before = load_.fetch_add(weight);
  if (before >= kMuch || before + weight < kMuch) return;
  absl::MutexLock lock(&mutex_);  // its end wakes those who wait for much
}

// As gRPC's own threads do it, which never hold a lock here and are never inside gRPC.
void EventThreads::RunNext(int milliseconds) {
  gpr_timespec until =
      gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(milliseconds, GPR_TIMESPAN));
  grpc_event event = grpc_completion_queue_next(queue_->cq(), until, nullptr);
  if (event.type != GRPC_OP_COMPLETE) return;
  auto* functor = static_cast<grpc_completion_queue_functor*>(event.tag);
  functor->functor_run(functor, event.success);
}

void EventThreads::Drive() {
  while (!stopping_) RunNext(kLookMs);
}

void EventThreads::DriveWhileThereIsMuch() {
  auto wanted = [this] { return stopping_ || load_ >= kMuch; };
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(&wanted));
    }
    absl::Time quiet_after = absl::Now() + absl::Milliseconds(kLingerMs);
    while (!stopping_ && absl::Now() < quiet_after) {
      RunNext(kLingerMs);
      if (load_ >= kMuch) quiet_after = absl::Now() + absl::Milliseconds(kLingerMs);
    }
    if (stopping_) return;
  }
}

}  // namespace attnd

// In the place of gRPC's: a program's own symbols come before those of its libraries.
unsigned gpr_cpu_num_cores() {
  if (attnd::cores_told > 0) return attnd::cores_told;
  static const auto kCores = static_cast<unsigned>(std::max(1L, sysconf(_SC_NPROCESSORS_CONF)));
  return kCores;
}
