#include "client/modules/module_rpcs.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/call/unary_call.h"
#include "proto/attnd/v1/chunk_framing.h"

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

// A reply of a header and chunks.
template <class Message, class Result>
class Reply {
 public:
  Reply(std::vector<Landing> landings, Result& result)
      : landings_(std::move(landings)), result_(result) {}

  absl::Status Take(grpc::ByteBuffer& bytes) {
    Message message;
    RETURN_IF_ERROR(Parse(bytes, message));
    if (message.has_header()) {
      has_header_ = true;
      result_ = std::move(*message.mutable_header());
      return absl::OkStatus();
    }
    for (Landing& landing : landings_) {
      if (landing.field == static_cast<int>(message.chunk().tensor())) {
        return landing.Take(message.chunk());
      }
    }
    return Malformed(absl::StrCat("chunk of field ", message.chunk().tensor()));
  }
  absl::Status CheckComplete() const {
    if (!has_header_) return Malformed("header: is missing");
    for (const Landing& landing : landings_) RETURN_IF_ERROR(landing.CheckComplete());
    return absl::OkStatus();
  }

 private:
  std::vector<Landing> landings_;
  Result& result_;
  bool has_header_ = false;
};

template <class Header>
void NamePayloads(const std::vector<StreamedPayload>& payloads, Header& header) {
  for (const StreamedPayload& payload : payloads) {
    v1::PayloadSize& size = *header.add_payload();
    size.set_tensor(payload.field_number);
    size.set_bytes(payload.bytes->size());
  }
}

int64_t BytesOf(const std::vector<StreamedPayload>& payloads) {
  int64_t bytes = 0;
  for (const StreamedPayload& payload : payloads) {
    bytes += static_cast<int64_t>(payload.bytes->size());
  }
  return bytes;
}

void AddUnlessEmpty(int field, const SharedBytes& bytes, std::vector<StreamedPayload>& payloads) {
  if (bytes != nullptr && !bytes->empty()) payloads.push_back({field, bytes});
}

std::vector<StreamedPayload> PayloadsOf(const SentForward& inputs) {
  std::vector<StreamedPayload> payloads;
  AddUnlessEmpty(kMaskBits, inputs.mask_bits, payloads);
  AddUnlessEmpty(kMemory, inputs.memory, payloads);
  AddUnlessEmpty(kX, inputs.x, payloads);
  return payloads;
}

template <class Message, class Header, class Result>
absl::Status Exchange(const ClientCore& core, int address, const CallMetadata& metadata,
                      const char* method, Header header, std::vector<StreamedPayload> payloads,
                      std::vector<Landing> landings, Result& result, ModuleTry& attempt) {
  NamePayloads(payloads, header);
  const int64_t bytes = BytesOf(payloads);
  PayloadMessages request(header.SerializeAsString(), std::move(payloads));
  Reply<Message, Result> reply(std::move(landings), result);
  const StreamEnds ends{.next =
                            [&](bool& last) {
                              grpc::ByteBuffer message = request.Next();
                              last = request.done();
                              return message;
                            },
                        .take = [&](grpc::ByteBuffer& message) { return reply.Take(message); }};
  RETURN_IF_ERROR(RunStream(core, address, method, metadata, bytes, ends, attempt.deadline,
                            attempt.options, attempt.pushback));
  return reply.CheckComplete();
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
  return Exchange<v1::ModuleForwardResponse>(core_, address_, metadata_,
                                             "/attnd.v1.Modules/Forward", std::move(header),
                                             PayloadsOf(inputs), {{kY, y}}, result, attempt);
}

absl::Status ModuleRpcs::Backward(v1::ModuleBackwardHeader header, const SentForward* inputs,
                                  const SharedBytes& dy, const BackwardOutputsOfModule& out,
                                  v1::ModuleBackwardResult& result, ModuleTry& attempt) const {
  std::vector<StreamedPayload> payloads;
  if (inputs != nullptr) payloads = PayloadsOf(*inputs);
  payloads.push_back({kDy, dy});
  std::vector<Landing> landings;
  if (!out.d_memory.empty()) landings.push_back({kDMemory, out.d_memory});
  if (!out.dx.empty()) landings.push_back({kDx, out.dx});
  return Exchange<v1::ModuleBackwardResponse>(
      core_, address_, metadata_, "/attnd.v1.Modules/Backward", std::move(header),
      std::move(payloads), std::move(landings), result, attempt);
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
