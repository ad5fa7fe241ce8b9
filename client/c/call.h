// attnd_call: one operation of the C interface: its options, its cancellation, and what came of it.
// Runs on the caller's thread (Run) or on one of its own (Start, Wait). Cancel and GetProgress may
// be called at any time from any thread; the texts are read after the operation has ended.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>

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
  void SetResult(std::string json) { result_json_ = std::move(json); }

  const char* message() const { return message_.c_str(); }
  const char* detail_json() const { return detail_json_.c_str(); }
  const char* result_json() const { return result_json_.c_str(); }

 private:
  int Finish(const absl::Status& status);

  const std::string request_id_;
  const double timeout_seconds_;
  const int32_t priority_;
  std::stop_source stop_;
  std::thread thread_;
  std::string message_, detail_json_ = "{}", result_json_ = "{}";

  mutable absl::Mutex mutex_;
  int code_ ABSL_GUARDED_BY(mutex_) = ATTND_PENDING;
  attnd_progress progress_ ABSL_GUARDED_BY(mutex_) = {};
};
