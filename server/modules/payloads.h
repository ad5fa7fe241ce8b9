// Payloads: the tensors of one Forward or Backward. They lie in memory that the caller shares,
// where the header says so, else in staging memory, and come and go in chunks. Made from what
// layout and rows imply, before any of them is read. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "google/protobuf/descriptor.h"
#include "proto/attnd/v1/module.pb.h"
#include "server/admission/admission.h"
#include "server/admission/staging_pool.h"
#include "server/call/call.h"
#include "server/call/message_bytes.h"
#include "server/modules/call_stream.h"
#include "server/modules/carriage.h"
#include "server/shared_memory/shared_memory.h"

namespace attnd {

// Strings of module messages: a layer's prefix and a parameter's name.
inline constexpr int64_t kMaxModuleString = 256;

// Fields of payloads.
inline constexpr int kMaskBitsField = 16, kMemoryField = 17, kXField = 20, kYField = 21;
inline constexpr int kDyField = 25, kDMemoryField = 26, kDxField = 27;

// The payloads of a call as its header announces them.
struct ToldPayloads {
  const google::protobuf::RepeatedPtrField<v1::PayloadSize>& sizes;
  const v1::SharedMemory* shared;  // null: none lies there
  const std::string& carry;        // empty: all chunks come in this stream

  template <class Header>
  static ToldPayloads In(const Header& header) {
    return {header.payload(), header.has_shared_memory() ? &header.shared_memory() : nullptr,
            header.carry()};
  }
};

// Where payloads may lie; the memory outlives them.
struct PayloadMemory {
  Admission& admission;  // counts staging memory as the caller's
  StagingPool& staging;
  MemoryReclaimer* leases;  // give way; null: there are none
  SharedMemoryTable& shared;
  Carriages& carriages;
  std::string caller;
};

class Payloads {
 public:
  // The sizes that are told have to be those of `specs`' inputs that come in chunks.
  // INVALID_ARGUMENT SIZE_MISMATCH, Admission::HoldStaging's, UNAVAILABLE MEMORY_PRESSURE,
  // SharedMemoryTable::Find's.
  static absl::StatusOr<Payloads> Make(std::vector<PayloadSpec> specs, const ToldPayloads& told,
                                       const PayloadMemory& memory, CallStream& stream);

  absl::Span<std::byte> operator[](int field) const;  // empty: there is none

  // The chunks until half-close, and those of the call's other streams. INVALID_ARGUMENT
  // CHUNK_ORDER, or what broke a stream.
  absl::Status Receive(CallStream& stream, const google::protobuf::Descriptor& type,
                       const CallWait& wait);
  // Last: `header`, already framed, then the outputs that go in chunks. Their memory comes back as
  // the peer reads them, that of the inputs at once.
  absl::Status Send(CallStream& stream, grpc::ByteBuffer header);
  // For the header of the reply.
  void List(google::protobuf::RepeatedPtrField<v1::PayloadSize>& sizes) const;

 private:
  absl::Status FindShared(const std::vector<PayloadSpec>& specs, const ToldPayloads& told,
                          const PayloadMemory& memory, CallStream& stream);

  CallMemory shared_;
  std::vector<PlacedPayload> placed_;
  CarriageLead carriage_;
};

// The name of a call for Carry: INVALID_ARGUMENT "carry".
inline constexpr size_t kMaxCarryBytes = 64;
absl::Status CheckCarry(const std::string& carry);

// One stream's chunks, until its half-close. INVALID_ARGUMENT CHUNK_ORDER, or what broke it.
absl::Status ReceiveCarried(CallStream& stream, const google::protobuf::Descriptor& type,
                            Carriage& carriage);
// Those that no other stream of the call sends.
absl::Status SendChunks(CallStream& stream, ChunkQueue& chunks);

// A message of a stream: which part it is, by its field, and where its bytes lie.
struct MessagePart {
  int field = 0;
  ByteRange range;
};
absl::StatusOr<MessagePart> PartOf(const MessageBytes& message,
                                   const google::protobuf::Descriptor& type);

// A PayloadChunk, its data not touched.
struct ChunkPart {
  uint64_t tensor = 0, offset = 0;
  ByteRange data;
};
absl::StatusOr<ChunkPart> ChunkOf(const MessageBytes& message, ByteRange range);

// A part of a message, called `path` in errors, with room in the stream for what it becomes.
absl::Status ReadPart(CallStream& stream, const MessageBytes& message, ByteRange range,
                      absl::string_view path, google::protobuf::Message& part);

// The stream's first message, which has to be its header.
absl::Status ReadHeader(CallStream& stream, const google::protobuf::Descriptor& type,
                        google::protobuf::Message& header);
// The only message of a unary or server-streaming call.
absl::Status ReadRequest(CallStream& stream, google::protobuf::Message& request);

// The only message of a unary or client-streaming reply.
absl::Status Reply(CallStream& stream, const google::protobuf::Message& response);

absl::Status CallerIsGone();
// Returns the status of a read or write that did not come about.
absl::Status BrokenOr(const CallStream& stream, absl::Status otherwise);

}  // namespace attnd
