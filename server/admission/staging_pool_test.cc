#include "server/admission/staging_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"

namespace attnd {
namespace {

TEST(StagingPool, GivesAlignedBlocksAndTakesThemBack) {
  StagingPool pool = *StagingPool::Create(1 << 16);
  {
    std::optional<StagingBlock> block = pool.TryAcquire(100);
    ASSERT_TRUE(block.has_value());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block->data()) % 64, 0u);
    EXPECT_EQ(block->size(), 128);
    EXPECT_EQ(pool.used(), 128);
  }
  EXPECT_EQ(pool.used(), 0);
  EXPECT_EQ(pool.peak_used(), 128);
}

TEST(StagingPool, GivesItsWholeCapacityAndNotOneByteMore) {
  StagingPool pool = *StagingPool::Create(4096);
  EXPECT_FALSE(pool.TryAcquire(4097).has_value());
  std::optional<StagingBlock> all = pool.TryAcquire(4096);
  ASSERT_TRUE(all.has_value());
  EXPECT_FALSE(pool.TryAcquire(1).has_value());
  all.reset();
  EXPECT_TRUE(pool.TryAcquire(4096).has_value());
}

TEST(StagingPool, JoinsGapsWhateverTheOrderOfReturn) {
  std::mt19937 random(5);
  StagingPool pool = *StagingPool::Create(64 * 64);
  for (int round = 0; round < 50; ++round) {
    std::vector<StagingBlock> blocks;
    while (true) {
      std::optional<StagingBlock> block = pool.TryAcquire(64 * (1 + random() % 4));
      if (!block.has_value()) break;
      std::memset(block->data(), 1, static_cast<size_t>(block->size()));
      blocks.push_back(*std::move(block));
    }
    std::shuffle(blocks.begin(), blocks.end(), random);
    blocks.clear();
    ASSERT_EQ(pool.used(), 0);
    ASSERT_TRUE(pool.TryAcquire(64 * 64).has_value()) << "round " << round;
  }
}

TEST(StagingPool, SplitsABlockIntoTwoThatReturnApart) {
  StagingPool pool = *StagingPool::Create(4096);
  StagingBlock front = *pool.TryAcquire(1024);
  StagingBlock back = front.SplitOff(256);
  EXPECT_EQ(front.size(), 256);
  EXPECT_EQ(back.size(), 768);
  EXPECT_EQ(back.data(), front.data() + 256);
  front.Release();
  EXPECT_EQ(pool.used(), 768);
  back.Release();
  EXPECT_EQ(pool.used(), 0);
  StagingBlock whole = *pool.TryAcquire(128);
  EXPECT_EQ(whole.SplitOff(128).size(), 0);
  StagingBlock rest = whole.SplitOff(0);
  EXPECT_EQ(whole.data(), nullptr);
  EXPECT_EQ(rest.size(), 128);
}

TEST(StagingPool, BlocksOutliveThePool) {
  StagingBlock block;
  {
    StagingPool pool = *StagingPool::Create(4096);
    block = *pool.TryAcquire(64);
  }
  std::memset(block.data(), 7, 64);
}

}  // namespace
}  // namespace attnd
