// ReceiveMemory: who may be read while requests that arrive fill the memory that they may have.
//
//   below half of it             everybody
//   above                        who lacks little to the end of the messages that have begun, and
//                                who gets a promise: all that his messages lack, as far as seven
//                                eighths of the memory go, first come, first served among those of
//                                one address, whose messages get half of that unless it is one
//   who has waited for kPatience, or has not sent within it what he was promised
//                                his connection is reset, the oldest first, until three quarters
//                                are free
//
// So one message finds room beside connections that have begun many each, which never get a
// promise; beside a crowd with one each it waits for its turn. What a crowd holds falls again.
// gRPC's own limit (ResourceQuota) ends streams of whoever, and late; it is for what is no received
// slice.
//
// Threads: any; Start makes one that looks after those who wait.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace attnd {

class ReceiveMemory {
 public:
  // Of a connection: of its messages that have begun and not ended.
  struct Wants {
    int64_t lacking = 0;   // bytes that have not come
    int64_t begun = 0;     // bytes of them all
    int64_t finished = 0;  // bytes of its messages that have ended since it began
    uint64_t address = 0;  // whose it is
  };
  class Connection {
   public:
    virtual ~Connection() = default;
    // Asks MayRead, and is read if it may be. False: it has ended.
    virtual bool AskAgain(absl::Time now) = 0;
    // Ends it.
    struct Ended {
      int socket = -1;
      int64_t bytes = 0;  // that had come of messages that have begun and not ended
    };
    virtual Ended Reset() = 0;
  };
  // Tells of a connection that is reset, once a second at most, and how many were so far.
  using Listener = std::function<void(int socket, int64_t bytes, int64_t total)>;

  // `used` outlives it.
  ReceiveMemory(int64_t limit_bytes, const std::atomic<int64_t>& used, Listener on_reset)
      : limit_(limit_bytes), used_(used), on_reset_(std::move(on_reset)) {}
  ~ReceiveMemory() { Stop(); }

  // Who lacks no more is read as long as there is any memory.
  static constexpr int64_t kLittle = 64 << 10;
  static constexpr absl::Duration kPatience = absl::Seconds(5), kTick = absl::Milliseconds(100);

  bool IsShort() const { return used_ >= limit_ / 2; }
  // It begins.
  void Join(std::weak_ptr<Connection> connection);
  // Whether the connection may be read: to be asked while memory is short or it has a place in the
  // queue, which is 0 at first. Times: of any clock that does not go back.
  bool MayRead(int64_t& place, const Wants& wants, const std::weak_ptr<Connection>& connection,
               absl::Time now);
  // It goes out of the queue.
  void Leave(int64_t& place);

  // Has all connections ask, and resets those who have had their time.
  void Look(absl::Time now);
  // Looks every kTick while there is a queue. Stop lets everybody be read.
  void Start();
  void Stop();

  int64_t used() const { return used_; }
  int waiting();
  int64_t resets() const { return resets_; }

 private:
  struct Entry {
    std::weak_ptr<Connection> connection;
    int64_t due = 0;  // finished bytes with which all is over that had begun at first
    int64_t lacking = 0, promised = 0;
    bool waits = true;
    absl::Time until;  // its time
    uint64_t address = 0;
    int64_t begun = 0;
  };
  using Queue = std::map<int64_t, Entry>;

  int64_t promises_end() const { return limit_ / 8 * 7; }
  bool IsNext(const Queue::value_type& entry) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Promise(Entry& entry, int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Drop(int64_t place) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<std::shared_ptr<Connection>> Due(absl::Time now);
  bool ForgetOld(absl::Time now);
  void Run();

  const int64_t limit_;
  const std::atomic<int64_t>& used_;
  const Listener on_reset_;
  std::atomic<int64_t> resets_{0};
  absl::Mutex mutex_;
  std::vector<std::weak_ptr<Connection>> connections_ ABSL_GUARDED_BY(mutex_);
  size_t most_ ABSL_GUARDED_BY(mutex_) = 64;  // of them, before those that are gone go
  Queue queue_ ABSL_GUARDED_BY(mutex_);
  int64_t last_place_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t promised_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time short_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // when it was at last
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  absl::CondVar changed_;
  // Look's.
  absl::Time told_ = absl::InfinitePast();
  bool trims_ = false;  // what those who were reset gave back
  std::thread thread_;
};

}  // namespace attnd
