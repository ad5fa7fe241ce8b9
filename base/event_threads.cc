#include "base/event_threads.h"

#include <grpc/grpc.h>
#include <grpc/support/cpu.h>
#include <grpc/support/time.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/version_info.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/busy_thread.h"
#include "base/check.h"
#include "base/own_sockets.h"
#include "base/short_waits.h"

static_assert(GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR == 51,
              "compare with this gRPC's src/cpp/common/completion_queue_cc.cc");

namespace attnd {
namespace {

constexpr int64_t kLookEvery = 250'000;  // nanoseconds
constexpr int kLooksOfAPause = 4;
// How often a thread that hears nothing looks whether it is still needed.
constexpr int kLookMs = 100;

int64_t NowNanoseconds() { return absl::GetCurrentTimeNanos(); }

// As many as gRPC takes.
int GrpcsCount() { return std::clamp(static_cast<int>(gpr_cpu_num_cores()) / 2, 2, 16); }

}  // namespace

class EventThreads::Pool {
 public:
  // The process's, made by the first that asks.
  static std::shared_ptr<Pool> Get(int most);

  Pool() : driving_(1) {}
  ~Pool() {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    queue_.Shutdown();
    for (const auto& sockets : own_sockets_) sockets->Wake();
    for (std::thread& thread : threads_) thread.join();
    for (std::thread& thread : own_threads_) thread.join();
  }

  grpc::CompletionQueue* queue() { return &queue_; }
  int driving() const { return driving_; }

 private:
  void AddThreads(int most) {
    const int for_all = std::min(most, std::max(3, most / 4));
    for (int n = static_cast<int>(threads_.size()); n < for_all; ++n) {
      threads_.emplace_back([this, n] { Main(n); });
    }
    most_ = static_cast<int>(threads_.size());
    while (static_cast<int>(own_sockets_.size()) < most) {
      auto sockets = OwnSockets::Create();
      if (sockets == nullptr) return;
      own_threads_.emplace_back([this, own = sockets.get()] { OwnMain(*own); });
      own_sockets_.push_back(std::move(sockets));
    }
  }

  void OwnMain(OwnSockets& sockets) {
    while (!stopping_ && sockets.Drive(queue_.cq(), [this](void* tag, bool ok) { Run(tag, ok); })) {
    }
  }

  void Main(int index) {
    int64_t pauses = 0;  // without a sleep
    auto use = [&] {
      ThreadUse now = ThreadUse::OfTheCaller();
      now.sleeps += pauses;
      return now;
    };
    BusyThread own(use());
    int64_t look_at = 0;
    while (true) {
      if (index >= driving_) WaitUntilWanted(index);
      switch (RunNext(index, pauses)) {
        case GRPC_QUEUE_SHUTDOWN:
          return;
        case GRPC_QUEUE_TIMEOUT:
          LeaveIfNotNeeded();
          break;
        case GRPC_OP_COMPLETE:
          if (NowNanoseconds() < look_at) break;
          look_at = NowNanoseconds() + kLookEvery;
          own.IsBusy(use()) ? Join() : LeaveIfNotNeeded();
      }
    }
  }

  // The next to join looks after those that drive: they may all be held up.
  void WaitUntilWanted(int index) {
    auto next = [&] { return stopping_ || index <= driving_; };
    auto wanted = [&] { return stopping_ || index < driving_; };
    absl::MutexLock lock(&mutex_);
    while (!wanted()) {
      mutex_.Await(absl::Condition(&next));
      const int64_t done = done_;
      if (mutex_.AwaitWithTimeout(absl::Condition(&wanted), absl::Milliseconds(kLookMs))) return;
      if (index != driving_ || inside_ != driving_ || done_ != done) continue;
      ++driving_;
      needed_at_ = NowNanoseconds();
    }
  }

  // As gRPC's own threads do it, which never hold a lock here and are never inside gRPC.
  grpc_completion_type RunNext(int index, int64_t& pauses) {
    gpr_timespec until = gpr_inf_future(GPR_CLOCK_MONOTONIC);
    if (index > 0) {
      until =
          gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(kLookMs, GPR_TIMESPAN));
    }
    grpc_event event;
    auto next = [&](gpr_timespec time) {
      event = grpc_completion_queue_next(queue_.cq(), time, nullptr);
      return event.type != GRPC_QUEUE_TIMEOUT;
    };
    // A look may bring gRPC work and this nothing, but hardly several.
    int looks = 0;
    auto look = [&] {
      if (++looks == kLooksOfAPause) ++pauses;
      return next(gpr_inf_past(GPR_CLOCK_MONOTONIC));
    };
    waits_.Wait(driving_ == 1, look, [&] { return next(until); });
    if (event.type == GRPC_OP_COMPLETE) {
      ++inside_;
      Run(event.tag, event.success != 0);
      --inside_;
    }
    return event.type;
  }

  void Run(void* tag, bool ok) {
    auto* functor = static_cast<grpc_completion_queue_functor*>(tag);
    functor->functor_run(functor, ok);
    ++done_;
  }

  // What leaves no pause are small calls of several callers. All at once: threads that take turns
  // have pauses, and ask no more.
  void Join() {
    needed_at_ = NowNanoseconds();
    if (driving_ == most_) return;
    absl::MutexLock lock(&mutex_);  // its end wakes those who wait
    driving_ = most_.load();
  }

  void LeaveIfNotNeeded() {
    if (driving_ == 1) return;
    if (NowNanoseconds() < needed_at_ + absl::ToInt64Nanoseconds(kStay)) return;
    absl::MutexLock lock(&mutex_);
    driving_ = 1;
  }

  grpc::CompletionQueue queue_;
  ShortWaits waits_;
  std::atomic<int> most_{0};
  std::atomic<int> driving_;  // threads 0 to driving_ - 1 do
  std::atomic<int64_t> needed_at_{0};
  std::atomic<int> inside_{0};  // threads that run a callback
  std::atomic<int64_t> done_{0};
  absl::Mutex mutex_;
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;
  std::vector<std::unique_ptr<OwnSockets>> own_sockets_;
  std::vector<std::thread> own_threads_;
};

namespace {

struct Process {
  absl::Mutex mutex;
  std::weak_ptr<EventThreads::Pool> pool ABSL_GUARDED_BY(mutex);
  std::shared_ptr<EventThreads::Pool> of_grpc ABSL_GUARDED_BY(mutex);
  int uses_of_grpc ABSL_GUARDED_BY(mutex) = 0;
};
Process& TheProcess() {
  static auto* process = new Process;
  return *process;
}

}  // namespace

std::shared_ptr<EventThreads::Pool> EventThreads::Pool::Get(int most) {
  Process& process = TheProcess();
  absl::MutexLock lock(&process.mutex);
  std::shared_ptr<Pool> pool = process.pool.lock();
  if (pool == nullptr) process.pool = pool = std::make_shared<Pool>();
  pool->AddThreads(most);
  return pool;
}

EventThreads::EventThreads(int most) : pool_(Pool::Get(most)) {
  CHECK(most >= 1 && most <= kMost) << most;
}
EventThreads::~EventThreads() = default;

int EventThreads::driving() const { return pool_->driving(); }

// In the place of gRPC's grpc::CompletionQueue::CallbackAlternativeCQ and
// ReleaseCallbackAlternativeCQ, which are private: a program's own symbols come before those of
// shared libraries, and before weak ones, which third_party/system.BUILD makes of gRPC's two.
grpc::CompletionQueue* TakeCallbackQueue() __asm__(
    "_ZN4grpc15CompletionQueue21CallbackAlternativeCQEv");
void GiveCallbackQueue(grpc::CompletionQueue* queue) __asm__(
    "_ZN4grpc15CompletionQueue28ReleaseCallbackAlternativeCQEPS0_");

grpc::CompletionQueue* TakeCallbackQueue() {
  Process& process = TheProcess();
  {
    absl::MutexLock lock(&process.mutex);
    process.of_grpc = process.pool.lock();
    if (process.of_grpc != nullptr) {
      ++process.uses_of_grpc;
      return process.of_grpc->queue();
    }
  }
  auto pool = EventThreads::Pool::Get(GrpcsCount());
  absl::MutexLock lock(&process.mutex);
  process.of_grpc = pool;
  ++process.uses_of_grpc;
  return pool->queue();
}

void GiveCallbackQueue(grpc::CompletionQueue*) {
  Process& process = TheProcess();
  std::shared_ptr<EventThreads::Pool> last;
  absl::MutexLock lock(&process.mutex);
  if (--process.uses_of_grpc == 0) last = std::move(process.of_grpc);
}

}  // namespace attnd
