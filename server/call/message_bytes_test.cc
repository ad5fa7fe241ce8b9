#include "server/call/message_bytes.h"

#include <google/protobuf/io/coded_stream.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/fixtures/sliced_buffer.h"

namespace attnd {
namespace {

std::string Text(const MessageBytes& message, ByteRange range) {
  std::string text;
  message.ForEachPiece(range, [&](absl::Span<const uint8_t> piece) {
    EXPECT_FALSE(piece.empty());
    text.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  });
  return text;
}

TEST(MessageBytes, GivesEveryRangeWhateverTheSlices) {
  const MessageBytes message(InSlices({"", "a", "bcd", "", "efghij", "k", ""}));
  const std::string whole = "abcdefghijk";
  ASSERT_EQ(message.size(), 11);
  int pieces = 0;
  message.ForEachPiece({0, 11}, [&](absl::Span<const uint8_t>) { ++pieces; });
  EXPECT_EQ(pieces, 4);
  for (int64_t begin = 0; begin <= 11; ++begin) {
    for (int64_t size = 0; begin + size <= 11; ++size) {
      EXPECT_EQ(Text(message, {begin, size}),
                whole.substr(static_cast<size_t>(begin), static_cast<size_t>(size)));
    }
  }
}

TEST(MessageBytes, StreamsARangeWithBackUpAndSkip) {
  const MessageBytes message(InSlices({"ab", "cdef", "g"}));
  MessageBytes::Stream stream(message, {1, 5});
  const void* data = nullptr;
  int size = 0;
  ASSERT_TRUE(stream.Next(&data, &size));
  EXPECT_EQ(std::string(static_cast<const char*>(data), static_cast<size_t>(size)), "b");
  stream.BackUp(1);
  EXPECT_EQ(stream.ByteCount(), 0);
  EXPECT_TRUE(stream.Skip(3));
  ASSERT_TRUE(stream.Next(&data, &size));
  EXPECT_EQ(std::string(static_cast<const char*>(data), static_cast<size_t>(size)), "ef");
  EXPECT_FALSE(stream.Next(&data, &size));
  EXPECT_FALSE(stream.Skip(1));
}

TEST(MessageBytes, FeedsACodedInputStreamByteByByte) {
  const MessageBytes message(InSlices({"\xac", "\x02", "x"}));  // the varint 300
  MessageBytes::Stream stream(message, {0, 3});
  google::protobuf::io::CodedInputStream in(&stream);
  uint32_t value = 0;
  ASSERT_TRUE(in.ReadVarint32(&value));
  EXPECT_EQ(value, 300u);
}

TEST(MessageBytes, IsEmptyWithoutABuffer) { EXPECT_EQ(MessageBytes(grpc::ByteBuffer()).size(), 0); }

}  // namespace
}  // namespace attnd
