// A caller of attnd.v1.Modules for tests: small layouts, and each method as one function that gives
// the reply or the status, with a reply's payloads put together.
#pragma once

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/random_problem.h"
#include "proto/attnd/v1/module.grpc.pb.h"

namespace attnd {

inline std::string FloatBytes(const std::vector<float>& numbers) {
  return std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(float));
}

inline std::string RandomBytes(Random& random, int64_t count) {
  std::vector<float> numbers(count);
  for (float& number : numbers) number = static_cast<float>(random.Between(-1000, 1000)) / 1000;
  return FloatBytes(numbers);
}

inline constexpr int kModuleWidth = 8;
inline constexpr int kX = 20, kY = 21, kDy = 25, kDx = 27;  // fields of payloads

// Two layers: linear, GELU, dropout of p.
inline v1::ModuleLayout SmallLayout(float p = 0) {
  v1::ModuleLayout layout;
  layout.set_version(1);
  layout.set_width(kModuleWidth);
  layout.set_element(v1::ELEMENT_FLOAT32);
  layout.set_parameter_element(v1::ELEMENT_FLOAT32);
  v1::Block& block = *layout.add_block();
  v1::Parameter& weight = *block.add_parameter();
  weight.set_name("weight");
  weight.add_shape(kModuleWidth);
  weight.add_shape(kModuleWidth);
  v1::Parameter& bias = *block.add_parameter();
  bias.set_name("bias");
  bias.add_shape(kModuleWidth);
  v1::Linear& linear = *block.add_op()->mutable_linear();
  linear.set_weight(0);
  linear.set_bias(1);
  v1::Activation& activation = *block.add_op()->mutable_activation();
  activation.set_input(2);
  activation.set_kind(v1::ACTIVATION_KIND_GELU);
  if (p > 0) {
    v1::DropoutOp& dropout = *block.add_op()->mutable_dropout();
    dropout.set_input(3);
    dropout.set_p(p);
  }
  for (int n = 0; n < 2; ++n) layout.add_layer()->set_prefix("layer" + std::to_string(n) + ".");
  return layout;
}

inline v1::RegisterModuleRequest SmallRegistration(const std::string& name, float p = 0) {
  v1::RegisterModuleRequest request;
  request.set_name(name);
  *request.mutable_layout() = SmallLayout(p);
  request.mutable_optimizer()->mutable_sgd()->set_momentum(0.9);
  request.mutable_limits()->set_max_rows(16);
  request.mutable_limits()->set_kept_rows(64);
  return request;
}

using Payload = std::pair<int, std::string>;  // field, bytes

// A reply of a stream with payloads.
template <class Result>
struct Streamed {
  grpc::Status status;
  Result header;
  std::map<int, std::string> payload;
};

class ModuleCaller {
 public:
  explicit ModuleCaller(const std::shared_ptr<grpc::Channel>& channel, std::string bearer = "")
      : stub_(v1::Modules::NewStub(channel)), bearer_(std::move(bearer)) {}

  v1::Modules::Stub& stub() { return *stub_; }
  void TraceAs(const std::string& traceparent) { traceparent_ = traceparent; }
  void SendChunksOf(size_t bytes) { chunk_bytes_ = bytes; }
  std::unique_ptr<grpc::ClientContext> NewContext() const {
    auto context = std::make_unique<grpc::ClientContext>();
    if (!bearer_.empty()) context->AddMetadata("authorization", "Bearer " + bearer_);
    if (!traceparent_.empty()) context->AddMetadata("traceparent", traceparent_);
    return context;
  }

  // Any unary method.
  template <class Request, class Response>
  grpc::Status Call(grpc::Status (v1::Modules::Stub::*method)(grpc::ClientContext*, const Request&,
                                                              Response*),
                    const Request& request, Response& response) {
    auto context = NewContext();
    return (stub_.get()->*method)(context.get(), request, &response);
  }
  grpc::Status Register(const v1::RegisterModuleRequest& request,
                        v1::RegisterModuleResponse& response) {
    return Call(&v1::Modules::Stub::Register, request, response);
  }
  grpc::Status Step(const v1::StepRequest& request, v1::StepResponse& response) {
    return Call(&v1::Modules::Stub::Step, request, response);
  }
  v1::ModuleStatus Status(const std::string& token) {
    v1::GetModuleRequest request;
    v1::GetModuleResponse response;
    request.set_token(token);
    Call(&v1::Modules::Stub::GetModule, request, response);
    return response.status();
  }

  // `header.payload` is filled from `payloads`.
  Streamed<v1::ModuleForwardResult> Forward(v1::ModuleForwardHeader header,
                                            const std::vector<Payload>& payloads) {
    auto context = NewContext();
    auto stream = stub_->Forward(context.get());
    return Exchange<v1::ModuleForwardResult, v1::ModuleForwardRequest, v1::ModuleForwardResponse>(
        *stream, std::move(header), payloads);
  }
  Streamed<v1::ModuleBackwardResult> Backward(v1::ModuleBackwardHeader header,
                                              const std::vector<Payload>& payloads) {
    auto context = NewContext();
    auto stream = stub_->Backward(context.get());
    return Exchange<v1::ModuleBackwardResult, v1::ModuleBackwardRequest,
                    v1::ModuleBackwardResponse>(*stream, std::move(header), payloads);
  }

  grpc::Status Put(const std::vector<v1::PutTensorsRequest>& messages,
                   v1::PutTensorsResponse& response) {
    auto context = NewContext();
    auto stream = stub_->PutTensors(context.get(), &response);
    for (const v1::PutTensorsRequest& message : messages) stream->Write(message);
    stream->WritesDone();
    return stream->Finish();
  }
  // Name (with the kind's number) → bytes.
  grpc::Status Get(const v1::GetTensorsRequest& request,
                   std::map<std::string, std::string>& tensors,
                   v1::ModuleStatus* status = nullptr) {
    auto context = NewContext();
    auto stream = stub_->GetTensors(context.get(), request);
    v1::GetTensorsResponse message;
    std::string name;
    while (stream->Read(&message)) {
      if (message.has_status() && status != nullptr) *status = message.status();
      if (message.has_tensor()) {
        name = message.tensor().name() + "/" + std::to_string(message.tensor().kind());
      }
      if (message.has_chunk()) tensors[name] += message.chunk().data();
    }
    return stream->Finish();
  }

 private:
  template <class Result, class Request, class Response, class Stream, class Header>
  Streamed<Result> Exchange(Stream& stream, Header header, const std::vector<Payload>& payloads) {
    for (const auto& [field, bytes] : payloads) {
      v1::PayloadSize& size = *header.add_payload();
      size.set_tensor(static_cast<uint32_t>(field));
      size.set_bytes(bytes.size());
    }
    Request message;
    *message.mutable_header() = std::move(header);
    stream.Write(message);
    for (const auto& [field, bytes] : payloads) {
      for (size_t at = 0; at < bytes.size(); at += chunk_bytes_) {
        v1::PayloadChunk& chunk = *message.mutable_chunk();
        chunk.set_tensor(static_cast<uint32_t>(field));
        chunk.set_offset(at);
        chunk.set_data(bytes.substr(at, chunk_bytes_));
        stream.Write(message);
      }
    }
    stream.WritesDone();
    Streamed<Result> streamed;
    Response response;
    while (stream.Read(&response)) {
      if (response.has_header()) streamed.header = response.header();
      if (response.has_chunk()) {
        streamed.payload[static_cast<int>(response.chunk().tensor())] += response.chunk().data();
      }
    }
    streamed.status = stream.Finish();
    return streamed;
  }

  const std::unique_ptr<v1::Modules::Stub> stub_;
  const std::string bearer_;
  std::string traceparent_;
  size_t chunk_bytes_ = 100;
};

// Messages that put tensors of a small module, each of the bytes that `bytes(count)` gives.
inline std::vector<v1::PutTensorsRequest> PutMessages(
    const std::string& token, uint64_t sequence,
    const std::function<std::string(int64_t count)>& bytes,
    v1::TensorKind kind = v1::TENSOR_KIND_WEIGHT) {
  std::vector<v1::PutTensorsRequest> messages(1);
  messages[0].mutable_header()->set_token(token);
  messages[0].mutable_header()->set_sequence(sequence);
  for (const char* layer : {"layer0.", "layer1."}) {
    for (const char* name : {"weight", "bias"}) {
      v1::TensorHeader& tensor = *messages.emplace_back().mutable_tensor();
      tensor.set_kind(kind);
      tensor.set_name(std::string(layer) + name);
      tensor.set_element(v1::ELEMENT_FLOAT32);
      int64_t count = kModuleWidth;
      tensor.add_shape(kModuleWidth);
      if (std::string(name) == "weight") {
        tensor.add_shape(kModuleWidth);
        count *= kModuleWidth;
      }
      messages.emplace_back().mutable_chunk()->set_data(bytes(count));
    }
  }
  messages.emplace_back().mutable_commit()->set_complete(true);
  return messages;
}

inline v1::ModuleForwardHeader ForwardHeader(const std::string& token, uint64_t sequence,
                                             uint32_t rows, bool training = false) {
  v1::ModuleForwardHeader header;
  header.set_token(token);
  header.set_sequence(sequence);
  header.mutable_rows()->set_batch(1);
  header.mutable_rows()->set_length(rows);
  header.set_training(training);
  header.set_seed(7);
  return header;
}

inline v1::StepRequest StepOf(const std::string& token, uint64_t sequence, uint32_t micro_batches) {
  v1::StepRequest request;
  request.set_token(token);
  request.set_sequence(sequence);
  request.set_micro_batches(micro_batches);
  request.add_group()->set_learning_rate(0.1);
  return request;
}

}  // namespace attnd
