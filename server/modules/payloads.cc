#include "server/modules/payloads.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "proto/attnd/v1/chunk_framing.h"
#include "server/admission/staging_copy.h"
#include "server/call/status_details.h"
#include "server/rpc/chunk_sequence.h"
#include "server/wire/decode_small.h"
#include "server/wire/wire_check.h"

namespace attnd {
namespace {

constexpr int kHeaderField = 1, kChunkField = 2;  // of all module streams but tensors'

absl::Status NoMemory(int64_t bytes) {
  return WithRetryAfter(
      Failure(absl::StatusCode::kUnavailable, reason::kMemoryPressure,
              absl::StrCat("memory_limit_mib: no room for ", bytes, " bytes of tensors now"),
              {{"limit", "memory_limit_mib"}, {"bytes", absl::StrCat(bytes)}}),
      absl::Milliseconds(100));
}

absl::Status CheckTold(const std::vector<PayloadSpec>& specs,
                       const google::protobuf::RepeatedPtrField<v1::PayloadSize>& told) {
  int n = 0;
  for (const PayloadSpec& spec : specs) {
    if (!spec.is_input) continue;
    const bool there = n < told.size() && static_cast<int>(told[n].tensor()) == spec.field;
    if (!there || told[n].bytes() != static_cast<uint64_t>(spec.bytes)) {
      return FieldError(reason::kSizeMismatch, absl::StrCat("payload[", n, "]"),
                        absl::StrCat(spec.field, " (", spec.name, ") of ", spec.bytes, " bytes"),
                        n < told.size()
                            ? absl::StrCat(told[n].tensor(), " of ", told[n].bytes(), " bytes")
                            : "none");
    }
    ++n;
  }
  if (n == told.size()) return absl::OkStatus();
  return FieldError(reason::kSizeMismatch, absl::StrCat("payload[", n, "]"), "none",
                    absl::StrCat(told[n].tensor()));
}

}  // namespace

absl::StatusOr<Payloads> Payloads::Make(
    std::vector<PayloadSpec> specs, const google::protobuf::RepeatedPtrField<v1::PayloadSize>& told,
    StagingPool& pool) {
  RETURN_IF_ERROR(CheckTold(specs, told));
  Payloads payloads;
  for (const PayloadSpec& spec : specs) {
    std::optional<StagingBlock> block = pool.TryAcquire(AlignedSize(spec.bytes));
    if (!block.has_value()) return NoMemory(spec.bytes);
    payloads.placed_.push_back({spec, *std::move(block)});
  }
  return payloads;
}

absl::Span<std::byte> Payloads::operator[](int field) const {
  for (const Placed& placed : placed_) {
    if (placed.spec.field != field) continue;
    return {placed.block.data(), static_cast<size_t>(placed.spec.bytes)};
  }
  return {};
}

void Payloads::Forget(int field) {
  std::erase_if(placed_, [&](const Placed& placed) { return placed.spec.field == field; });
}

absl::Status Payloads::Receive(CallStream& stream, const google::protobuf::Descriptor& type) {
  std::vector<TensorSpec> inputs;
  int64_t input_bytes = 0;
  for (const Placed& placed : placed_) {
    if (!placed.spec.is_input) continue;
    input_bytes += placed.spec.bytes;
    inputs.push_back({.id = placed.spec.field,
                      .field = placed.spec.field,
                      .name = placed.spec.name,
                      .bytes = placed.spec.bytes});
  }
  ChunkSequence sequence(inputs);
  for (grpc::ByteBuffer buffer; stream.Read(buffer);) {
    const MessageBytes message(buffer);
    ASSIGN_OR_RETURN(const MessagePart part, PartOf(message, type));
    if (part.field != kChunkField) {
      return FieldError(reason::kChunkOrder, "header", "one header", "two");
    }
    ASSIGN_OR_RETURN(const ChunkPart chunk, ChunkOf(message, part.range));
    ASSIGN_OR_RETURN(const int field, sequence.Take(chunk.tensor, chunk.offset, chunk.data.size));
    std::byte* to = (*this)[field].data() + chunk.offset;
    message.ForEachPiece(chunk.data, [&](absl::Span<const uint8_t> bytes) {
      LandPiece(to, bytes, input_bytes);
      to += bytes.size();
    });
  }
  return BrokenOr(stream, sequence.CheckComplete());
}

absl::Status Payloads::Send(CallStream& stream, grpc::ByteBuffer header) const {
  const absl::Status gone = absl::CancelledError("the caller is gone");
  if (!stream.Write(std::move(header))) return BrokenOr(stream, gone);
  for (const Placed& placed : placed_) {
    if (placed.spec.is_input) continue;
    for (int64_t at = 0; at < placed.spec.bytes; at += kChunkBytes) {
      const int64_t bytes = std::min(kChunkBytes, placed.spec.bytes - at);
      const grpc::Slice parts[2] = {
          grpc::Slice(ChunkPrefix(placed.spec.field, at, bytes)),
          grpc::Slice(placed.block.data() + at, static_cast<size_t>(bytes))};
      if (!stream.Write(grpc::ByteBuffer(parts, 2))) return BrokenOr(stream, gone);
    }
  }
  return absl::OkStatus();
}

void Payloads::List(google::protobuf::RepeatedPtrField<v1::PayloadSize>& sizes) const {
  for (const Placed& placed : placed_) {
    if (placed.spec.is_input) continue;
    v1::PayloadSize& size = *sizes.Add();
    size.set_tensor(static_cast<uint32_t>(placed.spec.field));
    size.set_bytes(static_cast<uint64_t>(placed.spec.bytes));
  }
}

absl::StatusOr<MessagePart> PartOf(const MessageBytes& message,
                                   const google::protobuf::Descriptor& type) {
  ASSIGN_OR_RETURN(const FieldTable table,
                   CheckWire(message, {0, message.size()}, type, {.outer_fields_only = true}));
  for (int field = 1; field <= type.field_count(); ++field) {
    if (table.Has(field)) return MessagePart{field, table.range[field]};
  }
  return FieldError(reason::kBadField, "part", "one part", "none");
}

absl::StatusOr<ChunkPart> ChunkOf(const MessageBytes& message, ByteRange range) {
  using Chunk = v1::PayloadChunk;
  ASSIGN_OR_RETURN(const FieldTable table,
                   CheckWire(message, range, *Chunk::descriptor(), {.path = "chunk"}));
  return ChunkPart{table.varint[Chunk::kTensorFieldNumber], table.varint[Chunk::kOffsetFieldNumber],
                   table.range[Chunk::kDataFieldNumber]};
}

absl::Status ReadHeader(CallStream& stream, const google::protobuf::Descriptor& type,
                        google::protobuf::Message& header) {
  grpc::ByteBuffer buffer;
  const absl::Status none =
      FieldError(reason::kChunkOrder, "header", "a header before half-close", "none");
  if (!stream.Read(buffer)) return BrokenOr(stream, none);
  const MessageBytes message(buffer);
  ASSIGN_OR_RETURN(const MessagePart part, PartOf(message, type));
  if (part.field != kHeaderField) {
    return FieldError(reason::kChunkOrder, "header", "a header before other parts", "another part");
  }
  return DecodePart(message, part.range, "header", kMaxModuleString, header);
}

absl::Status ReadRequest(CallStream& stream, google::protobuf::Message& request) {
  grpc::ByteBuffer buffer;
  if (!stream.Read(buffer)) return BrokenOr(stream, absl::CancelledError("the caller is gone"));
  RETURN_IF_ERROR(CheckWhole(buffer));
  const MessageBytes message(buffer);
  return DecodePart(message, {0, message.size()}, "", kMaxModuleString, request);
}

absl::Status Reply(CallStream& stream, const google::protobuf::Message& response) {
  if (stream.Write(EncodeSmall(response))) return absl::OkStatus();
  return BrokenOr(stream, absl::CancelledError("the caller is gone"));
}

absl::Status BrokenOr(const CallStream& stream, absl::Status otherwise) {
  absl::Status broken = stream.Broken();
  return broken.ok() ? std::move(otherwise) : broken;
}

}  // namespace attnd
