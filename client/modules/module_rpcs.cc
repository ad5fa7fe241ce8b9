#include "client/modules/module_rpcs.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "client/call/shared_tensors.h"
#include "client/call/stream_reply.h"
#include "client/call/unary_call.h"
#include "client/modules/carry_streams.h"
#include "client/modules/module_errors.h"
#include "client/modules/module_stream.h"
#include "proto/attnd/v1/chunk_framing.h"
#include "proto/attnd/v1/chunk_queue.h"

namespace attnd {
namespace {

// Field numbers of payloads (module.proto).
enum PayloadField {
  kMaskBits = 16,
  kMemory = 17,
  kX = 20,
  kY = 21,
  kDy = 25,
  kDMemory = 26,
  kDx = 27
};

absl::Status Malformed(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("reply: ", what));
}

template <class Message>
absl::Status Parse(grpc::ByteBuffer& bytes, Message& message) {
  grpc::ProtoBufferReader reader(&bytes);
  if (reader.status().ok() && message.ParseFromZeroCopyStream(&reader)) return absl::OkStatus();
  return Malformed("cannot be parsed");
}

grpc::ByteBuffer Serialize(const google::protobuf::MessageLite& message) {
  grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

// A tensor of a reply, written from its begin to its end.
struct Landing {
  int field;
  absl::Span<std::byte> to;
  size_t received = 0;

  absl::Status Take(const v1::PayloadChunk& chunk) {
    const std::string& data = chunk.data();
    if (chunk.offset() != received || data.size() > to.size() - received) {
      return Malformed(absl::StrCat("tensor ", field, ": expected ", to.size() - received,
                                    " more bytes from ", received, ", got ", data.size(), " from ",
                                    chunk.offset()));
    }
    if (!data.empty()) std::memcpy(to.data() + received, data.data(), data.size());
    received += data.size();
    return absl::OkStatus();
  }
  absl::Status CheckComplete() const {
    if (received == to.size()) return absl::OkStatus();
    return Malformed(
        absl::StrCat("tensor ", field, ": expected ", to.size(), " bytes, got ", received));
  }
};

template <class Header>
void NamePayloads(const std::vector<ChunkQueue::Tensor>& payloads, Header& header) {
  for (const ChunkQueue::Tensor& payload : payloads) {
    v1::PayloadSize& size = *header.add_payload();
    size.set_tensor(static_cast<uint32_t>(payload.field));
    size.set_bytes(static_cast<uint64_t>(payload.bytes));
  }
}

// Unlike those of other calls, of any client.
std::string NewCarryName() {
  thread_local absl::BitGen random;
  return absl::StrCat(absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16),
                      absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16));
}

ChunkQueue::Tensor TensorOf(int field, const KeptBytes& bytes) {
  return {field, bytes.data(), static_cast<int64_t>(bytes.size()), bytes.memory()};
}

void AddUnlessEmpty(int field, const KeptBytes& bytes, std::vector<ChunkQueue::Tensor>& payloads) {
  if (!bytes.empty()) payloads.push_back(TensorOf(field, bytes));
}

std::vector<ChunkQueue::Tensor> PayloadsOf(const SentForward& inputs) {
  std::vector<ChunkQueue::Tensor> payloads;
  AddUnlessEmpty(kMaskBits, inputs.mask_bits, payloads);
  AddUnlessEmpty(kMemory, inputs.memory, payloads);
  AddUnlessEmpty(kX, inputs.x, payloads);
  return payloads;
}

StridedRuns OneRun(int64_t bytes) { return {.offset = 0, .run_bytes = bytes, .loops = {}}; }

void AddUnlessEmpty(int field, const char* name, absl::Span<std::byte> to,
                    std::vector<ReplyPayload>& outputs) {
  if (!to.empty()) {
    outputs.push_back({field, name, OneRun(static_cast<int64_t>(to.size())), to.data()});
  }
}

v1::TensorName NameOf(int field) {
  switch (field) {
    case kMaskBits:
      return v1::TENSOR_NAME_MASK_BITS;
    case kMemory:
      return v1::TENSOR_NAME_MEMORY;
    case kX:
      return v1::TENSOR_NAME_X;
    case kY:
      return v1::TENSOR_NAME_Y;
    case kDy:
      return v1::TENSOR_NAME_D_Y;
    case kDMemory:
      return v1::TENSOR_NAME_D_MEMORY;
    default:
      return v1::TENSOR_NAME_D_X;
  }
}

// The messages of one PutTensors.
class PutMessages {
 public:
  PutMessages(const v1::PutTensorsHeader& header, const SentPut& put)
      : header_(header), put_(put) {}

  grpc::ByteBuffer Next(bool& last) {
    v1::PutTensorsRequest message;
    if (!begun_) {
      begun_ = true;
      *message.mutable_header() = header_;
    } else if (tensor_ == put_.tensors.size()) {
      *message.mutable_commit() = put_.commit;
      last = true;
    } else {
      Fill(put_.tensors[tensor_], message);
    }
    return Serialize(message);
  }

 private:
  void Fill(const SentTensor& tensor, v1::PutTensorsRequest& message) {
    if (!named_) {
      named_ = true;
      *message.mutable_tensor() = tensor.header;
    } else {
      v1::PayloadChunk& chunk = *message.mutable_chunk();
      chunk.set_offset(offset_);
      chunk.set_data(tensor.bytes->substr(offset_, kChunkBytes));
      offset_ += chunk.data().size();
    }
    if (offset_ < tensor.bytes->size()) return;
    ++tensor_;
    named_ = false;
    offset_ = 0;
  }

  const v1::PutTensorsHeader& header_;
  const SentPut& put_;
  bool begun_ = false, named_ = false;
  size_t tensor_ = 0, offset_ = 0;
};

}  // namespace

// A call's method, and its tensors.
struct ModuleRpcs::Exchanged {
  const char* method;
  std::vector<ChunkQueue::Tensor> inputs;
  std::vector<ReplyPayload> outputs;

  int64_t sent_bytes() const {
    int64_t bytes = 0;
    for (const ChunkQueue::Tensor& input : inputs) bytes += input.bytes;
    return bytes;
  }
  int64_t received_bytes() const {
    int64_t bytes = 0;
    for (const ReplyPayload& output : outputs) bytes += output.runs.total_bytes();
    return bytes;
  }
  // All tensors in shared memory; nothing where they are small, or the daemon or the memory does
  // not take them.
  std::optional<SharedTensors> Share(const ClientCore& core) const {
    if (core.shared_memory == nullptr) return std::nullopt;
    int64_t bytes = sent_bytes();
    for (const ReplyPayload& output : outputs) bytes = std::max(bytes, output.runs.total_bytes());
    if (bytes < SharedTensors::kFewBytes) return std::nullopt;
    SharedTensors shared(*core.shared_memory);
    for (const ChunkQueue::Tensor& input : inputs) {
      shared.AddInput(NameOf(input.field), OneRun(input.bytes), input.data);
    }
    for (const ReplyPayload& output : outputs) {
      shared.AddOutput(NameOf(output.field_number), output.runs, output.tensor);
    }
    if (!shared.Place() || !core.shared_memory->takes_modules()) return std::nullopt;
    return shared;
  }
};

// The tensors travel, large ones over several connections.
template <class Header, class Result>
absl::Status ModuleRpcs::Stream(Exchanged call, Header& header, Result& result,
                                ModuleTry& attempt) const {
  auto take_header = [&result](const std::string& bytes) {
    return result.ParseFromString(bytes) ? absl::OkStatus() : Malformed("header: cannot be parsed");
  };
  const int64_t bytes = call.sent_bytes();
  const int carriers = CarryStreamCount(core_, carry_streams_, bytes, call.received_bytes());
  ChunkQueue chunks(std::move(call.inputs));
  bool has_begun = false;
  auto next = [&](bool& last) -> std::optional<grpc::ByteBuffer> {
    std::optional<grpc::ByteBuffer> message =
        std::exchange(has_begun, true) ? chunks.Next() : HeaderMessage(header);
    last = chunks.empty();
    return message;
  };
  if (carriers == 0) {
    StreamReply reply(call.outputs, take_header);
    RETURN_IF_ERROR(RunStream(
        core_, address_, call.method, metadata_, bytes,
        {.next = next, .take = [&](grpc::ByteBuffer& message) { return reply.Take(message); }},
        attempt.deadline, attempt.options, attempt.pushback));
    return reply.CheckComplete();
  }
  v1::ModuleCarryHeader carry;
  carry.set_token(header.token());
  carry.set_carry(NewCarryName());
  header.set_carry(carry.carry());
  ReplyLandings landings(call.outputs);
  StreamReply reply(landings, take_header);
  const int64_t share = bytes / (carriers + 1);
  CarryStreams beside({core_, address_, metadata_, carry, chunks, landings, share, attempt.deadline,
                       attempt.options},
                      carriers);
  const absl::Status own = RunStream(
      core_, address_, call.method, metadata_, share,
      {.next = next, .take = [&](grpc::ByteBuffer& message) { return reply.Take(message); }},
      attempt.deadline, beside.options(), attempt.pushback);
  RETURN_IF_ERROR(beside.Finish(own));
  return reply.CheckComplete();
}

// The stream's messages end to end.
template <class Header, class Result>
absl::Status ModuleRpcs::Whole(Exchanged call, const Header& header, Result& result,
                               ModuleTry& attempt) const {
  std::vector<grpc::Slice> slices;
  const auto append = [&slices](const grpc::ByteBuffer& message) {
    std::vector<grpc::Slice> more;
    CHECK(message.Dump(&more).ok());
    slices.insert(slices.end(), more.begin(), more.end());
  };
  append(HeaderMessage(header));
  ChunkQueue chunks(std::move(call.inputs));
  while (std::optional<grpc::ByteBuffer> chunk = chunks.Next()) append(*chunk);
  ASSIGN_OR_RETURN(const grpc::ByteBuffer received,
                   RunWhole(core_, address_, absl::StrCat(call.method, "Whole"), metadata_,
                            grpc::ByteBuffer(slices.data(), slices.size()), attempt.deadline,
                            attempt.options, attempt.pushback));
  StreamReply reply(call.outputs, [&result](const std::string& bytes) {
    return result.ParseFromString(bytes) ? absl::OkStatus() : Malformed("header: cannot be parsed");
  });
  RETURN_IF_ERROR(reply.Take(received));
  return reply.CheckComplete();
}

// As one message each way, if so much travels at most.
template <class Header, class Result>
absl::Status ModuleRpcs::Send(Exchanged call, Header& header, Result& result,
                              ModuleTry& attempt) const {
  const bool is_small = std::max(call.sent_bytes(), call.received_bytes()) <= whole_bytes_;
  return whole_bytes_ > 0 && is_small ? Whole(std::move(call), header, result, attempt)
                                      : Stream(std::move(call), header, result, attempt);
}

// After a failure the daemon may still use the memory; EndUse waits for it to let go. A daemon that
// was started anew knows the regions no more: then the tensors travel.
template <class Header, class Result>
absl::Status ModuleRpcs::Exchange(Exchanged call, Header header, Result& result,
                                  ModuleTry& attempt) const {
  if (std::optional<SharedTensors> shared = call.Share(core_); shared.has_value()) {
    *header.mutable_shared_memory() = shared->message();
    absl::Status done = Send({call.method, {}, {}}, header, result, attempt);
    if (done.ok()) shared->Land();
    if (!done.ok()) core_.shared_memory->EndUse(shared->message().use());
    if (!IsRegionUnknown(done)) return done;
    core_.shared_memory->Forget();
    header.clear_shared_memory();
  }
  NamePayloads(call.inputs, header);
  return Send(std::move(call), header, result, attempt);
}

absl::Status ModuleRpcs::Unary(const char* method, const google::protobuf::MessageLite& request,
                               google::protobuf::MessageLite& reply, ModuleTry& attempt) const {
  attempt.pushback = {};
  return CallUnary(core_, address_, absl::StrCat("/attnd.v1.Modules/", method),
                   request.SerializeAsString(), attempt.deadline, attempt.options, reply,
                   metadata_);
}

absl::Status ModuleRpcs::Register(const v1::RegisterModuleRequest& request,
                                  v1::RegisterModuleResponse& reply, ModuleTry& attempt) const {
  return Unary("Register", request, reply, attempt);
}
absl::Status ModuleRpcs::GetModule(const v1::GetModuleRequest& request,
                                   v1::GetModuleResponse& reply, ModuleTry& attempt) const {
  return Unary("GetModule", request, reply, attempt);
}
absl::Status ModuleRpcs::List(v1::ListModulesResponse& reply, ModuleTry& attempt) const {
  return Unary("ListModules", v1::ListModulesRequest(), reply, attempt);
}
absl::Status ModuleRpcs::Release(const std::string& token, ModuleTry& attempt) const {
  v1::ReleaseModuleRequest request;
  request.set_token(token);
  v1::ReleaseModuleResponse reply;
  return Unary("Release", request, reply, attempt);
}
absl::Status ModuleRpcs::ReleaseActivations(const std::string& token, ModuleTry& attempt) const {
  v1::ReleaseResidualRequest request;
  request.set_token(token);
  v1::ReleaseResidualResponse reply;
  return CallUnary(core_, address_, "/attnd.v1.Attention/ReleaseResidual",
                   request.SerializeAsString(), attempt.deadline, attempt.options, reply,
                   metadata_);
}
absl::Status ModuleRpcs::SumGradients(const v1::SumGradientsRequest& request,
                                      v1::SumGradientsResponse& reply, ModuleTry& attempt) const {
  return Unary("SumGradients", request, reply, attempt);
}

absl::Status ModuleRpcs::GradientStats(const v1::GradientStatsRequest& request,
                                       v1::GradientStatsResponse& reply, ModuleTry& attempt) const {
  return Unary("GradientStats", request, reply, attempt);
}
absl::Status ModuleRpcs::Step(const v1::StepRequest& request, v1::StepResponse& reply,
                              ModuleTry& attempt) const {
  return Unary("Step", request, reply, attempt);
}

absl::Status ModuleRpcs::Forward(v1::ModuleForwardHeader header, const SentForward& inputs,
                                 absl::Span<std::byte> y, v1::ModuleForwardResult& result,
                                 ModuleTry& attempt) const {
  Exchanged call{"/attnd.v1.Modules/Forward", PayloadsOf(inputs), {}};
  AddUnlessEmpty(kY, "y", y, call.outputs);
  return Exchange(std::move(call), std::move(header), result, attempt);
}

absl::Status ModuleRpcs::Backward(v1::ModuleBackwardHeader header, const SentForward* inputs,
                                  const KeptBytes& dy, const BackwardOutputsOfModule& out,
                                  v1::ModuleBackwardResult& result, ModuleTry& attempt) const {
  Exchanged call{"/attnd.v1.Modules/Backward", {}, {}};
  if (inputs != nullptr) call.inputs = PayloadsOf(*inputs);
  call.inputs.push_back(TensorOf(kDy, dy));
  AddUnlessEmpty(kDMemory, "d_memory", out.d_memory, call.outputs);
  AddUnlessEmpty(kDx, "dx", out.dx, call.outputs);
  return Exchange(std::move(call), std::move(header), result, attempt);
}

absl::Status ModuleRpcs::Put(const v1::PutTensorsHeader& header, const SentPut& put,
                             v1::PutTensorsResponse& reply, ModuleTry& attempt) const {
  int64_t bytes = 0;
  for (const SentTensor& tensor : put.tensors) bytes += static_cast<int64_t>(tensor.bytes->size());
  PutMessages request(header, put);
  bool answered = false;
  const StreamEnds ends{.next = [&](bool& last) { return request.Next(last); },
                        .take =
                            [&](grpc::ByteBuffer& message) {
                              answered = true;
                              return Parse(message, reply);
                            }};
  RETURN_IF_ERROR(RunStream(core_, address_, "/attnd.v1.Modules/PutTensors", metadata_, bytes, ends,
                            attempt.deadline, attempt.options, attempt.pushback));
  return answered ? absl::OkStatus() : Malformed("is missing");
}

absl::Status ModuleRpcs::Get(const v1::GetTensorsRequest& request, const Place& place,
                             ModuleTry& attempt) const {
  std::vector<Landing> landings;
  auto take = [&](grpc::ByteBuffer& bytes) -> absl::Status {
    v1::GetTensorsResponse message;
    RETURN_IF_ERROR(Parse(bytes, message));
    if (message.has_tensor()) {
      if (!landings.empty()) RETURN_IF_ERROR(landings.back().CheckComplete());
      ASSIGN_OR_RETURN(absl::Span<std::byte> to, place(message.tensor()));
      landings.push_back({static_cast<int>(landings.size()), to});
    } else if (message.has_chunk()) {
      if (landings.empty()) return Malformed("chunk: without a tensor");
      if (!landings.back().to.empty()) return landings.back().Take(message.chunk());
    }
    return absl::OkStatus();
  };
  const StreamEnds ends{.next =
                            [&](bool& last) {
                              last = true;
                              return Serialize(request);
                            },
                        .take = take};
  RETURN_IF_ERROR(RunStream(core_, address_, "/attnd.v1.Modules/GetTensors", metadata_, 0, ends,
                            attempt.deadline, attempt.options, attempt.pushback));
  return landings.empty() ? absl::OkStatus() : landings.back().CheckComplete();
}

}  // namespace attnd
