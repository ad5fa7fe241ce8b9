#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "attention/random_problem.h"
#include "client/call/chunk_source.h"
#include "client/call/stream_reply.h"
#include "proto/attnd/v1/chunk_framing.h"
#include "tests/fixtures/sliced_buffer.h"

namespace attnd {
namespace {

constexpr int kK = v1::ForwardRequest::kKFieldNumber, kQ = v1::ForwardRequest::kQFieldNumber;
constexpr int kFieldO = v1::ForwardResponse::kOFieldNumber,
              kFieldLse = v1::ForwardResponse::kLseFieldNumber;

std::string RandomBytes(int64_t size, uint64_t seed) {
  Random random(seed);
  std::string bytes(static_cast<size_t>(size), 0);
  for (char& byte : bytes) byte = static_cast<char>(random.Between(0, 255));
  return bytes;
}

v1::ForwardStreamRequest Parsed(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(message.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) bytes.append(slice.begin(), slice.end());
  v1::ForwardStreamRequest parsed;
  EXPECT_TRUE(parsed.ParseFromString(bytes));
  return parsed;
}

// Returns the bytes of the runs, end to end.
std::string Gathered(const StridedRuns& runs, const std::string& tensor) {
  std::string bytes(static_cast<size_t>(runs.total_bytes()), 0);
  Gather(runs, reinterpret_cast<const std::byte*>(tensor.data()),
         reinterpret_cast<std::byte*>(bytes.data()));
  return bytes;
}

TEST(ChunkSource, SendsTheHeaderThenEachPayloadWhateverItsRunsAndTheChunks) {
  const std::string tensor = RandomBytes(200000, 1);
  const StridedRuns cases[] = {
      StridedRuns::Make(0, {}, 1), StridedRuns::Make(5, {}, 100001),
      StridedRuns::Make(0, {{{3, 60000}, {1, 0}, {2, 20000}}}, 9001),  // in place
      StridedRuns::Make(7, {{{2, 90000}, {5, 3000}, {7, 200}}}, 33)};  // gathered
  for (const StridedRuns& runs : cases) {
    for (int64_t chunk_bytes : {int64_t{1000}, int64_t{9001}, kMaxChunkBytes}) {
      SCOPED_TRACE(testing::Message() << runs.run_bytes << " in chunks of " << chunk_bytes);
      BorrowedSlices borrowed;
      std::vector<v1::ForwardStreamRequest> messages;
      {
        ChunkSource source("", borrowed, chunk_bytes);
        source.AddPayload(kK, runs, tensor.data());
        source.AddPayload(kQ, StridedRuns::Make(0, {}, 3), tensor.data());
        while (!source.done()) messages.push_back(Parsed(source.Next()));
        EXPECT_EQ(source.payload_bytes(), runs.total_bytes() + 3);
        EXPECT_EQ(source.copied_bytes(), (runs.run_bytes < 8192 ? runs.total_bytes() : 0) + 3);
      }
      EXPECT_TRUE(borrowed.AllReturned());
      EXPECT_TRUE(messages[0].has_header());
      std::string k;
      for (size_t n = 1; n + 1 < messages.size(); ++n) {
        EXPECT_EQ(messages[n].chunk().tensor(), kK);
        EXPECT_EQ(messages[n].chunk().offset(), k.size());
        EXPECT_LE(static_cast<int64_t>(messages[n].chunk().data().size()), chunk_bytes);
        k += messages[n].chunk().data();
      }
      EXPECT_TRUE(k == Gathered(runs, tensor));
      EXPECT_EQ(messages.back().chunk().tensor(), kQ);
      EXPECT_EQ(messages.back().chunk().data(), tensor.substr(0, 3));
    }
  }
}

v1::ForwardStreamResponse Header() {
  v1::ForwardStreamResponse message;
  message.mutable_header()->mutable_receipt()->set_kernel("a kernel");
  return message;
}

v1::ForwardStreamResponse Chunk(int tensor, uint64_t offset, const std::string& data) {
  v1::ForwardStreamResponse message;
  message.mutable_chunk()->set_tensor(static_cast<uint32_t>(tensor));
  message.mutable_chunk()->set_offset(offset);
  message.mutable_chunk()->set_data(data);
  return message;
}

struct Arrays {
  std::string o = std::string(20, '?'), lse = std::string(8, '?');
  StreamReply reply{{{kFieldO, "o", StridedRuns::Make(0, {}, 20), o.data()},
                     {kFieldLse, "lse", StridedRuns::Make(0, {}, 8), lse.data()}}};

  // In slices of `slice_bytes`.
  absl::Status Take(const v1::ForwardStreamResponse& message, size_t slice_bytes = 7) {
    return reply.Take(InSlicesOf(message.SerializeAsString(), slice_bytes));
  }
};

TEST(StreamReply, LandsChunksHoweverTheyAreCut) {
  for (size_t slice_bytes : {1, 2, 5, 1000}) {
    Arrays arrays;
    ASSERT_TRUE(arrays.Take(Header(), slice_bytes).ok());
    ASSERT_TRUE(arrays.Take(Chunk(kFieldLse, 0, "8 of lse"), slice_bytes).ok());
    ASSERT_TRUE(arrays.Take(Chunk(kFieldO, 0, "twenty"), slice_bytes).ok());
    EXPECT_FALSE(arrays.reply.CheckComplete().ok());
    ASSERT_TRUE(arrays.Take(Chunk(kFieldO, 6, " bytes of an O"), slice_bytes).ok());
    EXPECT_TRUE(arrays.reply.CheckComplete().ok());
    EXPECT_EQ(arrays.o, "twenty bytes of an O");
    EXPECT_EQ(arrays.lse, "8 of lse");
    EXPECT_EQ(arrays.reply.header().receipt.kernel, "a kernel");
  }
}

TEST(StreamReply, NamesWhatIsWrong) {
  auto error = [](const std::vector<v1::ForwardStreamResponse>& messages) {
    Arrays arrays;
    absl::Status status;
    for (const auto& message : messages) {
      if (status.ok()) status = arrays.Take(message);
    }
    if (status.ok()) status = arrays.reply.CheckComplete();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    return std::string(status.message());
  };
  EXPECT_EQ(error({}), "reply: header: is missing");
  EXPECT_EQ(error({Header(), Header()}), "reply: header: stands twice or is cut off");
  EXPECT_EQ(error({Header()}), "reply: o: expected 20 bytes, got 0");
  EXPECT_EQ(error({Chunk(kFieldO, 0, "ab"), Chunk(kFieldO, 3, "c")}),
            "reply: o: expected a chunk from byte 2, got 3");
  EXPECT_EQ(error({Chunk(kFieldO, 0, std::string(21, 'x'))}),
            "reply: o: expected at most 20 more bytes");
  EXPECT_EQ(error({Chunk(99, 0, "x")}), "reply: chunk of field 99");
}

}  // namespace
}  // namespace attnd
