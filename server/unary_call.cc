#include "server/unary_call.h"

#include <memory>
#include <optional>
#include <utility>

#include "base/status_macros.h"
#include "server/call_record.h"
#include "server/decode.h"
#include "server/encode.h"
#include "server/landing.h"

namespace attnd {
namespace {

class UnaryCall final : public grpc::ServerUnaryReactor, public ReplySink {
 public:
  UnaryCall(const ServiceDeps& deps, grpc::CallbackServerContext& context, grpc::ByteBuffer& reply,
            Direction direction, uint64_t id)
      : record_(deps, context, direction, id), reply_(reply) {}

  // Called once, from the method's handler; gRPC calls nothing here before that has returned, so
  // OnCancel finds the call submitted.
  void Start(const grpc::ByteBuffer& request) {
    if (!request.Valid()) record_.NoRequest();
    absl::StatusOr<AdmittedCall> call = Accept(request);
    // gRPC's own reference to the request would keep its slices until the end of the call.
    const_cast<grpc::ByteBuffer&>(request).Clear();
    if (!call.ok()) return Finish(record_.Failed(call.status()));
    record_.deps().worker.Submit(*std::move(call));
  }

  void OnResult(absl::StatusOr<Result> result) override {
    if (!result.ok()) return Finish(record_.Failed(result.status()));
    int64_t bytes = result->call().output_bytes() - result->call().shared_output_bytes();
    if (bytes <= kReplyBytesAtOnce) return Send(*std::move(result));
    // shared_ptr: std::function wants what it holds to be copyable.
    auto shared = std::make_shared<Result>(*std::move(result));
    record_.deps().reply_threads.Run([this, shared] { Send(std::move(*shared)); });
  }

 private:
  absl::StatusOr<AdmittedCall> Accept(const grpc::ByteBuffer& request) {
    record_.Received(static_cast<int64_t>(request.Length()));
    RETURN_IF_ERROR(record_.Identify());
    ASSIGN_OR_RETURN(AttentionCall decoded,
                     Decoder::Decode(MessageBytes(request), record_.direction()));
    ASSIGN_OR_RETURN(AdmittedCall call, record_.Admit(std::move(decoded), *this, false));
    record_.Landed(call, Land(call));
    return call;
  }

  void Send(Result result) {
    const ServiceDeps& deps = record_.deps();
    record_.Answered(result);
    Reply reply = Encode(std::move(result), deps.engine, deps.clock.Now());
    record_.Sent(static_cast<int64_t>(reply.bytes.Length()));
    reply_.Swap(&reply.bytes);
    Finish(grpc::Status::OK);  // nothing of this object may be touched after it
  }

  void OnCancel() override { record_.Cancel(); }

  // gRPC would wake a thread of its executor for OnDone and OnCancel; here they take less time than
  // that. (gRPC 1.51 keeps this for its own reactors, "with trivial reactions".)
  bool InternalInlineable() override { return true; }

  void OnDone() override {
    record_.Close();
    delete this;
  }

  CallRecord record_;
  grpc::ByteBuffer& reply_;
};

}  // namespace

grpc::ServerUnaryReactor* StartUnaryCall(const ServiceDeps& deps,
                                         grpc::CallbackServerContext& context,
                                         const grpc::ByteBuffer& request, grpc::ByteBuffer& reply,
                                         Direction direction, uint64_t id) {
  auto* call = new UnaryCall(deps, context, reply, direction, id);
  call->Start(request);
  return call;
}

}  // namespace attnd
