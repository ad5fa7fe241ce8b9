#include "server/chunk_sequence.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "server/status_details.h"

namespace attnd {
namespace {

const std::vector<TensorSource>& InputsOfTest() {
  static const auto* inputs = new std::vector<TensorSource>{
      {Tensor::kK, {0, 10}}, {Tensor::kV, {0, 4}}, {Tensor::kQ, {0, int64_t{9} << 20}}};
  return *inputs;
}
constexpr uint64_t kK = 20, kV = 21, kQ = 22;

void ExpectRefused(const absl::StatusOr<Tensor>& taken, absl::string_view reason,
                   const std::string& message) {
  EXPECT_EQ(taken.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(taken.status()), reason);
  EXPECT_EQ(taken.status().message(), message);
}

TEST(ChunkSequence, TakesEachPayloadFromItsFirstByteToItsLast) {
  ChunkSequence sequence(InputsOfTest());
  EXPECT_EQ(*sequence.Take(kK, 0, 7), Tensor::kK);
  EXPECT_EQ(*sequence.Take(kK, 7, 3), Tensor::kK);
  EXPECT_EQ(*sequence.Take(kV, 0, 4), Tensor::kV);
  EXPECT_FALSE(sequence.complete());
  EXPECT_EQ(*sequence.Take(kQ, 0, kMaxChunkBytes), Tensor::kQ);
  EXPECT_EQ(*sequence.Take(kQ, kMaxChunkBytes, kMaxChunkBytes), Tensor::kQ);
  EXPECT_EQ(*sequence.Take(kQ, 2 * kMaxChunkBytes, 1 << 20), Tensor::kQ);
  EXPECT_TRUE(sequence.complete());
  EXPECT_TRUE(sequence.CheckComplete().ok());
}

TEST(ChunkSequence, RefusesWhatIsNotNext) {
  ChunkSequence sequence(InputsOfTest());
  ASSERT_TRUE(sequence.Take(kK, 0, 4).ok());
  struct Case {
    uint64_t field, offset;
    int64_t size;
    absl::string_view reason;
    std::string message;
  };
  const Case cases[] = {
      {kK, 5, 1, reason::kChunkOrder, "chunk.offset: expected 4 of k, got 5"},  // a gap
      {kK, 3, 1, reason::kChunkOrder, "chunk.offset: expected 4 of k, got 3"},  // an overlap
      {kK, 0, 4, reason::kChunkOrder, "chunk.offset: expected 4 of k, got 0"},
      {kK, UINT64_MAX, 1, reason::kChunkOrder,
       "chunk.offset: expected 4 of k, got 18446744073709551615"},
      {kK, 4, 7, reason::kChunkOrder,
       "chunk.data: expected at most the 6 bytes that are left of k, got 7"},
      {kK, 4, 0, reason::kBadField, "chunk.data: expected 1..4194304 bytes, got 0"},
      {kV, 0, 4, reason::kChunkOrder, "chunk.tensor: expected 20 (k from byte 4), got 21"},
      {kV, 4, 4, reason::kChunkOrder, "chunk.tensor: expected 20 (k from byte 4), got 21"},
      {0, 4, 6, reason::kChunkOrder, "chunk.tensor: expected 20 (k from byte 4), got 0"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.message);
    ExpectRefused(sequence.Take(c.field, c.offset, c.size), c.reason, c.message);
  }
  EXPECT_EQ(*sequence.Take(kK, 4, 6), Tensor::kK);  // a refusal changes nothing
}

TEST(ChunkSequence, RefusesAChunkAboveItsLimitAndOneAfterTheLast) {
  ChunkSequence sequence(InputsOfTest());
  ASSERT_TRUE(sequence.Take(kK, 0, 10).ok());
  ASSERT_TRUE(sequence.Take(kV, 0, 4).ok());
  ExpectRefused(sequence.Take(kQ, 0, kMaxChunkBytes + 1), reason::kBadField,
                "chunk.data: expected 1..4194304 bytes, got 4194305");
  for (uint64_t mib = 0; mib < 9; ++mib) ASSERT_TRUE(sequence.Take(kQ, mib << 20, 1 << 20).ok());
  ExpectRefused(sequence.Take(kQ, 9 << 20, 1), reason::kChunkOrder,
                "chunk: expected half-close after the last payload, got a chunk of field 22");
}

TEST(ChunkSequence, NamesWhatIsMissingAtHalfClose) {
  ChunkSequence sequence(InputsOfTest());
  ASSERT_TRUE(sequence.Take(kK, 0, 9).ok());
  EXPECT_EQ(sequence.CheckComplete().message(),
            "k: expected 10 bytes in chunks before half-close, got 9");
}

// Whatever comes, what is taken are the payloads' bytes in their order, each once.
TEST(ChunkSequence, NeverTakesAByteTwiceOrOutOfTurnWhenChunksAreRandom) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    std::vector<TensorSource> inputs;
    for (Tensor tensor : {Tensor::kBias, Tensor::kK, Tensor::kV, Tensor::kQ}) {
      inputs.push_back({tensor, {0, 1 + static_cast<int64_t>(random() % 50)}});
    }
    ChunkSequence sequence(inputs);
    size_t current = 0;
    uint64_t position = 0;
    for (int step = 0; step < 200 && !sequence.complete(); ++step) {
      uint64_t turn = current == 0 ? 17 : 19 + current;
      bool next = random() % 3 != 0;  // otherwise anything
      uint64_t field = next ? turn : 15 + random() % 9;
      uint64_t offset = next ? position : random() % 60;
      uint64_t size = random() % 20;
      bool right = field == turn && offset == position && size >= 1 &&
                   position + size <= static_cast<uint64_t>(inputs[current].range.size);
      absl::StatusOr<Tensor> taken = sequence.Take(field, offset, static_cast<int64_t>(size));
      ASSERT_EQ(taken.ok(), right) << taken.status();
      if (!right) continue;
      EXPECT_EQ(*taken, inputs[current].tensor);
      position += size;
      if (position < static_cast<uint64_t>(inputs[current].range.size)) continue;
      position = 0;
      ++current;
    }
    EXPECT_EQ(sequence.complete(), current == inputs.size());
  }
}

}  // namespace
}  // namespace attnd
