// attnd_call: one operation of the C interface: its options, its cancellation, and what came of it.
// Cancel and GetProgress may be called at any time from any thread; the texts are read after the
// operation has ended.
#pragma once

#include <functional>
#include <stop_token>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "client/attention_client.h"
#include "client/c/attnd_client.h"

struct attnd_call {
 public:
  using Operation = std::function<absl::Status()>;

  attnd_call(std::string request_id, double timeout_seconds, int32_t priority);
  attnd_call(const attnd_call&) = delete;
  attnd_call& operator=(const attnd_call&) = delete;

  // Returns the code; what `operation` throws is INTERNAL.
  int Run(const Operation& operation);
  void Cancel();
  void SetPollHook(int (*hook)(void*), void* argument);
  void SetTraceparent(std::string traceparent) { traceparent_ = std::move(traceparent); }
  attnd_progress GetProgress() const;

  attnd::CallOptions MakeCallOptions();
  // Sets what result_json() gives; `json` runs when it is first asked for, since few callers do.
  void SetResult(std::function<std::string()> json) { make_result_json_ = std::move(json); }

  int code() const { return code_; }
  const char* message() const { return message_.c_str(); }
  const char* detail_json() const { return detail_json_.c_str(); }
  const char* result_json();

 private:
  int Finish(const absl::Status& status);

  const std::string request_id_;
  const double timeout_seconds_;
  const int32_t priority_;
  std::string traceparent_;
  std::stop_source stop_;
  int code_ = ATTND_OK;
  std::string message_, detail_json_ = "{}";
  std::function<std::string()> make_result_json_;
  std::string result_json_;
  std::function<void()> poll_hook_;

  mutable absl::Mutex mutex_;
  attnd_progress progress_ ABSL_GUARDED_BY(mutex_) = {};
};
