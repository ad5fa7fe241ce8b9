#include "server/encode.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "attention/dropout.h"
#include "proto/attnd/v1/chunk_framing.h"
#include "server/encode_fields.h"

namespace attnd {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

void AppendTag(int field_number, uint64_t length, std::string& out) {
  uint8_t bytes[20];
  uint32_t tag = WireFormatLite::MakeTag(field_number, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
  uint8_t* end = CodedOutputStream::WriteVarint32ToArray(tag, bytes);
  end = CodedOutputStream::WriteVarint64ToArray(length, end);
  out.append(reinterpret_cast<char*>(bytes), static_cast<size_t>(end - bytes));
}

void AddStage(absl::string_view name, absl::Duration duration, v1::Receipt& receipt) {
  v1::Stage* stage = receipt.add_stage();
  stage->set_name(std::string(name));
  stage->set_nanoseconds(
      static_cast<uint64_t>(std::max<int64_t>(0, absl::ToInt64Nanoseconds(duration))));
}

v1::Receipt MakeReceipt(const Result& result, const BackendInfo& engine, absl::Time now) {
  const CallTimes& t = result.times();
  const LaunchReport& report = result.report();
  v1::Receipt receipt;
  receipt.set_backend(engine.backend);
  receipt.set_device(engine.device);
  receipt.set_kernel(report.kernel);
  receipt.set_accumulate(report.accumulate == AccumulateType::kFloat16 ? v1::ACCUMULATE_FLOAT16
                                                                       : v1::ACCUMULATE_FLOAT32);
  receipt.set_dropout_p_effective(static_cast<float>(result.call().problem().dropout.threshold) /
                                  256.0f);
  receipt.set_batched_with(static_cast<uint32_t>(result.batched_with()));
  receipt.set_deterministic(report.deterministic);
  AddStage("receive", t.admitted - t.received, receipt);
  AddStage("queue", t.kernel_begin - t.landed - t.upload, receipt);
  AddStage("h2d", t.landed - t.admitted + t.upload, receipt);
  AddStage("kernel", t.kernel_end - t.kernel_begin, receipt);
  AddStage("d2h", t.downloaded - t.kernel_end, receipt);
  AddStage("send", now - t.downloaded, receipt);
  return receipt;
}

void AppendMessage(int field_number, const google::protobuf::MessageLite& message,
                   std::string& out) {
  std::string bytes = message.SerializeAsString();
  AppendTag(field_number, bytes.size(), out);
  out += bytes;
}

// What stands before the payloads.
std::string MakeHeader(const Result& result, const BackendInfo& engine, absl::Time now) {
  std::string header;
  AppendMessage(v1::ForwardResponse::kReceiptFieldNumber, MakeReceipt(result, engine, now), header);
  if (result.lease().has_value()) {
    AppendMessage(v1::ForwardResponse::kResidualFieldNumber, EncodeLease(*result.lease()), header);
  }
  return header;
}

grpc::Slice Wrap(const std::byte* data, int64_t size, const std::shared_ptr<const void>& memory) {
  auto* owner = new std::shared_ptr<const void>(memory);  // this slice's own share
  return grpc::Slice(
      const_cast<std::byte*>(data), static_cast<size_t>(size),
      [](void* share) { delete static_cast<std::shared_ptr<const void>*>(share); }, owner);
}

struct Payload {
  int field;
  const std::byte* data;
  int64_t bytes;
};

// In the order in which they travel.
absl::InlinedVector<Payload, 5> PayloadsOf(const Result& result) {
  absl::InlinedVector<Payload, 5> payloads;
  for (const TensorSize& output : OutputsOf(result.call().problem(), result.call().direction())) {
    bool wanted = output.tensor != Tensor::kLse || result.call().want_lse();
    if (!wanted || output.bytes == 0 || result.call().shared(output.tensor) != nullptr) continue;
    payloads.push_back({ReplyField(output.tensor), result.output(output.tensor), output.bytes});
  }
  return payloads;
}

}  // namespace

v1::Residual EncodeLease(const LeaseGrant& lease) {
  v1::Residual residual;
  residual.set_token(lease.token);
  residual.set_expires_unix_ms(static_cast<uint64_t>(absl::ToUnixMillis(lease.expires)));
  residual.set_bytes_held(static_cast<uint64_t>(lease.bytes));
  return residual;
}

Reply Encode(Result result, const BackendInfo& engine, absl::Time now) {
  std::string text = MakeHeader(result, engine, now);
  Reply reply;
  std::vector<grpc::Slice> slices;
  for (const Payload& payload : PayloadsOf(result)) {
    AppendTag(payload.field, static_cast<uint64_t>(payload.bytes), text);
    slices.emplace_back(text);
    slices.push_back(Wrap(payload.data, payload.bytes, result.memory()));
    reply.payload_bytes += payload.bytes;
    text.clear();
  }
  if (!text.empty()) slices.emplace_back(text);  // no payload travels
  reply.bytes = grpc::ByteBuffer(slices.data(), slices.size());
  return reply;
}

std::vector<grpc::ByteBuffer> EncodeStream(Result result, const BackendInfo& engine,
                                           absl::Time now) {
  std::vector<grpc::ByteBuffer> messages;
  grpc::Slice header(FrameHeader(MakeHeader(result, engine, now)));
  messages.emplace_back(&header, 1);
  for (const Payload& payload : PayloadsOf(result)) {
    for (int64_t offset = 0; offset < payload.bytes; offset += kChunkBytes) {
      int64_t size = std::min(kChunkBytes, payload.bytes - offset);
      grpc::Slice slices[] = {grpc::Slice(ChunkPrefix(payload.field, offset, size)),
                              Wrap(payload.data + offset, size, result.memory())};
      messages.emplace_back(slices, 2);
    }
  }
  return messages;
}

}  // namespace attnd
