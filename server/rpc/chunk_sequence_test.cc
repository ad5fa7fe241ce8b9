#include "server/rpc/chunk_sequence.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "server/call/status_details.h"

namespace attnd {
namespace {

constexpr int kK = 20, kV = 21, kQ = 22;  // fields; ids are theirs here plus a hundred
constexpr int kIdOf = 100;

TensorSpec Input(int field, absl::string_view name, int64_t bytes) {
  return {.id = kIdOf + field, .field = field, .name = name, .bytes = bytes};
}

// With tensors that are no chunk's: one that is kept, one of no bytes, and an output.
TensorList TensorsOfTest() {
  TensorList tensors = {Input(17, "bias", 5),
                        Input(kK, "k", 10),
                        Input(kV, "v", 4),
                        Input(18, "empty", 0),
                        Input(kQ, "q", int64_t{9} << 20),
                        Input(20, "o", 10)};
  tensors.front().role = TensorUse::kKept;
  tensors.back().role = TensorUse::kOutput;
  return tensors;
}

void ExpectRefused(const absl::StatusOr<int>& taken, absl::string_view reason,
                   const std::string& message) {
  EXPECT_EQ(taken.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(taken.status()), reason);
  EXPECT_EQ(taken.status().message(), message);
}

TEST(ChunkSequence, TakesEachPayloadFromItsFirstByteToItsLast) {
  ChunkSequence sequence(TensorsOfTest());
  EXPECT_EQ(*sequence.Take(kK, 0, 7), kIdOf + kK);
  EXPECT_EQ(*sequence.Take(kK, 7, 3), kIdOf + kK);
  EXPECT_EQ(*sequence.Take(kV, 0, 4), kIdOf + kV);
  EXPECT_FALSE(sequence.complete());
  EXPECT_EQ(*sequence.Take(kQ, 0, kMaxChunkBytes), kIdOf + kQ);
  EXPECT_EQ(*sequence.Take(kQ, kMaxChunkBytes, kMaxChunkBytes), kIdOf + kQ);
  EXPECT_EQ(*sequence.Take(kQ, 2 * kMaxChunkBytes, 1 << 20), kIdOf + kQ);
  EXPECT_TRUE(sequence.complete());
  EXPECT_TRUE(sequence.CheckComplete().ok());
}

TEST(ChunkSequence, RefusesWhatIsNotNext) {
  ChunkSequence sequence(TensorsOfTest());
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
  EXPECT_EQ(*sequence.Take(kK, 4, 6), kIdOf + kK);  // a refusal changes nothing
}

TEST(ChunkSequence, RefusesAChunkAboveItsLimitAndOneAfterTheLast) {
  ChunkSequence sequence(TensorsOfTest());
  ASSERT_TRUE(sequence.Take(kK, 0, 10).ok());
  ASSERT_TRUE(sequence.Take(kV, 0, 4).ok());
  ExpectRefused(sequence.Take(kQ, 0, kMaxChunkBytes + 1), reason::kBadField,
                "chunk.data: expected 1..4194304 bytes, got 4194305");
  for (uint64_t mib = 0; mib < 9; ++mib) ASSERT_TRUE(sequence.Take(kQ, mib << 20, 1 << 20).ok());
  ExpectRefused(sequence.Take(kQ, 9 << 20, 1), reason::kChunkOrder,
                "chunk: expected half-close after the last payload, got a chunk of field 22");
}

TEST(ChunkSequence, NamesWhatIsMissingAtHalfClose) {
  ChunkSequence sequence(TensorsOfTest());
  ASSERT_TRUE(sequence.Take(kK, 0, 9).ok());
  EXPECT_EQ(sequence.CheckComplete().message(),
            "k: expected 10 bytes in chunks before half-close, got 9");
}

// Whatever comes, what is taken are the payloads' bytes in their order, each once.
TEST(ChunkSequence, NeverTakesAByteTwiceOrOutOfTurnWhenChunksAreRandom) {
  for (uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    TensorList inputs;
    for (int field : {17, kK, kV, kQ}) {
      inputs.push_back(Input(field, "any", 1 + static_cast<int64_t>(random() % 50)));
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
                   position + size <= static_cast<uint64_t>(inputs[current].bytes);
      absl::StatusOr<int> taken = sequence.Take(field, offset, static_cast<int64_t>(size));
      ASSERT_EQ(taken.ok(), right) << taken.status();
      if (!right) continue;
      EXPECT_EQ(*taken, inputs[current].id);
      position += size;
      if (position < static_cast<uint64_t>(inputs[current].bytes)) continue;
      position = 0;
      ++current;
    }
    EXPECT_EQ(sequence.complete(), current == inputs.size());
  }
}

}  // namespace
}  // namespace attnd
