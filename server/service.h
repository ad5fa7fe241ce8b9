// AttentionService: the gRPC methods. Forward and Backward, unary (unary_call.h) or streamed
// (stream_call.h), take and give raw bytes, so that no tensor passes through protobuf; a reactor
// lives as long as its call, hands it over and returns. It owns nothing but the call. Threads:
// gRPC's.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "proto/attnd/v1/attention.grpc.pb.h"
#include "server/metrics.h"
#include "server/service_deps.h"

namespace attnd {

using RawMethods =
    v1::Attention::WithRawCallbackMethod_Forward<v1::Attention::WithRawCallbackMethod_Backward<
        v1::Attention::WithRawCallbackMethod_ForwardStream<
            v1::Attention::WithRawCallbackMethod_BackwardStream<v1::Attention::Service>>>>;
using AttentionServiceBase =
    v1::Attention::WithCallbackMethod_GetServerInfo<v1::Attention::WithCallbackMethod_RenewResidual<
        v1::Attention::WithCallbackMethod_ReleaseResidual<RawMethods>>>;
using RawStreamReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

class AttentionService final : public AttentionServiceBase {
 public:
  explicit AttentionService(const ServiceDeps& deps) : deps_(deps) {}

  grpc::ServerUnaryReactor* Forward(grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* request,
                                    grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* Backward(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* reply) override;
  RawStreamReactor* ForwardStream(grpc::CallbackServerContext* context) override;
  RawStreamReactor* BackwardStream(grpc::CallbackServerContext* context) override;
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
