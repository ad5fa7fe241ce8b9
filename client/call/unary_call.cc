#include "client/call/unary_call.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/async_unary_call.h>
#include <grpcpp/support/slice.h>

#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/status_macros.h"
#include "client/call/poll_hook.h"
#include "client/channels/grpc_status.h"
#include "client/channels/grpc_time.h"

namespace attnd {
namespace {

struct OneUnary {
  int address = 0;
  std::shared_ptr<Connection> connection;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> reader;
  grpc::ByteBuffer reply;
  grpc::Status status;
};

absl::StatusOr<std::string> BytesOf(const ClientCore& core, const OneUnary& ended, bool by_caller) {
  RETURN_IF_ERROR(core.connections.StatusOf(*ended.connection, FromGrpc(ended.status), by_caller));
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (ended.reply.Valid() && ended.reply.Dump(&slices).ok()) {
    for (const grpc::Slice& s : slices) {
      bytes.append(reinterpret_cast<const char*>(s.begin()), s.size());
    }
  }
  return bytes;
}

absl::StatusOr<std::string> CallBytes(const ClientCore& core, int address,
                                      const std::string& method, const std::string& request,
                                      absl::Time deadline, const CallOptions& options,
                                      const CallMetadata& metadata = {}) {
  return std::move(CallEach(core, {address}, method, request, deadline, options, metadata).front());
}

}  // namespace

std::vector<absl::StatusOr<std::string>> CallEach(const ClientCore& core,
                                                  const std::vector<int>& addresses,
                                                  const std::string& method,
                                                  const std::string& request, absl::Time deadline,
                                                  const CallOptions& options,
                                                  const CallMetadata& metadata) {
  std::vector<std::shared_ptr<Connection>> connections;
  for (int address : addresses) connections.push_back(core.connections.Of(address));
  return CallOverEach(core, connections, method, request, deadline, options, metadata);
}

std::vector<absl::StatusOr<std::string>> CallOverEach(
    const ClientCore& core, const std::vector<std::shared_ptr<Connection>>& connections,
    const std::string& method, const std::string& request, absl::Time deadline,
    const CallOptions& options, const CallMetadata& metadata) {
  CompletionQueues::Borrowed borrowed(core.queues);
  grpc::Slice slice(request);
  std::deque<OneUnary> calls;
  for (const std::shared_ptr<Connection>& connection : connections) {
    OneUnary& one = calls.emplace_back();
    one.address = connection->address_index();
    one.connection = connection;
    PrepareContext(core.options, deadline, options.traceparent, one.context);
    for (const auto& [key, value] : metadata) one.context.AddMetadata(key, value);
    grpc::GenericStub stub(one.connection->channel());
    one.reader =
        stub.PrepareUnaryCall(&one.context, method, grpc::ByteBuffer(&slice, 1), &borrowed.queue());
    one.reader->StartCall();
    one.reader->Finish(&one.reply, &one.status, &one);
    one.connection->Enter(&one.context);
  }
  const absl::Time begun = core.clock.Now();
  std::stop_callback cancel(options.stop, [&calls] {
    for (OneUnary& one : calls) one.context.TryCancel();
  });
  PollHook poll_hook(options.poll_hook);
  for (size_t ended = 0; ended < calls.size();) {
    void* tag;
    bool ok;
    const auto until = GrpcTime(SteadyNow() + PollHook::kInterval);
    if (borrowed.queue().AsyncNext(&tag, &ok, until) == grpc::CompletionQueue::GOT_EVENT) {
      auto& one = *static_cast<OneUnary*>(tag);
      one.connection->Leave(&one.context);
      if (std::optional<ReportedLoad> load = ReportedLoadOf(one.context)) {
        core.connections.ReportModules(one.address, *load);
      }
      if (std::optional<absl::Duration> queue = QueueOf(one.context)) {
        core.connections.ReportQueue(one.address, *queue);
      }
      one.address = -1;
      ++ended;
      continue;
    }
    poll_hook.Poll();
    if (core.clock.Now() - begun < Picker::kSilence) continue;
    for (const OneUnary& one : calls) {
      if (one.address >= 0) core.connections.Suspect(one.connection, begun);
    }
  }
  std::vector<absl::StatusOr<std::string>> replies;
  for (const OneUnary& one : calls) {
    replies.push_back(BytesOf(core, one, options.stop.stop_requested()));
  }
  return replies;
}

absl::Status CallUnary(const ClientCore& core, int address, const std::string& method,
                       const std::string& request, absl::Time deadline, const CallOptions& options,
                       google::protobuf::MessageLite& reply, const CallMetadata& metadata) {
  ASSIGN_OR_RETURN(std::string bytes,
                   CallBytes(core, address, method, request, deadline, options, metadata));
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
