#include "client/c/call.h"

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "client/c/conversions.h"

attnd_call::attnd_call(std::string request_id, double timeout_seconds, int32_t priority)
    : request_id_(std::move(request_id)), timeout_seconds_(timeout_seconds), priority_(priority) {}

int attnd_call::Run(const Operation& operation) {
  make_result_json_ = nullptr;
  try {
    return Finish(operation());
  } catch (const std::exception& error) {
    return Finish(absl::InternalError(absl::StrCat("client library: ", error.what())));
  }
}

const char* attnd_call::result_json() {
  if (result_json_.empty()) result_json_ = make_result_json_ ? make_result_json_() : "{}";
  return result_json_.c_str();
}

void attnd_call::Cancel() { stop_.request_stop(); }

void attnd_call::SetPollHook(int (*hook)(void*), void* argument) {
  poll_hook_ = [this, hook, argument] {
    if (hook(argument) != 0) Cancel();
  };
}

attnd_progress attnd_call::GetProgress() const {
  absl::MutexLock lock(&mutex_);
  return progress_;
}

attnd::CallOptions attnd_call::MakeCallOptions() {
  attnd::CallOptions options;
  if (timeout_seconds_ >= 0) options.timeout = absl::Seconds(timeout_seconds_);
  if (priority_ != ATTND_PRIORITY_DEFAULT) {
    options.priority = static_cast<attnd::CallPriority>(priority_);
  }
  options.request_id = request_id_;
  options.traceparent = traceparent_;
  options.stop = stop_.get_token();
  options.poll_hook = poll_hook_;
  options.progress = [this](const attnd::Progress& at) {
    absl::MutexLock lock(&mutex_);
    progress_ = {at.shards_done, at.shards_total, at.bytes_sent, at.bytes_received, at.bytes_total};
  };
  return options;
}

int attnd_call::Finish(const absl::Status& status) {
  message_ = std::string(status.message());
  detail_json_ = attnd::DetailJson(status);
  if (!status.ok()) make_result_json_ = nullptr;
  result_json_.clear();
  return code_ = static_cast<int>(status.code());
}
