#include "client/c/call.h"

#include <utility>

#include "absl/time/time.h"
#include "client/c/conversions.h"
#include "client/c/parked_thread.h"

attnd_call::attnd_call(std::string request_id, double timeout_seconds, int32_t priority)
    : request_id_(std::move(request_id)), timeout_seconds_(timeout_seconds), priority_(priority) {}

attnd_call::~attnd_call() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &attnd_call::IsIdle));
}

int attnd_call::Run(const Operation& operation) {
  make_result_json_ = nullptr;
  return Finish(operation());
}

void attnd_call::Start(Operation operation) {
  {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &attnd_call::IsIdle));
    started_ = true;
    code_ = ATTND_PENDING;
  }
  attnd::RunOnParkedThread([this, operation = std::move(operation)] { Run(operation); });
}

const char* attnd_call::result_json() {
  absl::MutexLock lock(&mutex_);
  if (result_json_.empty()) result_json_ = make_result_json_ ? make_result_json_() : "{}";
  return result_json_.c_str();
}

int attnd_call::Wait(double seconds) {
  absl::MutexLock lock(&mutex_);
  auto ended = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return code_ != ATTND_PENDING; };
  mutex_.AwaitWithTimeout(absl::Condition(&ended), absl::Seconds(seconds));
  return code_;
}

void attnd_call::Cancel() { stop_.request_stop(); }

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
  options.stop = stop_.get_token();
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
  absl::MutexLock lock(&mutex_);
  result_json_.clear();
  code_ = static_cast<int>(status.code());
  return code_;
}
