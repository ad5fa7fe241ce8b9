// attnd_call: one operation of the C interface: its options, its cancellation, and what came of it.
// Runs on the caller's thread (Run) or on one of the library's (Start, Wait). Cancel and
// GetProgress may be called at any time from any thread; the texts are read after the operation has
// ended.
#pragma once

#include <functional>
#include <stop_token>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "client/c/attnd_client.h"
#include "client/cpp/attention_client.h"

struct attnd_call {
 public:
  using Operation = std::function<absl::Status()>;

  attnd_call(std::string request_id, double timeout_seconds, int32_t priority);
  ~attnd_call();  // waits for what Start started
  attnd_call(const attnd_call&) = delete;
  attnd_call& operator=(const attnd_call&) = delete;

  int Run(const Operation& operation);
  void Start(Operation operation);
  int Wait(double seconds);  // ATTND_PENDING when it has not ended in time
  void Cancel();
  attnd_progress GetProgress() const;

  attnd::CallOptions MakeCallOptions();
  // What result_json() gives; `json` runs when it is first asked for, since few callers do.
  void SetResult(std::function<std::string()> json) { make_result_json_ = std::move(json); }

  const char* message() const { return message_.c_str(); }
  const char* detail_json() const { return detail_json_.c_str(); }
  const char* result_json();

 private:
  int Finish(const absl::Status& status);
  bool IsIdle() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !started_ || code_ != ATTND_PENDING;
  }

  const std::string request_id_;
  const double timeout_seconds_;
  const int32_t priority_;
  std::stop_source stop_;
  std::string message_, detail_json_ = "{}";
  std::function<std::string()> make_result_json_;

  mutable absl::Mutex mutex_;
  int code_ ABSL_GUARDED_BY(mutex_) = ATTND_PENDING;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  std::string result_json_ ABSL_GUARDED_BY(mutex_);
  attnd_progress progress_ ABSL_GUARDED_BY(mutex_) = {};
};
