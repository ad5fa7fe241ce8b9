#include "server/modules/module_memory.h"

#include <gtest/gtest.h>

#include <utility>

namespace attnd {
namespace {

TEST(ModuleMemory, KeepsWithinTheLimitsOfAllAndOfOneCaller) {
  ModuleMemory memory({.bytes = 100, .caller_bytes = 60});
  EXPECT_EQ(memory.capacity(), 60);
  auto first = memory.Reserve("a", 60);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(memory.Reserve("a", 1).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(memory.FreeFor("b"), 40);
  EXPECT_FALSE(memory.Reserve("b", 41).ok());
  auto second = memory.Reserve("b", 40);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(memory.used(), 100);
}

TEST(ModuleMemory, HasItsBytesBackOnceReservationsGo) {
  ModuleMemory memory({.bytes = 100, .caller_bytes = 100});
  {
    ModuleMemory::Reservation kept;
    {
      auto reservation = memory.Reserve("a", 70);
      ASSERT_TRUE(reservation.ok());
      kept = *std::move(reservation);
    }
    EXPECT_EQ(memory.used(), 70);
    EXPECT_EQ(kept.bytes(), 70);
  }
  EXPECT_EQ(memory.used(), 0);
  EXPECT_EQ(memory.FreeFor("a"), 100);
}

}  // namespace
}  // namespace attnd
