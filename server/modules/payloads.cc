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
#include "server/wire/decode_shared.h"
#include "server/wire/decode_small.h"
#include "server/wire/wire_check.h"

namespace attnd {
namespace {

constexpr int kHeaderField = 1, kChunkField = 2;  // of all module streams but tensors'

// Maps a field to its payload's name in shared memory.
int SharedNameOf(int field) {
  switch (field) {
    case kMaskBitsField:
      return v1::TENSOR_NAME_MASK_BITS;
    case kMemoryField:
      return v1::TENSOR_NAME_MEMORY;
    case kXField:
      return v1::TENSOR_NAME_X;
    case kYField:
      return v1::TENSOR_NAME_Y;
    case kDyField:
      return v1::TENSOR_NAME_D_Y;
    case kDMemoryField:
      return v1::TENSOR_NAME_D_MEMORY;
    default:
      return v1::TENSOR_NAME_D_X;
  }
}

TensorSpec TensorOf(const PayloadSpec& spec) {
  return {.id = SharedNameOf(spec.field),
          .field = spec.field,
          .name = spec.name,
          .role = spec.is_input ? TensorUse::kInput : TensorUse::kOutput,
          .bytes = spec.bytes};
}

// The payloads of `specs` that a header places in shared memory.
absl::StatusOr<TensorList> SharedAmong(const std::vector<PayloadSpec>& specs,
                                       const SharedPlaces& told) {
  TensorList tensors;
  for (const PayloadSpec& spec : specs) {
    TensorSpec tensor = TensorOf(spec);
    const SharedPlace* place = spec.travels ? told.Find(tensor.id) : nullptr;
    if (place == nullptr) continue;
    if (place->bytes != spec.bytes) {
      return FieldError(reason::kSizeMismatch, spec.name, absl::StrCat(spec.bytes, " bytes"),
                        absl::StrCat(place->bytes, " bytes"));
    }
    tensor.region = place->region;
    tensor.offset = place->offset;
    tensors.push_back(tensor);
  }
  if (tensors.size() == told.places.size()) return tensors;
  return BadShared("tensor", "inputs of the call and outputs that it wants", "others");
}

// `shared`: those that do not come in chunks.
absl::Status CheckTold(const std::vector<PayloadSpec>& specs,
                       const google::protobuf::RepeatedPtrField<v1::PayloadSize>& told,
                       const TensorPlaces& shared) {
  int n = 0;
  for (const PayloadSpec& spec : specs) {
    if (!spec.is_input || shared[SharedNameOf(spec.field)] != nullptr) continue;
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

void Payloads::DropBlock(void* block) { delete static_cast<std::shared_ptr<const Staged>*>(block); }

// A slice over a block, which holds it.
grpc::Slice Payloads::SliceOf(const Placed& placed, int64_t offset, int64_t bytes) {
  return grpc::Slice(placed.data + offset, static_cast<size_t>(bytes), &DropBlock,
                     new std::shared_ptr<const Staged>(placed.block));
}

absl::Status Payloads::FindShared(const std::vector<PayloadSpec>& specs, const ToldPayloads& told,
                                  const PayloadMemory& memory, CallStream& stream) {
  if (told.shared == nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(const SharedPlaces places, PlacesOf(*told.shared));
  ASSIGN_OR_RETURN(const TensorList tensors, SharedAmong(specs, places));
  RETURN_IF_ERROR(memory.shared.Find(*places.request, tensors, memory.caller,
                                     stream.is_unix_socket(), shared_));
  int64_t in = 0, out = 0;
  for (const TensorSpec& tensor : tensors) {
    (tensor.role == TensorUse::kInput ? in : out) += tensor.bytes;
  }
  stream.Shared(in, out);
  return absl::OkStatus();
}

absl::StatusOr<Payloads> Payloads::Make(std::vector<PayloadSpec> specs, const ToldPayloads& told,
                                        const PayloadMemory& memory, CallStream& stream) {
  Payloads payloads;
  RETURN_IF_ERROR(payloads.FindShared(specs, told, memory, stream));
  RETURN_IF_ERROR(CheckTold(specs, told.sizes, payloads.shared_.shared));
  int64_t staged_bytes = 0;
  for (const PayloadSpec& spec : specs) {
    std::byte* shared = payloads.shared_.shared[SharedNameOf(spec.field)];
    payloads.placed_.push_back({spec, shared, nullptr});
    if (shared == nullptr) staged_bytes += AlignedSize(spec.bytes);
  }
  ASSIGN_OR_RETURN(Ticket ticket, memory.admission.HoldStaging(memory.caller, staged_bytes));
  for (Placed& placed : payloads.placed_) {
    if (placed.data != nullptr) continue;
    const int64_t bytes = AlignedSize(placed.spec.bytes);
    ASSIGN_OR_RETURN(StagingBlock block, TakeBlock(bytes, memory.staging, memory.leases));
    placed.data = block.data();
    placed.block = std::make_shared<const Staged>(Staged{ticket.SplitOff(bytes), std::move(block)});
  }
  return payloads;
}

absl::Span<std::byte> Payloads::operator[](int field) const {
  for (const Placed& placed : placed_) {
    if (placed.spec.field != field) continue;
    return {placed.data, static_cast<size_t>(placed.spec.bytes)};
  }
  return {};
}

absl::Status Payloads::Receive(CallStream& stream, const google::protobuf::Descriptor& type) {
  std::vector<TensorSpec> inputs;
  int64_t input_bytes = 0;
  for (const Placed& placed : placed_) {
    if (!placed.spec.is_input || placed.block == nullptr) continue;
    input_bytes += placed.spec.bytes;
    inputs.push_back(TensorOf(placed.spec));
    inputs.back().id = placed.spec.field;
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

absl::Status Payloads::Send(CallStream& stream, grpc::ByteBuffer header) {
  std::erase_if(placed_, [](const Placed& placed) { return !placed.IsSent(); });
  const absl::Status gone = absl::CancelledError("the caller is gone");
  if (!stream.Write(std::move(header))) return BrokenOr(stream, gone);
  for (const Placed& placed : placed_) {
    for (int64_t at = 0; at < placed.spec.bytes; at += kChunkBytes) {
      const int64_t bytes = std::min(kChunkBytes, placed.spec.bytes - at);
      const grpc::Slice parts[2] = {grpc::Slice(ChunkPrefix(placed.spec.field, at, bytes)),
                                    SliceOf(placed, at, bytes)};
      if (!stream.Write(grpc::ByteBuffer(parts, 2))) return BrokenOr(stream, gone);
    }
  }
  return absl::OkStatus();
}

void Payloads::List(google::protobuf::RepeatedPtrField<v1::PayloadSize>& sizes) const {
  for (const Placed& placed : placed_) {
    if (!placed.IsSent()) continue;
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

absl::Status ReadPart(CallStream& stream, const MessageBytes& message, ByteRange range,
                      absl::string_view path, google::protobuf::Message& part) {
  return DecodePart(
      message, range, path, kMaxModuleString,
      [&stream](int64_t bytes) { return stream.HoldRequest(bytes); }, part);
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
  return ReadPart(stream, message, part.range, "header", header);
}

absl::Status ReadRequest(CallStream& stream, google::protobuf::Message& request) {
  grpc::ByteBuffer buffer;
  if (!stream.Read(buffer)) return BrokenOr(stream, absl::CancelledError("the caller is gone"));
  RETURN_IF_ERROR(CheckWhole(buffer));
  const MessageBytes message(buffer);
  return ReadPart(stream, message, {0, message.size()}, "", request);
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
