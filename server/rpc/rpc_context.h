// RpcContext: what every Forward and Backward does around its bytes, unary or streamed: who calls,
// is there room, which status goes out, and what metrics and log say when it is over. Its reactor
// owns one. Threads: the call's reactions, one at a time.
#pragma once

#include <grpcpp/server_context.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/rpc/call_room.h"
#include "server/rpc/service_deps.h"
#include "server/schedule/result.h"

namespace attnd {

class RpcContext {
 public:
  // `deps` and `context` outlive it.
  RpcContext(const ServiceDeps& deps, grpc::ServerContextBase& context, Direction direction,
             uint64_t id);

  const ServiceDeps& deps() const { return deps_; }
  Direction direction() const { return direction_; }
  absl::Time received_at() const { return received_at_; }
  uint64_t id() const { return id_; }
  const std::string& caller() const { return caller_; }  // once identified
  // `takes_long`: CallersMasks's; null when the call is decoded again.
  CallersMasks masks(bool* takes_long) const;

  // UNAUTHENTICATED when the caller is nobody.
  absl::Status Identify();
  // Once its first message is whole: room for what the call holds beside its tensors.
  absl::Status TakeRoom();
  absl::Status HoldRequest(int64_t object_bytes) { return room_.HoldRequest(object_bytes); }
  // Admits a decoded call and gives its tensors their places in staging memory.
  absl::StatusOr<AdmittedCall> Admit(AttentionCall call, ReplySink& sink, bool streamed);
  // Notes a call that is refused before Admit: its log line has the request's id all the same.
  void NoteRefused(const MessageBytes& message, ByteRange range);
  void Received(int64_t bytes);
  void Sent(int64_t bytes);
  void Landed(AdmittedCall& call, int64_t bytes);

  // The caller is gone, or its time is up: wherever the call is, it stops. Any thread, also when
  // gRPC has done with the call.
  void Cancel();
  // The status of a call whose caller went away, or whose time passed, while bytes were moved.
  absl::Status Stopped(WorkStage stage);
  // Notes how the call went; the status is the one to finish with.
  void Answered(const Result& result);
  grpc::Status Failed(const absl::Status& status);
  // Once the call has ended.
  void Close();

 private:
  bool Expired() const;
  absl::Status FindCapture(const AttentionCall& call, CallMemory& memory) const;
  void ReportStages(absl::Time now);
  void ExportSpan(absl::Time now);
  void Log(absl::Duration took, absl::string_view reason);

  const ServiceDeps& deps_;
  const OpenCalls::Call open_;
  grpc::ServerContextBase& context_;
  const Direction direction_;
  const uint64_t id_;
  const absl::Time received_at_, deadline_;
  const std::string peer_;  // its address
  const bool unix_socket_;
  const TraceContext trace_;
  CallRoom room_;
  std::string caller_, request_id_;
  absl::Status status_;
  CallTimes times_;
  CallerMetrics::Call used_;
  Priority priority_ = Priority::kNormal;
};

}  // namespace attnd
