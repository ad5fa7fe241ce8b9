// EarlyStart: begins to compute a streamed call while the rest of it still arrives. Payloads come
// in the order k, v, q (backward: then lse, o, d_o), so that as the last one's bytes come the
// call's parts (call_parts.h) become whole one after the other. What is whole is launched as soon
// as the device has nothing else to do and the bytes still to come, at the rate of those that have,
// take long enough: under load a call is computed in one launch. No launch ever waits for bytes.
//
// One launch of a call at a time; `hold` and `release` are called before and after each, and
// between them the call and this object stay. Any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <stop_token>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "server/admission.h"
#include "server/call_parts.h"
#include "server/workers.h"

namespace attnd {

class EarlyStart {
 public:
  // `last`: the payload that comes last. Once `stop` is requested nobody wants the result.
  EarlyStart(AdmittedCall& call, Tensor last, Workers& workers, const Clock& clock,
             std::stop_token stop, std::function<void()> hold, std::function<void()> release);

  // A chunk of `bytes` begins to land; with it `of_last` bytes of the last payload have come.
  void ChunkLands(int64_t bytes, int64_t of_last);
  void ChunkLanded();
  // Nothing more comes: no further launch.
  void End();

 private:
  // Until everything is there.
  absl::Duration ExpectedArrival() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LaunchWhatIsWhole();
  void OnComputed(int64_t end);

  AdmittedCall& call_;
  const CallParts parts_;
  const Tensor last_;
  int64_t bytes_ = 0;  // of all payloads
  Workers& workers_;
  const Clock& clock_;
  const absl::Time begin_;
  const std::stop_token stop_;
  const std::function<void()> hold_, release_;
  absl::Mutex mutex_;
  int landing_ ABSL_GUARDED_BY(mutex_) = 0;  // chunks
  int64_t received_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t of_last_ ABSL_GUARDED_BY(mutex_) = 0;  // received, of the last payload
  int64_t landed_ ABSL_GUARDED_BY(mutex_) = 0;   // of it, without gaps
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace attnd
