// Calls and answers for tests of the stages behind Decode, without gRPC.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/check.h"
#include "server/admission.h"
#include "server/attention_tensors.h"
#include "server/decode.h"
#include "server/landing.h"
#include "server/result.h"
#include "tests/sliced_buffer.h"
#include "tests/wire_request.h"

namespace attnd {

// As the service decodes it.
template <class Request>
AttentionCall DecodedRequest(const Request& request, Direction direction) {
  absl::StatusOr<AttentionCall> call =
      Decoder::Decode(MessageBytes(InSlices({request.SerializeAsString()})), direction);
  CHECK(call.ok()) << call.status();
  return *std::move(call);
}

// A decoded forward call.
inline AttentionCall DecodedCall(const Problem& problem, Priority priority = Priority::kNormal,
                                 uint64_t seed = 1) {
  v1::ForwardRequest request = MakeForward(problem, seed);
  request.mutable_options()->set_priority(
      static_cast<v1::Priority>(static_cast<int>(priority) + 1));
  return DecodedRequest(request, Direction::kForward);
}

// Its payloads in staging memory, as the service does before it submits a call.
inline AdmittedCall Landed(absl::StatusOr<AdmittedCall> call, StagingPool& staging) {
  CHECK(call.ok()) << call.status();
  CHECK(TakePlaces(*call, staging).ok());
  Land(*call);
  call->staged().landed_at = absl::Now();
  return *std::move(call);
}

// Keeps one answer and lets a test wait for it.
class KeptAnswer final : public ReplySink {
 public:
  void OnResult(absl::StatusOr<Result> result) override {
    std::lock_guard<std::mutex> lock(mutex_);
    ++answers_;
    status_ = result.status();
    if (result.ok()) result_.emplace(*std::move(result));
    changed_.notify_all();
  }
  const absl::Status& Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return answers_ > 0; });
    return status_;
  }
  int answers() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return answers_;
  }
  Result& result() { return *result_; }
  void DropResult() { result_.reset(); }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int answers_ = 0;
  absl::Status status_;
  std::optional<Result> result_;
};

}  // namespace attnd
