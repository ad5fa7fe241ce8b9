// SmallCall: a unary call that carries no tensors, from its arrival until gRPC has done with it. It
// holds its room, and its peer is watched, to the last byte of the reply.
// Threads: Begin and Finish one after the other, by whoever handles the call; it deletes itself.
#pragma once

#include <google/protobuf/message.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/rpc/call_room.h"
#include "server/rpc/call_watch.h"
#include "server/rpc/service_deps.h"

namespace attnd {

class SmallCall final : public grpc::ServerUnaryReactor, public WatchedCall {
 public:
  // All outlive it. `reply` is gRPC's.
  SmallCall(const ServiceDeps& deps, grpc::CallbackServerContext& context, Method method,
            CallCost cost, grpc::ByteBuffer& reply);

  // UNAUTHENTICATED, that there is no room for the call, or that `request`, gRPC's, is cut off.
  absl::Status Begin(const grpc::ByteBuffer& request);
  const std::string& caller() const { return caller_; }  // once it has begun
  // As DecodeSmall, of what it has begun with.
  absl::Status Decode(google::protobuf::Message& request);
  // Last; the handler touches the call no more.
  void Finish(absl::StatusOr<grpc::ByteBuffer> reply);

  void OnDone() override;
  void Cut(const absl::Status& status) override;  // the watch's

 private:
  const ServiceDeps& deps_;
  const OpenCalls::Call open_;
  grpc::CallbackServerContext& context_;
  const Method method_;
  const grpc::ByteBuffer* request_ = nullptr;
  grpc::ByteBuffer& reply_;
  const absl::Time began_;
  CallRoom room_;
  std::string caller_;
  absl::Status status_;
  absl::Status cut_;  // the watch's, until the call is removed from it
};

}  // namespace attnd
