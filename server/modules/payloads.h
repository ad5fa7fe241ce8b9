// Payloads: the tensors of one Forward or Backward, in staging memory: those that come in chunks,
// and those that go out in chunks. Made from what layout and rows imply, before any of them is
// read. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "google/protobuf/descriptor.h"
#include "proto/attnd/v1/module.pb.h"
#include "server/admission/staging_pool.h"
#include "server/call/message_bytes.h"
#include "server/modules/call_stream.h"

namespace attnd {

// Strings of module messages: a layer's prefix and a parameter's name.
inline constexpr int64_t kMaxModuleString = 256;

// Fields of payloads.
inline constexpr int kMaskBitsField = 16, kMemoryField = 17, kXField = 20, kYField = 21;
inline constexpr int kDyField = 25, kDMemoryField = 26, kDxField = 27;

struct PayloadSpec {
  int field;
  absl::string_view name;
  int64_t bytes;
  bool is_input;
};

class Payloads {
 public:
  // `told`: the header's list, which has to be that of `specs`' inputs. INVALID_ARGUMENT
  // SIZE_MISMATCH, UNAVAILABLE MEMORY_PRESSURE.
  static absl::StatusOr<Payloads> Make(
      std::vector<PayloadSpec> specs,
      const google::protobuf::RepeatedPtrField<v1::PayloadSize>& told, StagingPool& pool);

  absl::Span<std::byte> operator[](int field) const;  // empty: there is none

  // Gives the memory of one back; it does not travel.
  void Forget(int field);

  // The chunks until half-close. INVALID_ARGUMENT CHUNK_ORDER, or what broke the stream.
  absl::Status Receive(CallStream& stream, const google::protobuf::Descriptor& type);
  // `header`, already framed, then the outputs.
  absl::Status Send(CallStream& stream, grpc::ByteBuffer header) const;
  // For the header of the reply.
  void List(google::protobuf::RepeatedPtrField<v1::PayloadSize>& sizes) const;

 private:
  struct Placed {
    PayloadSpec spec;
    StagingBlock block;
  };
  std::vector<Placed> placed_;
};

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

// The stream's first message, which has to be its header.
absl::Status ReadHeader(CallStream& stream, const google::protobuf::Descriptor& type,
                        google::protobuf::Message& header);
// The only message of a unary or server-streaming call.
absl::Status ReadRequest(CallStream& stream, google::protobuf::Message& request);

// The only message of a unary or client-streaming reply.
absl::Status Reply(CallStream& stream, const google::protobuf::Message& response);

// Of a read or write that did not come about.
absl::Status BrokenOr(const CallStream& stream, absl::Status otherwise);

}  // namespace attnd
