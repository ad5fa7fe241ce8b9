// CallerMetrics: what each caller uses, for the first kMaxCallers that come; the rest is "other".
// The only series made and looked up on the request path, once a call at its end. Any thread.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/registry.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace attnd {

class CallerMetrics {
 public:
  static constexpr size_t kMaxCallers = 64;
  static constexpr size_t kMaxNameBytes = 64;

  struct Call {
    bool ok = false;
    int64_t received_bytes = 0, sent_bytes = 0;  // payload, shared memory included
    absl::Duration compute;                      // its part of the launch's kernels
  };

  explicit CallerMetrics(prometheus::Registry& registry);
  // `caller` is cut to kMaxNameBytes; what is not printable ASCII in it becomes "_".
  void CallEnded(absl::string_view caller, const Call& call);

 private:
  using Family = prometheus::Family<prometheus::Counter>;
  struct Series {
    prometheus::Counter *ok, *error, *received, *sent, *compute;  // owned by the registry
  };
  const Series& SeriesOf(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Family &requests_, &bytes_, &compute_seconds_;
  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Series> callers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd
