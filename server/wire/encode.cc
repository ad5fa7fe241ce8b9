#include "server/wire/encode.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "base/clock.h"
#include "proto/attnd/v1/chunk_framing.h"
#include "proto/attnd/v1/wire_writer.h"
#include "server/wire/reply_slices.h"

namespace attnd {
namespace {

using v1::Receipt;

constexpr size_t kUsualHeaderBytes = 512;  // receipt, lease and tags

void WriteReceipt(const Result& result, const BackendInfo& engine, absl::Time now,
                  WireWriter& out) {
  const CallTimes& t = result.times();
  const LaunchReport& report = result.report();
  const bool float16 = report.accumulate == AccumulateType::kFloat16;
  auto stage = [&](absl::string_view name, absl::Duration duration) {
    out.Message(Receipt::kStageFieldNumber, [&] {
      out.Text(v1::Stage::kNameFieldNumber, name);
      out.Number(v1::Stage::kNanosecondsFieldNumber,
                 static_cast<uint64_t>(std::max<int64_t>(0, absl::ToInt64Nanoseconds(duration))));
    });
  };
  out.Text(Receipt::kBackendFieldNumber, engine.backend);
  out.Text(Receipt::kDeviceFieldNumber, engine.device);
  out.Text(Receipt::kKernelFieldNumber, report.kernel);
  out.Number(Receipt::kAccumulateFieldNumber,
             float16 ? v1::ACCUMULATE_FLOAT16 : v1::ACCUMULATE_FLOAT32);
  out.Float(Receipt::kDropoutPEffectiveFieldNumber,
            static_cast<float>(result.call().problem().dropout.threshold) / 256.0f);
  out.Number(Receipt::kBatchedWithFieldNumber, static_cast<uint64_t>(result.batched_with()));
  stage("receive", t.admitted - t.received);
  stage("queue", t.kernel_begin - t.landed - t.upload);
  stage("h2d", t.landed - t.admitted + t.upload);
  stage("kernel", t.kernel_end - t.kernel_begin);
  stage("d2h", t.downloaded - t.kernel_end);
  stage("send", now - t.downloaded);
  out.Number(Receipt::kDeterministicFieldNumber, report.deterministic ? 1 : 0);
}

std::string EncodeCapture(const CaptureResult& captured) {
  v1::CapturedMap wire;
  const CapturedMap& map = captured.map;
  wire.set_pooled(map.pooled.data(), map.pooled.size() * sizeof(float));
  wire.set_mean(map.mean);
  wire.set_variance(map.variance);
  wire.set_skewness(map.skewness);
  if (captured.distance.has_value()) wire.set_distance(*captured.distance);
  wire.set_token(captured.token);
  return wire.SerializeAsString();
}

// Makes what stands before the payloads.
std::string MakeHeader(const Result& result, const BackendInfo& engine, absl::Time now) {
  std::string header;
  header.reserve(kUsualHeaderBytes);
  WireWriter out(header);
  out.Message(v1::ForwardResponse::kReceiptFieldNumber,
              [&] { WriteReceipt(result, engine, now, out); });
  if (result.lease().has_value()) {
    out.Text(v1::ForwardResponse::kResidualFieldNumber,
             EncodeLease(*result.lease()).SerializeAsString());
  }
  if (result.captured().has_value()) {
    out.Text(v1::ForwardResponse::kCapturedFieldNumber, EncodeCapture(*result.captured()));
  }
  return header;
}

struct Payload {
  int field;
  const std::byte* data;
  int64_t bytes;
};

// In the order in which they travel.
absl::InlinedVector<Payload, 5> PayloadsOf(const Result& result) {
  absl::InlinedVector<Payload, 5> payloads;
  for (const TensorSpec& tensor : result.call().tensors()) {
    if (tensor.role != TensorUse::kOutput || !tensor.wanted) continue;
    if (tensor.bytes == 0 || tensor.region != kNoRegion) continue;
    payloads.push_back({tensor.field, result.output(tensor.id), tensor.bytes});
  }
  return payloads;
}

}  // namespace

v1::Residual EncodeLease(const LeaseGrant& lease) {
  v1::Residual residual;
  residual.set_token(lease.token);
  residual.set_expires_unix_ms(static_cast<uint64_t>(absl::ToUnixMillis(WallTime(lease.expires))));
  residual.set_bytes_held(static_cast<uint64_t>(lease.bytes));
  return residual;
}

Reply Encode(Result result, const BackendInfo& engine, absl::Time now,
             const std::shared_ptr<TransferProgress>& progress) {
  std::string text = MakeHeader(result, engine, now);
  Reply reply;
  absl::InlinedVector<grpc::Slice, 4> slices;
  for (const Payload& payload : PayloadsOf(result)) {
    WireWriter(text).Length(payload.field, static_cast<uint64_t>(payload.bytes));
    slices.emplace_back(text);
    AppendSlices(payload.data, payload.bytes, {result.memory(), progress, 0}, slices);
    reply.payload_bytes += payload.bytes;
    text.clear();
  }
  if (!text.empty()) slices.emplace_back(text);  // no payload travels
  reply.bytes = grpc::ByteBuffer(slices.data(), slices.size());
  return reply;
}

std::vector<grpc::ByteBuffer> EncodeStream(Result result, const BackendInfo& engine, absl::Time now,
                                           int64_t chunk_bytes,
                                           const std::shared_ptr<TransferProgress>& progress) {
  std::vector<grpc::ByteBuffer> messages;
  grpc::Slice header(FrameHeader(MakeHeader(result, engine, now)));
  messages.emplace_back(&header, 1);
  for (const Payload& payload : PayloadsOf(result)) {
    for (int64_t offset = 0; offset < payload.bytes; offset += chunk_bytes) {
      int64_t size = std::min(chunk_bytes, payload.bytes - offset);
      absl::InlinedVector<grpc::Slice, 8> slices;
      slices.emplace_back(ChunkPrefix(payload.field, offset, size));
      AppendSlices(payload.data + offset, size, {result.memory(), progress, 0}, slices);
      messages.emplace_back(slices.data(), slices.size());
    }
  }
  return messages;
}

}  // namespace attnd
