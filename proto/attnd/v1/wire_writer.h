// WireWriter: appends protobuf fields to a string. For messages whose generated class would cost
// more than what it does: a receipt has 8 strings and 6 messages, each an allocation. Fields are
// those of the .proto; numbers of 0 and empty strings are left out, as proto3 does.
// Not thread-safe.
#pragma once

#include <google/protobuf/io/coded_stream.h>

#include <bit>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "proto/attnd/v1/wire_format.h"

namespace attnd {

class WireWriter {
 public:
  // Appends to `out`, which outlives it.
  explicit WireWriter(std::string& out) : out_(out) {}

  void Number(int field, uint64_t value) {
    if (value == 0) return;
    Tag(field, WireType::kVarint);
    Varint(value);
  }

  void Float(int field, float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if (bits == 0) return;
    Tag(field, WireType::kFixed32);
    uint8_t bytes[sizeof(bits)];
    CodedOutputStream::WriteLittleEndian32ToArray(bits, bytes);
    Append(bytes, bytes + sizeof(bits));
  }

  void Text(int field, absl::string_view text) {
    if (text.empty()) return;
    Length(field, text.size());
    out_.append(text.data(), text.size());
  }

  // Writes what stands before the `bytes` bytes of a field that comes from elsewhere.
  void Length(int field, uint64_t bytes) {
    Tag(field, WireType::kLengthDelimited);
    Varint(bytes);
  }

  // A message: `body()` writes its fields.
  template <class Body>
  void Message(int field, const Body& body) {
    Tag(field, WireType::kLengthDelimited);
    const size_t length_at = out_.size();
    out_.push_back(0);
    body();
    const size_t length = out_.size() - length_at - 1;
    uint8_t bytes[kMaxVarintBytes];
    uint8_t* end = CodedOutputStream::WriteVarint64ToArray(length, bytes);
    out_[length_at] = static_cast<char>(bytes[0]);
    if (end == bytes + 1) return;
    out_.insert(length_at + 1, reinterpret_cast<const char*>(bytes + 1), end - bytes - 1);
  }

 private:
  using CodedOutputStream = google::protobuf::io::CodedOutputStream;
  static constexpr int kMaxVarintBytes = 10;

  void Tag(int field, WireType type) { Varint(WireTag(field, type)); }
  void Varint(uint64_t value) {
    if (value < 0x80) return out_.push_back(static_cast<char>(value));  // most tags and lengths
    uint8_t bytes[kMaxVarintBytes];
    Append(bytes, CodedOutputStream::WriteVarint64ToArray(value, bytes));
  }
  void Append(const uint8_t* begin, const uint8_t* end) {
    out_.append(reinterpret_cast<const char*>(begin), static_cast<size_t>(end - begin));
  }

  std::string& out_;
};

}  // namespace attnd
