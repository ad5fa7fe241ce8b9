// StreamWatch: cuts streamed calls whose peer is silent or too slow, so that nobody holds memory
// for nothing. A stream that waits for its peer has to move a byte within `idle`, and once it has
// waited for longer than that, min_bytes_per_second on average. Threads: any may add and remove;
// one of its own looks around, a few times within `idle`.
#pragma once

#include <atomic>
#include <cstdint>
#include <set>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"

namespace attnd {

struct StreamLimits {
  absl::Duration idle = absl::Seconds(10);
  int64_t min_bytes_per_second = int64_t{64} << 10;
};

// What one peer has moved since it was waited for. Any thread.
class StreamProgress {
 public:
  void Begin(absl::Time now);
  void Moved(int64_t bytes, absl::Time now);
  // Nobody waits for the peer.
  void Pause() { begin_nanos_ = kPaused; }

  // OK, or DEADLINE_EXCEEDED with reason STREAM_IDLE or STREAM_TOO_SLOW.
  absl::Status Check(const StreamLimits& limits, absl::Time now) const;

 private:
  static constexpr int64_t kPaused = INT64_MAX;
  std::atomic<int64_t> begin_nanos_{kPaused};
  std::atomic<int64_t> last_nanos_{0};
  std::atomic<int64_t> bytes_{0};
};

class WatchedStream {
 public:
  virtual ~WatchedStream() = default;
  StreamProgress& progress() { return progress_; }
  // Must not call back into the watch.
  // From the watch's thread.
  virtual void Cut(const absl::Status& status) = 0;

 private:
  StreamProgress progress_;
};

class StreamWatch {
 public:
  StreamWatch(const StreamLimits& limits, const Clock& clock);
  ~StreamWatch();

  void Add(WatchedStream& stream);
  // When it returns the watch holds the stream no more.
  void Remove(WatchedStream& stream);

 private:
  void Main();

  const StreamLimits limits_;
  const Clock& clock_;
  absl::Mutex mutex_;
  absl::CondVar stop_;
  std::set<WatchedStream*> streams_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace attnd
