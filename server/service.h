// AttentionService: the gRPC methods. Forward and Backward take and give raw bytes, so that no
// tensor passes through protobuf; a reactor lives as long as its call, hands it over and returns.
// It owns nothing but the call. Threads: gRPC's.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/log.h"
#include "proto/attnd/v1/attention.grpc.pb.h"
#include "server/admission.h"
#include "server/auth.h"
#include "server/device_worker.h"
#include "server/lease_table.h"
#include "server/metrics.h"
#include "server/reply_threads.h"
#include "server/staging_pool.h"

namespace attnd {

// At most kLinesPerSecond lines about failed calls a second, so that a caller who repeats a mistake
// cannot fill the disk; the next line that is written tells how many were left out. Any thread.
class CallLogLimit {
 public:
  static constexpr int64_t kLinesPerSecond = 20;
  // Lines left out since the last one, or nothing when this one is too many.
  std::optional<int64_t> Take(absl::Time now);

 private:
  absl::Mutex mutex_;
  int64_t second_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t lines_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

// What the service uses and does not own; all outlive it.
struct ServiceDeps {
  Admission& admission;
  StagingPool& staging;
  DeviceWorker& worker;
  LeaseTable& leases;
  ReplyThreads& reply_threads;
  Metrics& metrics;
  const Authenticator& auth;
  const Clock& clock;
  Logger& log;
  const BackendInfo& engine;
  const v1::GetServerInfoResponse& server_info;
  absl::Duration slow_call;
  CallLogLimit& log_limit;
};

using AttentionServiceBase = v1::Attention::WithRawCallbackMethod_Forward<
    v1::Attention::WithRawCallbackMethod_Backward<v1::Attention::WithCallbackMethod_GetServerInfo<
        v1::Attention::WithCallbackMethod_RenewResidual<
            v1::Attention::WithCallbackMethod_ReleaseResidual<v1::Attention::Service>>>>>;

class AttentionService final : public AttentionServiceBase {
 public:
  explicit AttentionService(const ServiceDeps& deps) : deps_(deps) {}

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* Backward(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* reply) override;
  grpc::ServerUnaryReactor* RenewResidual(grpc::CallbackServerContext* context,
                                          const v1::RenewResidualRequest* request,
                                          v1::RenewResidualResponse* reply) override;
  grpc::ServerUnaryReactor* ReleaseResidual(grpc::CallbackServerContext* context,
                                            const v1::ReleaseResidualRequest* request,
                                            v1::ReleaseResidualResponse* reply) override;

 private:
  // Answers a small call with what `work(caller)` says.
  grpc::ServerUnaryReactor* AnswerSmall(
      grpc::CallbackServerContext* context, Method method,
      const std::function<absl::Status(const std::string& caller)>& work);

  const ServiceDeps deps_;
  std::atomic<uint64_t> next_id_{1};
};

}  // namespace attnd
