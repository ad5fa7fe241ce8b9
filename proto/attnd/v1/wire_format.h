// The protobuf wire format, for code that reads or writes messages without their generated classes:
// each field is a varint tag (its number and its wire type) and a value.
// Source: protobuf.dev/programming-guides/encoding. Any thread.
#pragma once

#include <google/protobuf/io/coded_stream.h>

#include <cstdint>

namespace attnd {

enum class WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kLengthDelimited = 2,
  kStartGroup = 3,  // proto2 alone has groups
  kEndGroup = 4,
  kFixed32 = 5,
};

constexpr uint32_t WireTag(int field, WireType type) {
  return static_cast<uint32_t>(field) << 3 | static_cast<uint32_t>(type);
}
constexpr int FieldNumberOf(uint32_t tag) { return static_cast<int>(tag >> 3); }
constexpr WireType WireTypeOf(uint32_t tag) { return static_cast<WireType>(tag & 7); }

// Skips the value behind `tag`; false when it is cut off or no field's of proto3.
inline bool SkipValue(google::protobuf::io::CodedInputStream& in, uint32_t tag) {
  uint64_t number;
  int size;
  if (FieldNumberOf(tag) == 0) return false;
  switch (WireTypeOf(tag)) {
    case WireType::kVarint:
      return in.ReadVarint64(&number);
    case WireType::kFixed64:
      return in.Skip(8);
    case WireType::kLengthDelimited:
      return in.ReadVarintSizeAsInt(&size) && in.Skip(size);
    case WireType::kFixed32:
      return in.Skip(4);
    default:
      return false;
  }
}

}  // namespace attnd
