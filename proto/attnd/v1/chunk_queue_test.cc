#include "proto/attnd/v1/chunk_queue.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "proto/attnd/v1/chunk_framing.h"

namespace attnd {
namespace {

std::string BytesOf(const grpc::ByteBuffer& message) {
  grpc::Slice slice;
  EXPECT_TRUE(message.DumpToSingleSlice(&slice).ok());
  return std::string(reinterpret_cast<const char*>(slice.begin()), slice.size());
}

TEST(ChunkQueue, CutsTensorsInTheirOrderAndHoldsTheirMemoryUntilEachChunkHasGone) {
  constexpr int64_t kBytes = kChunkBytes + 5;
  const auto large = std::make_shared<std::vector<std::byte>>(kBytes, std::byte{7});
  const auto small = std::make_shared<std::vector<std::byte>>(3, std::byte{9});
  ChunkQueue queue(
      {{4, large->data(), kBytes, large}, {5, nullptr, 0, nullptr}, {6, small->data(), 3, small}});
  std::vector<grpc::ByteBuffer> chunks;
  while (std::optional<grpc::ByteBuffer> chunk = queue.Next()) {
    chunks.push_back(*std::move(chunk));
    EXPECT_EQ(queue.empty(), chunks.size() == 3);
  }
  ASSERT_EQ(chunks.size(), 3u);
  EXPECT_EQ(BytesOf(chunks[0]), ChunkPrefix(4, 0, kChunkBytes) + std::string(kChunkBytes, 7));
  EXPECT_EQ(BytesOf(chunks[1]), ChunkPrefix(4, kChunkBytes, 5) + std::string(5, 7));
  EXPECT_EQ(BytesOf(chunks[2]), ChunkPrefix(6, 0, 3) + std::string(3, 9));
  EXPECT_EQ(large.use_count(), 3);
  chunks.erase(chunks.begin());
  EXPECT_EQ(large.use_count(), 2);
  chunks.clear();
  EXPECT_EQ(large.use_count(), 1);
  EXPECT_EQ(small.use_count(), 1);
}

}  // namespace
}  // namespace attnd
