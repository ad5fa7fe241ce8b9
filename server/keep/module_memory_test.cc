#include "server/keep/module_memory.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace attnd {
namespace {

TEST(ModuleMemory, KeepsWithinTheLimitsOfAllAndOfOneCaller) {
  ModuleMemory memory({.bytes = 100, .caller_bytes = 60});
  EXPECT_EQ(memory.capacity().bytes, 60);
  auto first = memory.Reserve("a", 60);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(memory.Reserve("a", 1).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(memory.FreeFor("b").bytes, 40);
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
  EXPECT_EQ(memory.FreeFor("a").bytes, 100);
}

EnginePlan On(std::vector<int64_t> bytes_of_devices) {
  EnginePlan plan;
  for (size_t n = 0; n < bytes_of_devices.size(); ++n) {
    plan.ranges.push_back({.engine_bytes = bytes_of_devices[n], .device = static_cast<int>(n)});
    plan.engine_bytes += bytes_of_devices[n];
  }
  return plan;
}

TEST(ModuleMemory, CountsEachDeviceForItself) {
  ModuleMemory memory({.bytes = 100, .caller_bytes = 100, .device_bytes = {60, 40}});
  EXPECT_EQ(memory.capacity().devices, (std::vector<int64_t>{60, 40}));
  EXPECT_FALSE(memory.Reserve("a", On({10, 41})).ok());
  EXPECT_EQ(memory.used(), 0);
  {
    auto module = memory.Reserve("a", On({10, 40}));
    ASSERT_TRUE(module.ok());
    EXPECT_EQ(memory.FreeFor("a").bytes, 50);
    EXPECT_EQ(memory.FreeFor("a").devices, (std::vector<int64_t>{50, 0}));
    EXPECT_FALSE(memory.Reserve("a", On({10, 1})).ok());
  }
  EXPECT_EQ(memory.FreeFor("a").devices, (std::vector<int64_t>{60, 40}));
}

TEST(ModuleMemory, TakesCopiesOfTheHostWhereDevicesHaveMemory) {
  ModuleMemory memory({.bytes = 100, .caller_bytes = 80, .device_bytes = {100}});
  EXPECT_FALSE(memory.IsShared());
  {
    auto module = memory.Reserve("a", On({80}));
    ASSERT_TRUE(module.ok());
    auto copy = memory.Reserve("a", 70);
    ASSERT_TRUE(copy.ok()) << "a module that fills its device can be given its tensors";
    EXPECT_FALSE(memory.Reserve("a", 11).ok());
    EXPECT_FALSE(memory.Reserve("b", 31).ok());
    EXPECT_EQ(memory.FreeFor("a").bytes, 0);
    EXPECT_EQ(memory.FreeFor("b").bytes, 20);
    copy->Join(*std::move(module));
    EXPECT_EQ(copy->bytes(), 150);
    EXPECT_EQ(memory.used(), 150);
  }
  EXPECT_EQ(memory.used(), 0);
  EXPECT_TRUE(memory.Reserve("a", 80).ok());
}

TEST(ModuleMemory, HasNoRoomOnALostDevice) {
  ModuleMemory memory({.bytes = 100, .caller_bytes = 100, .device_bytes = {60, 40}});
  {
    auto before = memory.Reserve("a", On({0, 10}));
    ASSERT_TRUE(before.ok());
    memory.LoseDevice(1);
    EXPECT_EQ(memory.FreeFor("a").devices, (std::vector<int64_t>{60, 0}));
  }
  EXPECT_EQ(memory.FreeFor("a").devices, (std::vector<int64_t>{60, 0}));
  EXPECT_FALSE(memory.Reserve("a", On({0, 1})).ok());
  EXPECT_TRUE(memory.Reserve("a", On({60, 0})).ok());
}

}  // namespace
}  // namespace attnd
