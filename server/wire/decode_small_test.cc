#include "server/wire/decode_small.h"

#include <gtest/gtest.h>

#include <string>

#include "proto/attnd/v1/attention.pb.h"
#include "server/call/status_details.h"
#include "tests/fixtures/sliced_buffer.h"

namespace attnd {
namespace {

struct BadMessage {
  const char* name;
  std::string bytes;
  const char* message;
};

TEST(DecodeSmall, NamesWhatIsWrong) {
  const BadMessage cases[] = {
      {"garbage", "\xff\xff\xff", "message: expected a field's tag, got bytes that are none"},
      {"truncated", std::string("\x0a\x05zz", 4),
       "token: expected 5 bytes, got 2 before the message ends"},
      {"unknown field", std::string("\x48\x01", 2),
       "field_9: expected a field of attnd.v1.RenewResidualRequest that this server knows, got "
       "number 9"},
      {"twice", std::string("\x10\x01\x10\x02", 4), "ttl_ms: expected at most one value, got two"},
      {"a wide number", std::string("\x10\x80\x80\x80\x80\x10", 6),
       "ttl_ms: expected a number of 32 bits, got 4294967296"},
  };
  for (const BadMessage& one : cases) {
    v1::RenewResidualRequest request;
    absl::Status status = DecodeSmall(InSlicesOf(one.bytes, 3), AnyRoom, request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << one.name;
    EXPECT_EQ(status.message(), one.message) << one.name;
    EXPECT_FALSE(ReasonOf(status).empty()) << one.name;
  }
}

TEST(DecodeSmall, TakesWhatIsRightAndNothing) {
  v1::RenewResidualRequest sent, got;
  sent.set_token("t");
  sent.set_ttl_ms(7);
  ASSERT_TRUE(DecodeSmall(EncodeSmall(sent), AnyRoom, got).ok());
  EXPECT_EQ(got.token(), "t");
  EXPECT_EQ(got.ttl_ms(), 7u);
  EXPECT_TRUE(DecodeSmall(grpc::ByteBuffer(), AnyRoom, got).ok());
  EXPECT_EQ(got.ttl_ms(), 0u);
}

TEST(CheckWhole, TellsNoMessageFromAnEmptyOne) {
  EXPECT_TRUE(CheckWhole(EncodeSmall(v1::GetServerInfoRequest())).ok());
  const absl::Status none = CheckWhole(grpc::ByteBuffer());
  EXPECT_EQ(none.message(), "message: expected a whole message, got a part of one");
  EXPECT_EQ(ReasonOf(none), reason::kMalformedMessage);
}

TEST(DecodeSmall, MakesNoObjectsWithoutRoomForThem) {
  v1::ReleaseResidualRequest sent, got;
  for (int n = 0; n < 100; ++n) sent.add_tokens("t");
  int64_t wanted = 0;
  const absl::Status refused = DecodeSmall(
      EncodeSmall(sent),
      [&](int64_t bytes) {
        wanted = bytes;
        return absl::ResourceExhaustedError("no room");
      },
      got);
  EXPECT_EQ(refused.message(), "no room");
  EXPECT_EQ(wanted, 100 * kObjectBytes);
  EXPECT_EQ(got.tokens_size(), 0);
}

TEST(CheckEmpty, PassesUnknownFieldsButNoGarbage) {
  EXPECT_TRUE(CheckEmpty(InSlicesOf(std::string("\x48\x01", 2), 1)).ok());
  EXPECT_TRUE(CheckEmpty(grpc::ByteBuffer()).ok());
  for (const char* bytes : {"\xff", "\x48", "\x0a\x05zz", "\x0b"}) {
    const absl::Status status = CheckEmpty(InSlicesOf(bytes, 1));
    EXPECT_EQ(status.message(), "message: expected a protobuf message, got bytes that are none");
  }
}

}  // namespace
}  // namespace attnd
