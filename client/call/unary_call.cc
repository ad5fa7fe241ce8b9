#include "client/call/unary_call.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/async_unary_call.h>
#include <grpcpp/support/slice.h>

#include "base/status_macros.h"
#include "client/call/poll_hook.h"
#include "client/channels/grpc_status.h"

namespace attnd {
namespace {

absl::StatusOr<std::string> CallBytes(const ClientCore& core, int address,
                                      const std::string& method, const std::string& request,
                                      absl::Time deadline, const CallOptions& options) {
  CompletionQueues::Borrowed borrowed(core.queues);
  grpc::ClientContext context;
  PrepareContext(core.options, deadline, context);
  grpc::Slice slice(request);
  grpc::GenericStub stub(core.connections.Of(address)->channel());
  auto reader =
      stub.PrepareUnaryCall(&context, method, grpc::ByteBuffer(&slice, 1), &borrowed.queue());
  grpc::ByteBuffer reply;
  grpc::Status status;
  reader->StartCall();
  reader->Finish(&reply, &status, &context);
  std::stop_callback cancel(options.stop, [&context] { context.TryCancel(); });
  PollHook poll_hook(options.poll_hook);
  void* tag;
  bool ok;
  while (borrowed.queue().AsyncNext(&tag, &ok,
                                    absl::ToChronoTime(absl::Now() + PollHook::kInterval)) !=
         grpc::CompletionQueue::GOT_EVENT) {
    poll_hook.Poll();
  }
  RETURN_IF_ERROR(core.connections.NameProxy(FromGrpc(status)));
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (reply.Valid() && reply.Dump(&slices).ok()) {
    for (const grpc::Slice& s : slices) {
      bytes.append(reinterpret_cast<const char*>(s.begin()), s.size());
    }
  }
  return bytes;
}

}  // namespace

absl::Status CallUnary(const ClientCore& core, int address, const std::string& method,
                       const std::string& request, absl::Time deadline, const CallOptions& options,
                       google::protobuf::MessageLite& reply) {
  ASSIGN_OR_RETURN(std::string bytes, CallBytes(core, address, method, request, deadline, options));
  if (reply.ParseFromString(bytes)) return absl::OkStatus();
  return absl::DataLossError("reply: cannot be parsed");
}

absl::StatusOr<Health> CallHealthCheck(const ClientCore& core, int address, absl::Time deadline,
                                       const CallOptions& options) {
  ASSIGN_OR_RETURN(std::string bytes,
                   CallBytes(core, address, "/grpc.health.v1.Health/Check", "", deadline, options));
  // HealthCheckResponse{ServingStatus status = 1}, SERVING = 1.
  return bytes == std::string("\x08\x01", 2) ? Health::kServing : Health::kNotServing;
}

}  // namespace attnd
