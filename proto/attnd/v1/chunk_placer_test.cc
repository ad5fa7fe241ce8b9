#include "proto/attnd/v1/chunk_placer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "proto/attnd/v1/attention.pb.h"
#include "proto/attnd/v1/chunk_framing.h"

namespace attnd {
namespace {

absl::Span<const uint8_t> Bytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}
absl::Span<const uint8_t> Beginning(const std::string& text) {
  return Bytes(text).first(std::min<size_t>(text.size(), MessagePlacer::kBeginning));
}

TEST(ChunkForm, IsWhatChunkPrefixWrites) {
  for (int64_t offset : {int64_t{0}, int64_t{1}, int64_t{1} << 40}) {
    for (int64_t bytes : {int64_t{1}, int64_t{200}, kMaxChunkBytes}) {
      const std::string prefix = ChunkPrefix(5, offset, bytes);
      ASSERT_LE(prefix.size(), size_t{MessagePlacer::kBeginning});
      ChunkForm form;
      ASSERT_TRUE(ParseChunkForm(Bytes(prefix), static_cast<int64_t>(prefix.size()) + bytes, form));
      EXPECT_EQ(form.field, 5u);
      EXPECT_EQ(form.offset, static_cast<uint64_t>(offset));
      EXPECT_EQ(form.data_at, static_cast<int64_t>(prefix.size()));
      EXPECT_EQ(form.data_bytes, bytes);
    }
  }
}

TEST(ChunkForm, IsNoOtherMessage) {
  const std::string chunk = ChunkPrefix(3, 7, 1000) + std::string(1000, 'd');
  const auto size = static_cast<int64_t>(chunk.size());
  v1::ForwardStreamRequest other_order;
  other_order.mutable_chunk()->set_data(std::string(100, 'd'));  // without a tensor
  std::string past_its_end = chunk;  // its data go on where it has ended
  --past_its_end[1];
  v1::ForwardStreamRequest with_more;
  ASSERT_TRUE(with_more.ParseFromString(chunk));
  with_more.mutable_chunk()
      ->GetReflection()
      ->MutableUnknownFields(with_more.mutable_chunk())
      ->AddVarint(1000, 1);
  const std::string too_large = ChunkPrefix(3, 7, kMaxChunkBytes + 1);
  const std::pair<std::string, int64_t> cases[] = {
      {FrameHeader(std::string(500, 'h')), 503},
      {chunk, size + 1},  // something follows
      {chunk, size - 1},  // cut off
      {past_its_end, size},
      {with_more.SerializeAsString(), static_cast<int64_t>(with_more.ByteSizeLong())},
      {ChunkPrefix(3, 7, 0), static_cast<int64_t>(ChunkPrefix(3, 7, 0).size())},
      {too_large, static_cast<int64_t>(too_large.size()) + kMaxChunkBytes + 1},
      {other_order.SerializeAsString(), static_cast<int64_t>(other_order.ByteSizeLong())},
      {chunk.substr(0, 5), size},
      {"", 0},
      {std::string(48, '\xff'), 48},
  };
  for (const auto& [text, bytes] : cases) {
    ChunkForm form;
    EXPECT_FALSE(ParseChunkForm(Beginning(text), bytes, form)) << testing::PrintToString(text);
  }
}

TEST(ChunkTarget, HoldsWhatLiesWithinIt) {
  std::byte memory[100];
  const std::vector<ChunkTarget> targets = {{4, nullptr, 0}, {5, memory, 100}};
  EXPECT_EQ(FindTarget(targets, {.field = 5, .offset = 30, .data_bytes = 70}), memory + 30);
  EXPECT_EQ(FindTarget(targets, {.field = 5, .offset = 30, .data_bytes = 71}), nullptr);
  EXPECT_EQ(FindTarget(targets, {.field = 5, .offset = 101, .data_bytes = 1}), nullptr);
  EXPECT_EQ(FindTarget(targets, {.field = 5, .offset = UINT64_MAX, .data_bytes = 1}), nullptr);
  EXPECT_EQ(FindTarget(targets, {.field = 6, .offset = 0, .data_bytes = 1}), nullptr);
  EXPECT_EQ(FindTarget(targets, {.field = 4, .offset = 0, .data_bytes = 1}), nullptr);
}

TEST(ChunkPlacer, TellsHowMuchOfAMessageItHasNotPlaced) {
  std::byte memory[1000];
  ChunkPlacer placer([&](const ChunkForm& chunk) { return chunk.field == 5 ? memory : nullptr; });
  const std::string ours = ChunkPrefix(5, 0, 1000), others = ChunkPrefix(6, 0, 1000);
  const auto bytes = static_cast<int64_t>(ours.size()) + 1000;
  const auto data_at = static_cast<int64_t>(ours.size());
  EXPECT_EQ(placer.PlaceOf(3, Bytes(ours), bytes, data_at), memory);
  placer.OnPlaced(3);
  EXPECT_EQ(placer.PlaceOf(4, Bytes(others), bytes, data_at), nullptr);
  EXPECT_EQ(placer.PlaceOf(5, Bytes(ours), bytes, data_at + 400), memory + 400);
  placer.OnPlaced(3);  // of a message that is over: nothing
  EXPECT_EQ(placer.DeliveredBytes(1, 5, 0, 1000), 1000);
  EXPECT_EQ(placer.DeliveredBytes(3, 5, 0, 1000), 0);
  EXPECT_EQ(placer.DeliveredBytes(4, 6, 0, 1000), 1000);
  EXPECT_EQ(placer.DeliveredBytes(5, 5, 0, 1000), absl::nullopt);
  placer.OnPlaced(5);
  EXPECT_EQ(placer.DeliveredBytes(5, 5, 0, 1000), 400);
  EXPECT_EQ(placer.DeliveredBytes(5, 6, 0, 1000), absl::nullopt);
  EXPECT_EQ(placer.DeliveredBytes(5, 5, 1, 1000), absl::nullopt);
  EXPECT_EQ(placer.DeliveredBytes(5, 5, 0, 999), absl::nullopt);
}

}  // namespace
}  // namespace attnd
