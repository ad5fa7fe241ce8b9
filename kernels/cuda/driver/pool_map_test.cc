#include "kernels/cuda/driver/pool_map.h"

#include "gtest/gtest.h"

namespace attnd {
namespace {

TEST(PoolMap, SeesFreeMemoryAndItsLargestPieceAsBlocksComeAndGo) {
  PoolMap map;
  map.SetRange(1000, 100);
  EXPECT_EQ(map.FreeMemory().bytes, 100);
  EXPECT_EQ(map.FreeMemory().largest, 100);
  map.Add(1000, 30);
  map.Add(1050, 10);
  map.Add(1090, 10);
  EXPECT_EQ(map.FreeMemory().bytes, 50);
  EXPECT_EQ(map.FreeMemory().largest, 30);  // 1060 to 1090
  map.Remove(1000);
  EXPECT_EQ(map.FreeMemory().bytes, 80);
  EXPECT_EQ(map.FreeMemory().largest, 50);
  map.Remove(1050);
  map.Remove(1090);
  EXPECT_EQ(map.FreeMemory().largest, 100);
  EXPECT_EQ(map.allocations(), 3);
}

TEST(PoolMap, LeavesOutWhatLiesElsewhere) {
  PoolMap map;
  map.SetRange(1000, 100);
  map.Add(500, 50);
  map.Add(1100, 50);
  EXPECT_EQ(map.FreeMemory().bytes, 100);
  EXPECT_EQ(map.FreeMemory().largest, 100);
}

}  // namespace
}  // namespace attnd
