#include "client/call/reply_decoder.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "attention/random_problem.h"
#include "tests/fixtures/sliced_buffer.h"

namespace attnd {
namespace {

constexpr int kO = v1::ForwardResponse::kOFieldNumber, kLse = v1::ForwardResponse::kLseFieldNumber;

// A message whose slices end wherever `seed` puts them.
grpc::ByteBuffer InRandomSlices(const std::string& bytes, uint64_t seed) {
  Random random(seed);
  std::vector<std::string> pieces;
  for (size_t at = 0; at < bytes.size(); at += pieces.back().size()) {
    pieces.push_back(bytes.substr(at, static_cast<size_t>(random.Between(1, 9))));
  }
  return InSlices(std::move(pieces));
}

struct Landed {
  std::string o = std::string(20, '?'), lse = std::string(8, '?');
  ReplyHeader header;
  absl::Status Decode(const grpc::ByteBuffer& message) {
    std::vector<ReplyPayload> payloads = {{kO, "o", StridedRuns::Make(0, {}, 20), o.data()},
                                          {kLse, "lse", StridedRuns::Make(0, {}, 8), lse.data()}};
    return DecodeReply(message, payloads, header);
  }
};

v1::ForwardResponse Reply() {
  v1::ForwardResponse reply;
  reply.mutable_receipt()->set_kernel("a kernel");
  reply.set_o("twenty bytes of an O");
  reply.set_lse("8 of lse");
  return reply;
}

TEST(DecodeReply, LandsPayloadsHoweverTheSlicesAreCut) {
  std::string bytes = Reply().SerializeAsString();
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Landed landed;
    ASSERT_EQ(landed.Decode(InRandomSlices(bytes, seed)), absl::OkStatus()) << "seed " << seed;
    EXPECT_EQ(landed.o, "twenty bytes of an O");
    EXPECT_EQ(landed.lse, "8 of lse");
    EXPECT_EQ(landed.header.receipt.kernel, "a kernel");
  }
}

TEST(DecodeReply, TakesFieldsInAnyOrderAndSkipsThoseItDoesNotKnow) {
  v1::ForwardResponse o, rest = Reply();
  o.set_o(rest.o());
  rest.clear_o();
  std::string unknown("\xa0\x06\x05\xaa\x06\x02hi", 8);  // fields 100 (varint), 101 (bytes)
  Landed landed;
  EXPECT_EQ(
      landed.Decode(InRandomSlices(o.SerializeAsString() + unknown + rest.SerializeAsString(), 1)),
      absl::OkStatus());
  EXPECT_EQ(landed.o, "twenty bytes of an O");
}

TEST(DecodeReply, NamesThePayloadThatIsWrong) {
  auto error = [](const std::string& bytes) {
    absl::Status status = Landed().Decode(InRandomSlices(bytes, 1));
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    return std::string(status.message());
  };
  v1::ForwardResponse reply = Reply();
  reply.set_o("nineteen bytes of O");
  EXPECT_EQ(error(reply.SerializeAsString()), "reply: o: expected 20 bytes, got 19");
  reply.clear_o();
  EXPECT_EQ(error(reply.SerializeAsString()), "reply: o: is missing");
  reply = Reply();
  reply.clear_receipt();
  reply.clear_o();
  EXPECT_EQ(error(Reply().SerializeAsString() + reply.SerializeAsString()),
            "reply: lse: stands twice");
  EXPECT_EQ(error(""), "reply: o: is missing");
}

// Only a message cut between fields can be whole in itself, and then a payload is missing.
TEST(DecodeReply, RefusesEveryTruncation) {
  std::string bytes = Reply().SerializeAsString();
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(Landed().Decode(InRandomSlices(bytes.substr(0, size), size)).code(),
              absl::StatusCode::kDataLoss)
        << size;
  }
}

TEST(DecodeReply, SurvivesRandomBytes) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    std::string bytes = Reply().SerializeAsString();
    for (int n = 0; n < 4; ++n) {
      bytes[random.Between(0, bytes.size() - 1)] = static_cast<char>(random.Bits());
    }
    Landed landed;  // any status: what counts is that nothing is written outside (ASan)
    landed.Decode(InRandomSlices(bytes, seed)).IgnoreError();
    EXPECT_EQ(landed.o.size(), 20u);
  }
}

}  // namespace
}  // namespace attnd
