#include "client/c/call.h"

#include <utility>

#include "absl/time/time.h"
#include "client/c/conversions.h"

attnd_call::attnd_call(std::string request_id, double timeout_seconds, int32_t priority)
    : request_id_(std::move(request_id)), timeout_seconds_(timeout_seconds), priority_(priority) {}

attnd_call::~attnd_call() {
  if (thread_.joinable()) thread_.join();
}

int attnd_call::Run(const Operation& operation) {
  result_json_ = "{}";
  return Finish(operation());
}

void attnd_call::Start(Operation operation) {
  if (thread_.joinable()) thread_.join();
  {
    absl::MutexLock lock(&mutex_);
    code_ = ATTND_PENDING;
  }
  thread_ = std::thread([this, operation = std::move(operation)] { Run(operation); });
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
  if (!status.ok()) result_json_ = "{}";
  absl::MutexLock lock(&mutex_);
  code_ = static_cast<int>(status.code());
  return code_;
}
