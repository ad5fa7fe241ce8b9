// SpanExport: spans of calls whose callers sample them, to a collector by OTLP over HTTP, as JSON.
//
//     Add → at most kMostWaiting → a thread: every kPeriod at most kMostAtOnce in one POST
//
// A call waits for nothing of it: what finds no room, or a collector that is slow or gone, is
// dropped and counted. Source: OpenTelemetry Protocol 1.x, ExportTraceServiceRequest.
// Threads: any may Add; one thread makes and destroys it, which takes kTimeout at most.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/metrics/trace_context.h"

namespace attnd {

// One call: a span of the daemon, child of the caller's, with a child for each stage. Times are
// steady (base/clock.h); Add tells them by the system's clock.
struct CallSpan {
  struct Stage {
    const char* name;
    absl::Time begin, end;
  };
  TraceContext trace;
  std::string name;
  absl::Time begin, end;
  std::vector<Stage> stages;
  std::vector<std::pair<std::string, std::string>> attributes;
  bool ok = true;
  std::string error;  // unless ok
};

class SpanExport {
 public:
  static constexpr size_t kMostWaiting = 4096, kMostAtOnce = 512;
  static constexpr absl::Duration kPeriod = absl::Seconds(1);
  static constexpr absl::Duration kTimeout = absl::Seconds(3);  // of one POST

  // OK for "http://host:port", to which /v1/traces is added; else INVALID_ARGUMENT.
  static absl::Status CheckEndpoint(const std::string& endpoint);
  // Errors: CheckEndpoint's.
  static absl::StatusOr<std::unique_ptr<SpanExport>> Start(const std::string& endpoint,
                                                           const std::string& version);
  ~SpanExport();

  void Add(CallSpan span);
  int64_t exported() const { return exported_; }  // spans of calls
  int64_t dropped() const { return dropped_; }

 private:
  SpanExport(std::string host, std::string port, std::string version)
      : host_(std::move(host)), port_(std::move(port)), version_(std::move(version)) {}
  void Main();

  const std::string host_, port_, version_;
  std::atomic<int64_t> exported_{0}, dropped_{0};
  absl::Mutex mutex_;
  std::deque<CallSpan> waiting_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// The whole document; ids of spans are drawn at random.
std::string OtlpJson(const std::vector<CallSpan>& spans, const std::string& version);

}  // namespace attnd
