// Walks a protobuf message by its descriptor before anything is parsed, and refuses what protobuf
// itself would silently drop, merge or truncate: unknown fields and enum values, wrong wire types,
// singular fields and oneofs given twice, numbers too wide for their type, truncated messages,
// absurd nesting and counts. Payload fields (top-level `bytes`) are noted as ranges and skipped.
// Errors: INVALID_ARGUMENT naming the field's path. Allocates only for an error. Any thread.
#pragma once

#include <google/protobuf/descriptor.h>

#include <array>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/call/message_bytes.h"

namespace attnd {

inline constexpr int kMaxFieldNumber = 31;  // of the messages checked here
// Entries of all lists of numbers in a message: room for two lists of batch + 1.
inline constexpr int64_t kMaxListEntries = (1 << 21) + 2;
// Sub-messages and strings of one message: room for rectangles.
inline constexpr int64_t kMaxNodes = 1 << 17;
inline constexpr int kMaxDepth = 48;
inline constexpr int64_t kMaxStringBytes = 64;
// Protobuf allocates so much at most for a sub-message or a string, beside what it holds.
inline constexpr int64_t kObjectBytes = 128;

// The top-level fields of one message, by number.
struct FieldTable {
  std::array<ByteRange, kMaxFieldNumber + 1> range = {};  // contents of length-delimited fields
  std::array<uint64_t, kMaxFieldNumber + 1> varint = {};
  uint32_t present = 0;  // bit n: field n was there
  bool known = false;    // the KnownField was there, and its bytes were the known ones
  // Protobuf allocates so much for the message beside numbers and the strings' bytes, which are in
  // proportion to the message: a sub-message of two bytes becomes an object of some hundred.
  int64_t object_bytes = 0;

  bool Has(int number) const { return (present >> number) & 1; }
};

// A sub-message that has been checked before if its bytes are these: then they are skipped and
// nothing inside them is noted. Without bytes none is known.
struct KnownField {
  int number = 0;
  absl::string_view bytes;
};

// Takes room in a call for the objects that its request becomes, before they are made.
using RequestRoom = absl::FunctionRef<absl::Status(int64_t object_bytes)>;

struct WireCheckOptions {
  KnownField known;
  absl::string_view path;  // what the message itself is called, before its fields' names
  // Sub-messages are noted as ranges and skipped: each will be checked by itself.
  bool outer_fields_only = false;
  int64_t max_string_bytes = kMaxStringBytes;
};

// `range` of `message` holds one message of `type`; the table's ranges are those of the whole.
absl::StatusOr<FieldTable> CheckWire(const MessageBytes& message, ByteRange range,
                                     const google::protobuf::Descriptor& type,
                                     const WireCheckOptions& options);

}  // namespace attnd
