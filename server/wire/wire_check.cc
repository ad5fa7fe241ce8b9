#include "server/wire/wire_check.h"

#include <google/protobuf/io/coded_stream.h>

#include <cstring>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/attnd/v1/enum_names.h"
#include "proto/attnd/v1/wire_format.h"
#include "server/call/status_details.h"

namespace attnd {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::io::CodedInputStream;

// Where we are, for error texts: a list on the stack, turned into a string only when needed.
struct Path {
  const Path* parent = nullptr;
  const FieldDescriptor* field = nullptr;
  absl::string_view root = "";  // where there is no field: what the message is called

  std::string Text() const {
    return field == nullptr ? std::string(root) : parent->Inner(field->name());
  }
  // The path of a field inside this message.
  std::string Inner(absl::string_view name) const {
    std::string text = Text();
    return text.empty() ? std::string(name) : absl::StrCat(text, ".", name);
  }
  std::string TextOrMessage() const {
    std::string text = Text();
    return text.empty() ? "message" : text;
  }
};

constexpr absl::string_view WireTypeName(WireType wire_type) {
  switch (wire_type) {
    case WireType::kVarint:
      return "varint";
    case WireType::kFixed64:
      return "fixed64";
    case WireType::kLengthDelimited:
      return "length-delimited";
    case WireType::kFixed32:
      return "fixed32";
    default:
      return "a group or an invalid wire type";
  }
}

WireType ExpectedWireType(const FieldDescriptor& field) {
  switch (field.type()) {
    case FieldDescriptor::TYPE_DOUBLE:
    case FieldDescriptor::TYPE_FIXED64:
    case FieldDescriptor::TYPE_SFIXED64:
      return WireType::kFixed64;
    case FieldDescriptor::TYPE_FLOAT:
    case FieldDescriptor::TYPE_FIXED32:
    case FieldDescriptor::TYPE_SFIXED32:
      return WireType::kFixed32;
    case FieldDescriptor::TYPE_STRING:
    case FieldDescriptor::TYPE_BYTES:
    case FieldDescriptor::TYPE_MESSAGE:
      return WireType::kLengthDelimited;
    case FieldDescriptor::TYPE_GROUP:
      return WireType::kStartGroup;
    default:
      return WireType::kVarint;
  }
}

class Checker {
 public:
  // `begin`: where the message begins in the bytes that the table speaks of.
  Checker(CodedInputStream& in, int64_t begin, const WireCheckOptions& options, FieldTable& table)
      : in_(in), begin_(begin), options_(options), table_(table) {}

  // Checks fields until the current limit.
  absl::Status Message(const Descriptor& type, const Path& path, int depth);

 private:
  // Which singular fields and oneofs of one message have been seen.
  struct Seen {
    uint64_t fields = 0;
    uint32_t oneofs = 0;
  };
  absl::Status Field(const FieldDescriptor& field, WireType wire_type, const Path& path, int depth);
  absl::Status Once(const FieldDescriptor& field, const Path& path, Seen& seen);
  absl::Status LengthDelimited(const FieldDescriptor& field, const Path& path, int depth);
  absl::Status Length(const Path& path, int* size);
  absl::Status SubMessage(const FieldDescriptor& field, const Path& path, int depth);
  bool SkipKnown(const FieldDescriptor& field, int size);
  absl::Status PackedList(const FieldDescriptor& field, const Path& path);
  absl::Status Varint(const FieldDescriptor& field, const Path& path, uint64_t* value);
  absl::Status VarintInRange(const FieldDescriptor& field, const Path& path, uint64_t value);
  absl::Status SkipFixed(const Path& path, int width);
  absl::Status CountEntry(const Path& path);
  absl::Status Truncated(const Path& path, uint64_t wanted);

  CodedInputStream& in_;
  const int64_t begin_;
  const WireCheckOptions& options_;
  FieldTable& table_;
  int64_t nodes_ = 0;
  int64_t entries_ = 0;
};

absl::Status Checker::Truncated(const Path& path, uint64_t wanted) {
  return FieldError(reason::kMalformedMessage, path.TextOrMessage(), absl::StrCat(wanted, " bytes"),
                    absl::StrCat(in_.BytesUntilLimit(), " before the message ends"));
}

absl::Status Checker::Message(const Descriptor& type, const Path& path, int depth) {
  Seen seen;
  while (in_.BytesUntilLimit() > 0) {
    uint32_t tag = in_.ReadTagNoLastTag();
    int number = FieldNumberOf(tag);
    if (number == 0) {
      return FieldError(reason::kMalformedMessage, path.TextOrMessage(), "a field's tag",
                        "bytes that are none");
    }
    const FieldDescriptor* field = type.FindFieldByNumber(number);
    if (field == nullptr) {
      return FieldError(reason::kUnknownField, path.Inner(absl::StrCat("field_", number)),
                        absl::StrCat("a field of ", type.full_name(), " that this server knows"),
                        absl::StrCat("number ", number));
    }
    Path here{&path, field};
    RETURN_IF_ERROR(Once(*field, here, seen));
    if (depth == 0 && number <= kMaxFieldNumber) table_.present |= uint32_t{1} << number;
    RETURN_IF_ERROR(Field(*field, WireTypeOf(tag), here, depth));
  }
  return absl::OkStatus();
}

absl::Status Checker::Once(const FieldDescriptor& field, const Path& path, Seen& seen) {
  if (field.is_repeated()) return absl::OkStatus();
  uint64_t bit = uint64_t{1} << field.index();
  if (seen.fields & bit) {
    return FieldError(reason::kMalformedMessage, path.Text(), "at most one value", "two");
  }
  seen.fields |= bit;
  const auto* oneof = field.real_containing_oneof();
  if (oneof == nullptr) return absl::OkStatus();
  uint32_t oneof_bit = uint32_t{1} << oneof->index();
  if (seen.oneofs & oneof_bit) {
    return FieldError(reason::kMalformedMessage, path.parent->TextOrMessage(),
                      absl::StrCat("one member of ", oneof->name()), "two");
  }
  seen.oneofs |= oneof_bit;
  return absl::OkStatus();
}

absl::Status Checker::Field(const FieldDescriptor& field, WireType wire_type, const Path& path,
                            int depth) {
  if (field.is_packable() && wire_type == WireType::kLengthDelimited) {
    return PackedList(field, path);
  }
  const WireType expected = ExpectedWireType(field);
  if (wire_type != expected) {
    return FieldError(reason::kMalformedMessage, path.Text(),
                      absl::StrCat("wire type ", WireTypeName(expected)), WireTypeName(wire_type));
  }
  if (field.is_repeated()) RETURN_IF_ERROR(CountEntry(path));
  switch (wire_type) {
    case WireType::kVarint: {
      uint64_t value = 0;
      RETURN_IF_ERROR(Varint(field, path, &value));
      if (depth == 0 && field.number() <= kMaxFieldNumber) table_.varint[field.number()] = value;
      return absl::OkStatus();
    }
    case WireType::kFixed32:
      return SkipFixed(path, 4);
    case WireType::kFixed64:
      return SkipFixed(path, 8);
    default:
      return LengthDelimited(field, path, depth);
  }
}

// The length before a string, a list or a message; never more than what is there.
absl::Status Checker::Length(const Path& path, int* size) {
  uint64_t wanted = 0;
  if (!in_.ReadVarint64(&wanted)) {
    return FieldError(reason::kMalformedMessage, path.TextOrMessage(), "a length",
                      "truncated bytes");
  }
  if (wanted > static_cast<uint64_t>(in_.BytesUntilLimit())) return Truncated(path, wanted);
  *size = static_cast<int>(wanted);
  return absl::OkStatus();
}

absl::Status Checker::LengthDelimited(const FieldDescriptor& field, const Path& path, int depth) {
  if (++nodes_ > kMaxNodes) {
    return FieldError(reason::kBadField, path.Text(),
                      absl::StrCat("at most ", kMaxNodes, " messages and strings inside one"),
                      "more");
  }
  table_.object_bytes += kObjectBytes;
  if (field.type() == FieldDescriptor::TYPE_MESSAGE) return SubMessage(field, path, depth);
  int size = 0;
  RETURN_IF_ERROR(Length(path, &size));
  if (field.type() == FieldDescriptor::TYPE_STRING && size > options_.max_string_bytes) {
    return FieldError(reason::kBadField, path.Text(),
                      absl::StrCat("at most ", options_.max_string_bytes, " bytes"),
                      absl::StrCat(size));
  }
  if (depth == 0 && field.number() <= kMaxFieldNumber) {
    table_.range[field.number()] = {begin_ + in_.CurrentPosition(), size};
  }
  return in_.Skip(size) ? absl::OkStatus() : Truncated(path, size);
}

absl::Status Checker::SubMessage(const FieldDescriptor& field, const Path& path, int depth) {
  int size = 0;
  RETURN_IF_ERROR(Length(path, &size));
  if (depth + 1 > kMaxDepth) {
    return FieldError(reason::kBadField, path.parent->TextOrMessage(),
                      absl::StrCat("at most ", kMaxDepth, " levels of nesting"), "more");
  }
  if (depth == 0 && field.number() <= kMaxFieldNumber) {
    table_.range[field.number()] = {begin_ + in_.CurrentPosition(), size};
    if (options_.outer_fields_only && in_.Skip(size)) return absl::OkStatus();
    if (SkipKnown(field, size)) return absl::OkStatus();
  }
  CodedInputStream::Limit outer = in_.PushLimit(size);
  RETURN_IF_ERROR(Message(*field.message_type(), path, depth + 1));
  in_.PopLimit(outer);
  return absl::OkStatus();
}

// Where they lie in one piece.
bool Checker::SkipKnown(const FieldDescriptor& field, int size) {
  const void* bytes = nullptr;
  int available = 0;
  const auto& [number, known] = options_.known;
  if (known.empty() || field.number() != number || size != static_cast<int>(known.size())) {
    return false;
  }
  table_.known = in_.GetDirectBufferPointer(&bytes, &available) && available >= size &&
                 std::memcmp(bytes, known.data(), known.size()) == 0;
  return table_.known && in_.Skip(size);
}

absl::Status Checker::PackedList(const FieldDescriptor& field, const Path& path) {
  int size = 0;
  RETURN_IF_ERROR(Length(path, &size));
  const WireType wire_type = ExpectedWireType(field);
  if (wire_type != WireType::kVarint) {
    int width = wire_type == WireType::kFixed32 ? 4 : 8;
    if (size % width == 0 && in_.Skip(size)) return absl::OkStatus();
    return FieldError(reason::kMalformedMessage, path.Text(),
                      absl::StrCat("a multiple of ", width, " bytes"), absl::StrCat(size));
  }
  CodedInputStream::Limit outer = in_.PushLimit(size);
  while (in_.BytesUntilLimit() > 0) {
    uint64_t value = 0;
    RETURN_IF_ERROR(CountEntry(path));
    RETURN_IF_ERROR(Varint(field, path, &value));
  }
  in_.PopLimit(outer);
  return absl::OkStatus();
}

absl::Status Checker::SkipFixed(const Path& path, int width) {
  if (in_.BytesUntilLimit() < width) return Truncated(path, width);
  return in_.Skip(width) ? absl::OkStatus() : Truncated(path, width);
}

absl::Status Checker::CountEntry(const Path& path) {
  if (++entries_ <= kMaxListEntries) return absl::OkStatus();
  return FieldError(reason::kBadField, path.Text(),
                    absl::StrCat("at most ", kMaxListEntries, " list entries in a message"),
                    "more");
}

absl::Status Checker::Varint(const FieldDescriptor& field, const Path& path, uint64_t* value) {
  if (!in_.ReadVarint64(value)) {
    return FieldError(reason::kMalformedMessage, path.Text(), "a varint", "truncated bytes");
  }
  return VarintInRange(field, path, *value);
}

// protobuf would drop the upper bits: 2^32 + 1 would become 1.
absl::Status Checker::VarintInRange(const FieldDescriptor& field, const Path& path,
                                    uint64_t value) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      if (value <= 1) return absl::OkStatus();
      return FieldError(reason::kBadField, path.Text(), "0 or 1", absl::StrCat(value));
    case FieldDescriptor::CPPTYPE_ENUM: {
      bool known = value <= std::numeric_limits<int32_t>::max() &&
                   field.enum_type()->FindValueByNumber(static_cast<int>(value)) != nullptr;
      if (known) return absl::OkStatus();
      return Classified(absl::InvalidArgumentError(
          absl::StrCat(path.Text(), ": expected ", EnumNames(*field.enum_type()), ", got ",
                       static_cast<int64_t>(value))));
    }
    case FieldDescriptor::CPPTYPE_UINT32:
    case FieldDescriptor::CPPTYPE_INT32:  // only sint32 stands in the proto: zigzag, 32 bits
      if (value <= std::numeric_limits<uint32_t>::max()) return absl::OkStatus();
      return Classified(absl::InvalidArgumentError(
          absl::StrCat(path.Text(), ": expected a number of 32 bits, got ", value)));
    default:
      return absl::OkStatus();
  }
}

}  // namespace

absl::StatusOr<FieldTable> CheckWire(const MessageBytes& message, ByteRange range,
                                     const Descriptor& type, const WireCheckOptions& options) {
  if (range.size > std::numeric_limits<int>::max()) {
    return FieldError(reason::kMalformedMessage, "message", "at most 2147483647 bytes",
                      absl::StrCat(range.size));
  }
  FieldTable table;
  MessageBytes::Stream stream(message, range);
  CodedInputStream in(&stream);
  in.PushLimit(static_cast<int>(range.size));
  RETURN_IF_ERROR(
      Checker(in, range.offset, options, table).Message(type, Path{.root = options.path}, 0));
  return table;
}

}  // namespace attnd
