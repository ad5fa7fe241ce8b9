// AttentionService: the gRPC methods. All take and give raw bytes: Forward and Backward, unary
// (unary_calls.h) or streamed (stream_call.h), so that no tensor passes through protobuf, the
// others so that bytes which are no message get an answer of ours (decode_small.h). Unary Forward
// and Backward come from completion queues, the other methods by gRPC's callbacks. A reactor lives
// as long as its call and owns nothing else. Threads: gRPC's.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/attnd/v1/attention.grpc.pb.h"
#include "server/keep/lease_table.h"
#include "server/metrics/metrics.h"
#include "server/rpc/service_deps.h"
#include "server/rpc/small_call.h"

namespace attnd {

using RawCalls = v1::Attention::WithRawMethod_Forward<
    v1::Attention::WithRawMethod_Backward<v1::Attention::WithRawCallbackMethod_ForwardStream<
        v1::Attention::WithRawCallbackMethod_BackwardStream<v1::Attention::Service>>>>;
using AttentionServiceBase = v1::Attention::WithRawCallbackMethod_GetServerInfo<
    v1::Attention::WithRawCallbackMethod_RenewResidual<
        v1::Attention::WithRawCallbackMethod_ReleaseResidual<
            v1::Attention::WithRawCallbackMethod_CompileMask<
                v1::Attention::WithRawCallbackMethod_BuildPattern<
                    v1::Attention::WithRawCallbackMethod_ReleaseCapture<RawCalls>>>>>>;
using RawStreamReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

class AttentionService final : public AttentionServiceBase {
 public:
  explicit AttentionService(const ServiceDeps& deps) : deps_(deps) {}

  const ServiceDeps& deps() const { return deps_; }
  uint64_t NextId() { return next_id_++; }
  // Asks `queue` for the next Forward or Backward; it comes with `tag`, its fields filled.
  void Request(Direction direction, grpc::ServerContext& context, grpc::ByteBuffer& request,
               grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>& responder,
               grpc::ServerCompletionQueue& queue, void* tag);

  RawStreamReactor* ForwardStream(grpc::CallbackServerContext* context) override;
  RawStreamReactor* BackwardStream(grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* RenewResidual(grpc::CallbackServerContext* context,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* CompileMask(grpc::CallbackServerContext* context,
                                        const grpc::ByteBuffer* request,
                                        grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* BuildPattern(grpc::CallbackServerContext* context,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* ReleaseCapture(grpc::CallbackServerContext* context,
                                           const grpc::ByteBuffer* request,
                                           grpc::ByteBuffer* reply) override;
  grpc::ServerUnaryReactor* ReleaseResidual(grpc::CallbackServerContext* context,
                                            const grpc::ByteBuffer* request,
                                            grpc::ByteBuffer* reply) override;

 private:
  // Computes a small call: its reply, or why there is none.
  using SmallWork = std::function<absl::StatusOr<grpc::ByteBuffer>(SmallCall& call)>;
  grpc::ServerUnaryReactor* AnswerSmall(grpc::CallbackServerContext* context, Method method,
                                        const grpc::ByteBuffer& request, grpc::ByteBuffer* reply,
                                        const SmallWork& work);
  // The same for what takes long, on a thread of MaskWorkers.
  grpc::ServerUnaryReactor* AnswerLong(grpc::CallbackServerContext* context, Method method,
                                       const grpc::ByteBuffer& request, grpc::ByteBuffer* reply,
                                       SmallWork work);
  absl::StatusOr<LeaseGrant> Renew(SmallCall& call);
  absl::Status Release(SmallCall& call);

  const ServiceDeps deps_;
  std::atomic<uint64_t> next_id_{1};
};

}  // namespace attnd
