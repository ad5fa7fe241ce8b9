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

// A call of one message each way has small payloads, and no streams beside it.
absl::Status CheckMost(int64_t bytes, const ToldPayloads& told, const CallStream& stream) {
  const int64_t most = stream.most_payload_bytes();
  if (most == INT64_MAX) return absl::OkStatus();
  if (!told.carry.empty()) return FieldError(reason::kBadField, "carry", "none", "one");
  if (bytes <= most) return absl::OkStatus();
  return FieldError(reason::kSizeMismatch, "payload",
                    absl::StrCat("at most ", most, " bytes each way; larger ones are streamed"),
                    absl::StrCat(bytes, " bytes"));
}

// Has `take` say of each chunk until half-close where it lands: it calls land(to, call_bytes).
template <class Take>
absl::Status ReadChunks(CallStream& stream, const google::protobuf::Descriptor& type,
                        const Take& take) {
  for (grpc::ByteBuffer buffer; stream.Read(buffer);) {
    const MessageBytes message(buffer);
    ASSIGN_OR_RETURN(const MessagePart part, PartOf(message, type));
    if (part.field != kChunkField) {
      return FieldError(reason::kChunkOrder, "header", "one header", "two");
    }
    ASSIGN_OR_RETURN(const ChunkPart chunk, ChunkOf(message, part.range));
    RETURN_IF_ERROR(take(chunk, [&](std::byte* to, int64_t call_bytes) {
      message.ForEachPiece(chunk.data, [&](absl::Span<const uint8_t> bytes) {
        LandPiece(to, bytes, call_bytes);
        to += bytes.size();
      });
    }));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckCarry(const std::string& carry) {
  if (carry.size() <= kMaxCarryBytes && !carry.empty()) return absl::OkStatus();
  return FieldError(reason::kBadField, "carry", absl::StrCat("1..", kMaxCarryBytes, " bytes"),
                    absl::StrCat(carry.size(), " bytes"));
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
  int64_t staged_bytes = 0, in = 0, out = 0;
  for (const PayloadSpec& spec : specs) {
    std::byte* shared = payloads.shared_.shared[SharedNameOf(spec.field)];
    payloads.placed_.push_back({spec, shared, nullptr});
    if (shared != nullptr) continue;
    staged_bytes += AlignedSize(spec.bytes);
    if (spec.travels) (spec.is_input ? in : out) += spec.bytes;
  }
  RETURN_IF_ERROR(CheckMost(std::max(in, out), told, stream));
  ASSIGN_OR_RETURN(Ticket ticket, memory.admission.HoldStaging(memory.caller, staged_bytes));
  for (PlacedPayload& placed : payloads.placed_) {
    if (placed.data != nullptr) continue;
    const int64_t bytes = AlignedSize(placed.spec.bytes);
    ASSIGN_OR_RETURN(StagingBlock block, TakeBlock(bytes, memory.staging, memory.leases));
    placed.data = block.data();
    placed.block = std::make_shared<const StagedPayload>(
        StagedPayload{ticket.SplitOff(bytes), std::move(block)});
  }
  if (!told.carry.empty()) {
    RETURN_IF_ERROR(CheckCarry(told.carry));
    std::shared_ptr<Carriage> carriage = memory.carriages.Of(memory.caller, told.carry);
    RETURN_IF_ERROR(carriage->Admit(payloads.placed_));
    payloads.carriage_ = CarriageLead(std::move(carriage));
  }
  return payloads;
}

absl::Span<std::byte> Payloads::operator[](int field) const {
  for (const PlacedPayload& placed : placed_) {
    if (placed.spec.field != field) continue;
    return {placed.data, static_cast<size_t>(placed.spec.bytes)};
  }
  return {};
}

absl::Status Payloads::Receive(CallStream& stream, const google::protobuf::Descriptor& type,
                               const CallWait& wait) {
  if (carriage_.get() != nullptr) {
    RETURN_IF_ERROR(ReceiveCarried(stream, type, *carriage_.get()));
    return carriage_.get()->AwaitLanded(wait);
  }
  std::vector<TensorSpec> inputs;
  int64_t input_bytes = 0;
  for (const PlacedPayload& placed : placed_) {
    if (!placed.IsReceived()) continue;
    input_bytes += placed.spec.bytes;
    inputs.push_back(TensorOf(placed.spec));
    inputs.back().id = placed.spec.field;
  }
  ChunkSequence sequence(inputs);
  RETURN_IF_ERROR(ReadChunks(stream, type, [&](const ChunkPart& chunk, const auto& land) {
    ASSIGN_OR_RETURN(const int field, sequence.Take(chunk.tensor, chunk.offset, chunk.data.size));
    land((*this)[field].data() + chunk.offset, input_bytes);
    return absl::OkStatus();
  }));
  return BrokenOr(stream, sequence.CheckComplete());
}

absl::Status ReceiveCarried(CallStream& stream, const google::protobuf::Descriptor& type,
                            Carriage& carriage) {
  RETURN_IF_ERROR(ReadChunks(stream, type, [&](const ChunkPart& chunk, const auto& land) {
    ASSIGN_OR_RETURN(const Carriage::Place place,
                     carriage.Claim(chunk.tensor, chunk.offset, chunk.data.size));
    land(place.to, carriage.input_bytes());
    carriage.Landed(chunk.data.size);
    return absl::OkStatus();
  }));
  return stream.Broken();
}

absl::Status Payloads::Send(CallStream& stream, grpc::ByteBuffer header) {
  std::vector<ChunkQueue::Tensor> sent;
  for (PlacedPayload& placed : std::exchange(placed_, {})) {
    if (!placed.IsSent()) continue;
    sent.push_back({placed.spec.field, placed.data, placed.spec.bytes, std::move(placed.block)});
  }
  const auto chunks = std::make_shared<ChunkQueue>(std::move(sent));
  if (carriage_.get() != nullptr) carriage_.get()->Leave(chunks);
  const bool begun = stream.Write(std::move(header));
  return begun ? SendChunks(stream, *chunks) : BrokenOr(stream, CallerIsGone());
}

absl::Status SendChunks(CallStream& stream, ChunkQueue& chunks) {
  while (std::optional<grpc::ByteBuffer> chunk = chunks.Next()) {
    if (!stream.Write(*std::move(chunk))) return BrokenOr(stream, CallerIsGone());
  }
  return absl::OkStatus();
}

void Payloads::List(google::protobuf::RepeatedPtrField<v1::PayloadSize>& sizes) const {
  for (const PlacedPayload& placed : placed_) {
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
  if (!stream.Read(buffer)) return BrokenOr(stream, CallerIsGone());
  RETURN_IF_ERROR(CheckWhole(buffer));
  const MessageBytes message(buffer);
  return ReadPart(stream, message, {0, message.size()}, "", request);
}

absl::Status Reply(CallStream& stream, const google::protobuf::Message& response) {
  if (stream.Write(EncodeSmall(response))) return absl::OkStatus();
  return BrokenOr(stream, CallerIsGone());
}

absl::Status CallerIsGone() { return absl::CancelledError("the caller is gone"); }

absl::Status BrokenOr(const CallStream& stream, absl::Status otherwise) {
  absl::Status broken = stream.Broken();
  return broken.ok() ? std::move(otherwise) : broken;
}

}  // namespace attnd
