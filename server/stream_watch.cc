#include "server/stream_watch.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/status_details.h"

namespace attnd {

void StreamProgress::Begin(absl::Time now) {
  bytes_ = 0;
  last_nanos_ = absl::ToUnixNanos(now);
  begin_nanos_ = absl::ToUnixNanos(now);
}

void StreamProgress::Moved(int64_t bytes, absl::Time now) {
  bytes_.fetch_add(bytes, std::memory_order_relaxed);
  last_nanos_.store(absl::ToUnixNanos(now), std::memory_order_relaxed);
}

absl::Status StreamProgress::Check(const StreamLimits& limits, absl::Time now) const {
  int64_t begin = begin_nanos_;
  if (begin == kPaused) return absl::OkStatus();
  absl::Duration silent = now - absl::FromUnixNanos(last_nanos_);
  if (silent > limits.idle) {
    std::string limit = absl::StrCat(absl::ToDoubleSeconds(limits.idle));
    return Failure(absl::StatusCode::kDeadlineExceeded, reason::kStreamIdle,
                   absl::StrCat("stream: nothing moved for more than ", limit, " s"),
                   {{"limit_seconds", limit}});
  }
  absl::Duration waited = now - absl::FromUnixNanos(begin) - limits.idle;
  if (waited <= absl::ZeroDuration()) return absl::OkStatus();
  double expected =
      absl::ToDoubleSeconds(waited) * static_cast<double>(limits.min_bytes_per_second);
  if (static_cast<double>(bytes_) >= expected) return absl::OkStatus();
  std::string limit = absl::StrCat(limits.min_bytes_per_second);
  return Failure(absl::StatusCode::kDeadlineExceeded, reason::kStreamTooSlow,
                 absl::StrCat("stream: expected at least ", limit, " bytes a second"),
                 {{"limit_bytes_per_second", limit}});
}

StreamWatch::StreamWatch(const StreamLimits& limits, const Clock& clock)
    : limits_(limits), clock_(clock), thread_([this] { Main(); }) {}

StreamWatch::~StreamWatch() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    stop_.Signal();
  }
  thread_.join();
}

void StreamWatch::Add(WatchedStream& stream) {
  absl::MutexLock lock(&mutex_);
  streams_.insert(&stream);
}

void StreamWatch::Remove(WatchedStream& stream) {
  absl::MutexLock lock(&mutex_);
  streams_.erase(&stream);
}

void StreamWatch::Main() {
  absl::MutexLock lock(&mutex_);
  while (!stopping_) {
    stop_.WaitWithTimeout(&mutex_, std::min(limits_.idle / 4, absl::Seconds(1)));
    absl::Time now = clock_.Now();
    for (WatchedStream* stream : streams_) {
      absl::Status status = stream->progress().Check(limits_, now);
      if (!status.ok()) stream->Cut(status);
    }
  }
}

}  // namespace attnd
