#include "server/wire/decode_chunk.h"

#include <gtest/gtest.h>

#include <string>

#include "attention/random_problem.h"
#include "proto/attnd/v1/attention.pb.h"
#include "server/call/status_details.h"
#include "tests/fixtures/sliced_buffer.h"

namespace attnd {
namespace {

std::string BytesAt(const MessageBytes& message, ByteRange range) {
  std::string bytes;
  message.ForEachPiece(
      range, [&](absl::Span<const uint8_t> piece) { bytes.append(piece.begin(), piece.end()); });
  return bytes;
}

TEST(StreamMessage, FindsAChunksDataWhateverTheSlices) {
  v1::ForwardStreamRequest request;
  request.mutable_chunk()->set_tensor(20);
  request.mutable_chunk()->set_offset(uint64_t{1} << 40);
  request.mutable_chunk()->set_data("0123456789");
  for (size_t slice_bytes : {1, 2, 7, 1000}) {
    const MessageBytes message(InSlicesOf(request.SerializeAsString(), slice_bytes));
    auto part = ParseStreamMessage(message, Direction::kForward);
    ASSERT_TRUE(part.ok()) << part.status();
    EXPECT_FALSE(part->is_header);
    EXPECT_EQ(part->tensor, 20u);
    EXPECT_EQ(part->offset, uint64_t{1} << 40);
    EXPECT_EQ(BytesAt(message, part->range), "0123456789");
  }
}

TEST(StreamMessage, FindsTheHeader) {
  v1::BackwardStreamRequest request;
  request.mutable_header()->mutable_problem()->set_batch(3);
  const MessageBytes message(InSlicesOf(request.SerializeAsString(), 3));
  auto part = ParseStreamMessage(message, Direction::kBackward);
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_TRUE(part->is_header);
  EXPECT_EQ(BytesAt(message, part->range), request.header().SerializeAsString());
}

// So that its faults are named as a unary call's: problem.batch, not header.problem.batch.
TEST(StreamMessage, LeavesTheHeadersInsideToItsDecoder) {
  const std::string header("\x0a\x02\x18\x05", 4);  // header { want_lse: 5 }
  const MessageBytes message(InSlicesOf(header, 3));
  auto part = ParseStreamMessage(message, Direction::kForward);
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_TRUE(part->is_header);
  EXPECT_EQ(BytesAt(message, part->range), std::string("\x18\x05", 2));
}

TEST(StreamMessage, RefusesWhatIsNotOnePart) {
  v1::ForwardStreamRequest header, chunk;
  header.mutable_header();
  chunk.mutable_chunk()->set_data("x");
  std::string a = header.SerializeAsString(), b = chunk.SerializeAsString();
  struct Case {
    std::string bytes, message;
  };
  const Case cases[] = {
      {"", "part: expected a header or a chunk, got neither"},
      {a + b, "message: expected one member of part, got two"},
      {b + b, "chunk: expected at most one value, got two"},
      {std::string("\x18\x01", 2),
       "field_3: expected a field of attnd.v1.ForwardStreamRequest that this server knows, got "
       "number 3"},
      {std::string("\x12\x02\x38\x01", 4),
       "chunk.field_7: expected a field of attnd.v1.PayloadChunk that this server knows, got "
       "number 7"},
      {std::string("\x12\x02\x7a\x05", 4),
       "chunk.data: expected 5 bytes, got 0 before the message ends"},
  };
  for (const Case& c : cases) {
    auto part = ParseStreamMessage(MessageBytes(InSlicesOf(c.bytes, 5)), Direction::kForward);
    EXPECT_EQ(part.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(part.status().message(), c.message);
  }
}

// A status with its reason, or a part that lies within the message.
TEST(StreamMessage, SurvivesRandomDamage) {
  v1::ForwardStreamRequest chunk, header;
  chunk.mutable_chunk()->set_tensor(20);
  chunk.mutable_chunk()->set_offset(300);
  chunk.mutable_chunk()->set_data(std::string(40, 'x'));
  header.mutable_header()->mutable_problem()->set_batch(3);
  header.mutable_header()->mutable_options()->set_request_id("an id");
  const std::string messages[] = {chunk.SerializeAsString(), header.SerializeAsString(),
                                  chunk.SerializeAsString() + header.SerializeAsString()};
  Random random(5);
  auto below = [&](size_t size) {
    return static_cast<size_t>(random.Between(0, static_cast<int64_t>(size) - 1));
  };
  int refused = 0, taken = 0;
  for (int n = 0; n < 30000; ++n) {
    std::string bytes = messages[below(3)];
    for (int64_t flips = random.Between(0, 4); flips > 0; --flips) {
      bytes[below(bytes.size())] = static_cast<char>(random.Bits());
    }
    if (random.Chance(0.3)) bytes.resize(below(bytes.size()));
    const MessageBytes message(InSlicesOf(bytes, 1 + below(9)));
    const auto direction = random.Chance(0.5) ? Direction::kForward : Direction::kBackward;
    auto part = ParseStreamMessage(message, direction);
    if (!part.ok()) {
      ++refused;
      ASSERT_EQ(part.status().code(), absl::StatusCode::kInvalidArgument) << part.status();
      ASSERT_FALSE(ReasonOf(part.status()).empty()) << part.status();
      continue;
    }
    ++taken;
    ASSERT_GE(part->range.offset, 0);
    ASSERT_GE(part->range.size, 0);
    ASSERT_LE(part->range.offset + part->range.size, message.size());
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(taken, 1000);
}

}  // namespace
}  // namespace attnd
