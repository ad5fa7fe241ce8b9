#include "server/rpc/small_call.h"

#include <utility>

#include "base/status_macros.h"
#include "server/call/status_details.h"
#include "server/rpc/load_report.h"
#include "server/rpc/server_context.h"
#include "server/wire/decode_small.h"
#include "server/wire/reply_slices.h"

namespace attnd {

SmallCall::SmallCall(const ServiceDeps& deps, grpc::CallbackServerContext& context, Method method,
                     CallCost cost, grpc::ByteBuffer& reply)
    : WatchedCall(deps.clock),
      deps_(deps),
      open_(deps.calls.open()),
      context_(context),
      method_(method),
      reply_(reply),
      began_(deps.clock.Now()),
      room_(deps.calls.call_bytes(), cost) {
  deps_.metrics.CallStarted(method_);
  progress()->CallBegan(began_);
  deps_.calls.watch().Add(*this);
}

absl::Status SmallCall::Begin(const grpc::ByteBuffer& request) {
  request_ = &request;
  const std::string peer = context_.peer();
  absl::StatusOr<std::string> caller = deps_.auth.Identify(context_, peer);
  if (!caller.ok()) {
    deps_.metrics.AuthFailed(ReasonOf(caller.status()));
    return caller.status();
  }
  caller_ = *std::move(caller);
  RETURN_IF_ERROR(room_.Take({caller_, CallerOfPeer(peer)}));
  return CheckWhole(request);
}

absl::Status SmallCall::Decode(google::protobuf::Message& request) {
  return DecodeSmall(
      *request_, [this](int64_t bytes) { return room_.HoldRequest(bytes); }, request);
}

void SmallCall::Finish(absl::StatusOr<grpc::ByteBuffer> reply) {
  status_ = reply.status();
  if (status_.ok()) status_ = room_.HoldReply(static_cast<int64_t>(reply->Length()));
  if (status_.ok()) {
    grpc::ByteBuffer message = WithProgress(*reply, progress());
    reply_.Swap(&message);
  }
  AddPushback(status_, context_);
  if (!caller_.empty()) AddQueue(deps_.calls, context_);
  progress()->Begin();
  grpc::ServerUnaryReactor::Finish(ToGrpcStatus(status_));
}

void SmallCall::OnDone() {
  deps_.calls.watch().Remove(*this);  // cut_ does not change from here on
  const absl::Status& status = cut_.ok() ? status_ : cut_;
  deps_.metrics.CallFinished(method_, status.code(), ReasonOf(status), deps_.clock.Now() - began_);
  delete this;
}

// The peer does not read the reply, so it would not read a status either.
void SmallCall::Cut(const absl::Status& status) {
  if (!cut_.ok()) return;
  cut_ = status;
  deps_.metrics.CallCut(method_, WorkStage::kSend, ReasonOf(status));
  context_.TryCancel();
}

}  // namespace attnd
