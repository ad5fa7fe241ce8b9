#include "client/c/parked_thread.h"

#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace attnd {
namespace {

class ParkedThread;

// The threads that wait. Never destroyed: threads outlive static objects.
struct Lot {
  absl::Mutex mutex;
  std::vector<ParkedThread*> waiting ABSL_GUARDED_BY(mutex);
};

Lot& TheLot() {
  static Lot* lot = new Lot;
  return *lot;
}

class ParkedThread {
 public:
  void Start(std::function<void()> job) {
    Give(std::move(job));
    std::thread([this] { Work(); }).detach();
  }
  void Give(std::function<void()> job) {
    absl::MutexLock lock(&mutex_);
    job_ = std::move(job);
  }

 private:
  [[noreturn]] void Work() {
    for (;;) {
      std::function<void()> job;
      {
        absl::MutexLock lock(&mutex_);
        auto given = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return job_ != nullptr; };
        mutex_.Await(absl::Condition(&given));
        job = std::exchange(job_, nullptr);
      }
      job();
      job = nullptr;
      Lot& lot = TheLot();
      absl::MutexLock lock(&lot.mutex);
      lot.waiting.push_back(this);
    }
  }

  absl::Mutex mutex_;
  std::function<void()> job_ ABSL_GUARDED_BY(mutex_);
};

ParkedThread* TakeWaiting() {
  Lot& lot = TheLot();
  absl::MutexLock lock(&lot.mutex);
  if (lot.waiting.empty()) return nullptr;
  ParkedThread* thread = lot.waiting.back();
  lot.waiting.pop_back();
  return thread;
}

}  // namespace

void RunOnParkedThread(std::function<void()> job) {
  if (ParkedThread* thread = TakeWaiting()) {
    thread->Give(std::move(job));
  } else {
    (new ParkedThread)->Start(std::move(job));
  }
}

}  // namespace attnd
