// The GPU's side of the engine against a stand-in driver with a clock of its own: memory, overlap,
// launches, and what each failure becomes.
#include "kernels/cuda/device/driver_device.h"

#include <cstring>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/device/launch_turns.h"
#include "kernels/cuda/driver/driver.h"
#include "kernels/cuda/library/kernel_sample.h"
#include "tests/fakes/fake_driver.h"

namespace attnd::cuda {
namespace {

using ::testing::HasSubstr;

bool Always() { return true; }

HostCopy Copy(uint64_t device, const void* host, int64_t bytes) {
  auto* at = const_cast<std::byte*>(static_cast<const std::byte*>(host));
  return {.device = device, .host = at, .bytes = bytes};
}

// The nth kernel that every build for tests has for the stand-in's GPU.
KernelRow Sampled(int n) {
  for (const KernelRow& row : KernelRows()) {
    if (IsSampled(row, 70) && n-- == 0) return row;
  }
  return {};
}

class DriverDeviceTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<KernelDevice>> Make(DriverDeviceOptions options = {}) {
    options.driver_library = FakeDriver::kLibrary;
    return MakeDriverDevice(options);
  }
  FakeDriver fake_;
};

TEST_F(DriverDeviceTest, DescribesItselfAndLeavesRoomInItsPool) {
  auto device = Make();
  ASSERT_TRUE(device.ok()) << device.status();
  const BackendInfo& info = (*device)->info();
  EXPECT_EQ(info.device, "Fake V100");
  EXPECT_EQ(info.architecture, "sm_70");
  EXPECT_EQ(info.pci_bus_id, "0000:3b:00.0");
  const double pool = 0.9 * (int64_t{15} << 30);  // of the 15 GiB that are free
  EXPECT_NEAR(static_cast<double>(info.memory_bytes), 0.88 * pool, 2 << 20);
  EXPECT_NEAR(static_cast<double>((*device)->mask_bytes()), 0.02 * pool, 2 << 20);
  EXPECT_NEAR(static_cast<double>((*device)->use().memory_reserved_bytes), pool, 2 << 20);
  EXPECT_GT(info.flops_per_second, 5e13);
}

TEST_F(DriverDeviceTest, RefusesADeviceThatIsNotThere) {
  auto device = Make({.ordinal = 3});
  EXPECT_EQ(device.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(device.status().message()),
              HasSubstr("device 3: the driver sees 1 GPUs"));
}

TEST_F(DriverDeviceTest, SaysThatTheGpuIsBusyWhenItsMemoryIsTaken) {
  fake_.fail("cuMemAllocFromPoolAsync", 0, CUDA_ERROR_OUT_OF_MEMORY);
  absl::Status status = Make().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("Fake V100 0 is busy: cannot take 13824 MiB of its 16384 MiB, 15360 MiB "
                        "are free; stop what else uses it, or lower --hbm_fraction"));
}

TEST_F(DriverDeviceTest, CopiesZeroesAndLaunchesEveryKernelOfTheProgram) {
  auto device = Make();
  ASSERT_TRUE(device.ok()) << device.status();
  auto launch = (*device)->Begin(1024, {});
  ASSERT_TRUE(launch.ok());
  const uint64_t base = (*launch)->arena();
  const std::string text = "abcdefgh";
  ASSERT_TRUE((*launch)->Upload(Copy(base + 256, text.data(), 8)).ok());
  ASSERT_TRUE((*launch)->SetZero(base + 260, 4).ok());
  int expected = 0;
  for (const KernelRow& row : (*device)->rows()) {
    if (!(*device)->Check(row).ok()) continue;  // a build may hold a sample alone
    auto ran = (*launch)->Run({{row, LaunchParams{}}}, Always);
    ASSERT_TRUE(ran.ok() && *ran) << NameOf(row);
    ++expected;
  }
  EXPECT_GE(expected, 50);
  char back[9] = {};
  ASSERT_TRUE((*launch)->Download(Copy(base + 256, back, 8)).ok());
  auto times = (*launch)->Finish();
  ASSERT_TRUE(times.ok()) << times.status();
  EXPECT_STREQ(back, "abcd");
  EXPECT_EQ(fake_.launches(), expected);
  EXPECT_NEAR(times->kernel, expected * 3e-6, 1e-9);  // the stand-in's time of an empty launch
  EXPECT_NEAR(times->download, 2e-6, 1e-8);
  EXPECT_GT((*device)->use().kernel_seconds, 0);
  EXPECT_EQ((*device)->use().uploaded_bytes, 8);
}

TEST_F(DriverDeviceTest, CopiesRowsByOneCommandEachWay) {
  auto device = Make();
  ASSERT_TRUE(device.ok()) << device.status();
  auto launch = (*device)->Begin(1024, {});
  ASSERT_TRUE(launch.ok());
  HostCopy copy = {.device = (*launch)->arena(), .bytes = 2, .rows = 3, .device_pitch = 64};
  std::string text = "ab..cd..ef";
  copy.host = reinterpret_cast<std::byte*>(text.data());
  copy.host_pitch = 4;
  ASSERT_TRUE((*launch)->Upload(copy).ok());
  ASSERT_TRUE(*(*launch)->Run({}, Always));
  std::string back = "----------";
  copy.host = reinterpret_cast<std::byte*>(back.data());
  copy.host_pitch = 3;
  ASSERT_TRUE((*launch)->Download(copy).ok());
  ASSERT_TRUE((*launch)->Finish().ok());
  EXPECT_EQ(back, "ab-cd-ef--");
  EXPECT_EQ(fake_.calls("cuMemcpy2DAsync"), 2);
  EXPECT_EQ((*device)->use().uploaded_bytes, 6);
  EXPECT_EQ((*device)->use().downloaded_bytes, 6);
}

TEST_F(DriverDeviceTest, LaunchesInMemoryThatIsHeld) {
  auto device = Make();
  ASSERT_TRUE(device.ok()) << device.status();
  const auto memory = (*device)->Hold(4096);
  ASSERT_NE(memory, nullptr);
  std::string text = "stays there", back(text.size(), '-');
  const DevicePart part{memory.get(), 1024, 512};
  const auto copy = [&](std::string& host) {
    return HostCopy{.device = memory->address() + 1024,
                    .host = reinterpret_cast<std::byte*>(host.data()),
                    .bytes = static_cast<int64_t>(host.size())};
  };
  {
    auto launch = (*device)->BeginIn(part, {});
    ASSERT_TRUE(launch.ok()) << launch.status();
    EXPECT_EQ((*launch)->arena(), memory->address() + 1024);
    ASSERT_TRUE((*launch)->Upload(copy(text)).ok());
    ASSERT_TRUE((*launch)->Finish().ok());
  }
  auto launch = (*device)->BeginIn(part, {});
  ASSERT_TRUE(launch.ok()) << launch.status();
  ASSERT_TRUE((*launch)->Download(copy(back)).ok());
  ASSERT_TRUE((*launch)->Finish().ok());
  EXPECT_EQ(back, text);
}

TEST_F(DriverDeviceTest, CopiesRowsOfDifferentPageLockedMemoryOneByOne) {
  // Those that another device has locked are no other.
  auto device = Make({.memory_fraction = 0.4}), locks = Make({.memory_fraction = 0.4});
  ASSERT_TRUE(device.ok() && locks.ok()) << device.status() << locks.status();
  std::vector<std::byte> memory(3000);
  for (int n : {0, 2000}) {
    ASSERT_TRUE((*locks)->RegisterHost(absl::MakeSpan(memory).subspan(n, 1000)).ok());
  }
  auto launch = (*device)->Begin(1024, {});
  ASSERT_TRUE(launch.ok());
  HostCopy copy = {.device = (*launch)->arena(), .bytes = 8, .rows = 2, .device_pitch = 64};
  copy.host = memory.data();
  // In the other piece; in none; its last row as long as rows lie apart would end in none.
  const std::vector<int64_t> apart = {2000, 1000, 600};
  for (int64_t pitch : apart) {
    copy.host_pitch = pitch;
    ASSERT_TRUE((*launch)->Upload(copy).ok());
  }
  EXPECT_EQ(fake_.calls("cuMemcpy2DAsync"), 0);
  copy.host_pitch = 500;
  ASSERT_TRUE((*launch)->Upload(copy).ok());
  EXPECT_EQ(fake_.calls("cuMemcpy2DAsync"), 1);
  ASSERT_TRUE(*(*launch)->Run({}, Always));
  for (int64_t pitch : apart) {
    copy.host_pitch = pitch;
    ASSERT_TRUE((*launch)->Download(copy).ok());
  }
  EXPECT_EQ(fake_.calls("cuMemcpy2DAsync"), 1);
  ASSERT_TRUE((*launch)->Finish().ok());
  for (int n : {0, 2000}) (*locks)->UnregisterHost(absl::MakeSpan(memory).subspan(n, 1000));
}

TEST_F(DriverDeviceTest, RunsAStandInWhereItWantsAKernelsPlace) {
  int asked = 0;
  auto device = Make({.stand_in = [&](const Driver&, StreamRef, const KernelStep&) {
    return absl::StatusOr<bool>(++asked == 1);
  }});
  ASSERT_TRUE(device.ok()) << device.status();
  auto launch = (*device)->Begin(1024, {});
  ASSERT_TRUE(launch.ok());
  const KernelStep step = {Sampled(0), LaunchParams{}};
  ASSERT_TRUE((*launch)->Run({step, step}, Always).ok());
  ASSERT_TRUE((*launch)->Finish().ok());
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(fake_.launches(), 1);
}

TEST_F(DriverDeviceTest, HoldsMemoryForLeasesUntilItIsGivenBack) {
  auto device = Make({.memory_fraction = 1.0 / (15 << 10) * 4});  // 4 MiB
  ASSERT_TRUE(device.ok()) << device.status();
  std::unique_ptr<DeviceMemory> held = (*device)->Hold(3 << 20);
  ASSERT_NE(held, nullptr);
  EXPECT_EQ((*device)->use().lease_bytes, 3 << 20);
  EXPECT_EQ((*device)->use().memory_peak_bytes, 3 << 20);
  EXPECT_EQ((*device)->Hold(2 << 20), nullptr);  // at once: no launch may be about to give it back
  EXPECT_EQ((*device)->Begin(2 << 20, {}).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ((*device)->use().allocation_failures, 2);
  EXPECT_EQ((*device)->use().memory_used_bytes, int64_t{1} << 30);  // the stand-in's
  std::thread([&] { held.reset(); }).join();                        // by any thread
  EXPECT_EQ((*device)->use().lease_bytes, 0);
  EXPECT_TRUE((*device)->Begin(2 << 20, {}).ok());
}

TEST_F(DriverDeviceTest, LaunchesWaitForHeldMemoryWhileOthersAreAtWork) {
  auto device = Make({.memory_fraction = 1.0 / (15 << 10) * 4});
  ASSERT_TRUE(device.ok()) << device.status();
  std::unique_ptr<DeviceMemory> held = (*device)->Hold(3 << 20);
  auto working = (*device)->Begin(1024, {});
  ASSERT_TRUE(held != nullptr && working.ok());
  std::thread other([&] { EXPECT_TRUE((*device)->Begin(2 << 20, {}).ok()); });
  held.reset();
  other.join();
}

TEST_F(DriverDeviceTest, LeavesOutASliceThatNobodyWantsWhenItsTurnComes) {
  auto device = Make();
  ASSERT_TRUE(device.ok());
  auto launch = (*device)->Begin(1024, {});
  ASSERT_TRUE(launch.ok());
  auto ran = (*launch)->Run({{Sampled(0), LaunchParams{}}}, [] { return false; });
  ASSERT_TRUE(ran.ok());
  EXPECT_FALSE(*ran);
  EXPECT_EQ(fake_.launches(), 0);
}

TEST(LaunchTurns, TriedOneIsTakenOnlyWhereNobodyWaits) {
  LaunchTurns turns;
  turns.Take();
  EXPECT_TRUE(turns.TryTake());
  EXPECT_FALSE(turns.TryTake());
  std::thread other([&] { turns.Take(); });
  turns.Give();  // to the other, whether it has asked or not
  other.join();
  EXPECT_FALSE(turns.TryTake());
  turns.Give();
  EXPECT_TRUE(turns.TryTake());
}

TEST_F(DriverDeviceTest, QueuesASliceBehindTheOneAtWorkWithWhatWentUpMeanwhile) {
  auto device = Make();
  ASSERT_TRUE(device.ok()) << device.status();
  auto launch = (*device)->Begin(1024, {});
  ASSERT_TRUE(launch.ok());
  const std::string text = "abcdefgh";
  for (int slice = 0; slice < 5; ++slice) {
    const uint64_t at = (*launch)->arena() + static_cast<uint64_t>(slice);
    ASSERT_TRUE((*launch)->UploadCopy(at, text.data() + slice, 1).ok());
    const int64_t waits = fake_.calls("cuEventQuery");
    ASSERT_TRUE(*(*launch)->Run({}, Always));
    if (slice < LaunchTurns::kDepth) {
      EXPECT_EQ(fake_.calls("cuEventQuery"), waits);
    }
  }
  char back[6] = {};
  ASSERT_TRUE((*launch)->Download(Copy((*launch)->arena(), back, 5)).ok());
  ASSERT_TRUE((*launch)->Finish().ok());
  EXPECT_STREQ(back, "abcde");
}

// Each would have a second turn only when the other has given its own back.
TEST_F(DriverDeviceTest, LaunchesOfManySlicesDoNotWaitForEachOthersTurns) {
  auto device = Make();
  ASSERT_TRUE(device.ok()) << device.status();
  const auto run = [&] {
    auto launch = (*device)->Begin(64, {});
    ASSERT_TRUE(launch.ok());
    for (int slice = 0; slice < 200; ++slice) ASSERT_TRUE(*(*launch)->Run({}, Always));
    ASSERT_TRUE((*launch)->Finish().ok());
  };
  std::vector<std::thread> threads;
  for (int n = 0; n < 3; ++n) threads.emplace_back(run);
  for (std::thread& thread : threads) thread.join();
}

TEST_F(DriverDeviceTest, BringsListsLongerThanItsBounceMemory) {
  auto device = Make();
  ASSERT_TRUE(device.ok());
  std::vector<uint8_t> list(5 << 20), back(5 << 20);
  for (size_t n = 0; n < list.size(); ++n) list[n] = static_cast<uint8_t>(n * 7 + (n >> 13));
  auto launch = (*device)->Begin(5 << 20, {});
  ASSERT_TRUE(launch.ok());
  ASSERT_TRUE((*launch)->UploadCopy((*launch)->arena(), list.data(), 5 << 20).ok());
  ASSERT_TRUE((*launch)->Run({}, Always).ok());
  ASSERT_TRUE((*launch)->Download(Copy((*launch)->arena(), back.data(), 5 << 20)).ok());
  ASSERT_TRUE((*launch)->Finish().ok());
  EXPECT_EQ(back, list);
}

TEST_F(DriverDeviceTest, WaitsForMemoryThatOtherLaunchesHold) {
  auto device = Make({.memory_fraction = 0.001});  // 15 MiB
  ASSERT_TRUE(device.ok()) << device.status();
  auto first = (*device)->Begin(10 << 20, {});
  ASSERT_TRUE(first.ok());
  EXPECT_EQ((*device)->use().workspace_bytes, 10 << 20);
  std::thread second([&] {
    auto launch = (*device)->Begin(8 << 20, {});
    EXPECT_TRUE(launch.ok()) << launch.status();
  });
  first->reset();
  second.join();
  EXPECT_EQ((*device)->use().workspace_bytes, 0);
  EXPECT_EQ((*device)->use().memory_peak_bytes, 10 << 20);
}

TEST_F(DriverDeviceTest, RefusesWhatItsMemoryNeverHolds) {
  auto device = Make({.memory_fraction = 0.001});
  ASSERT_TRUE(device.ok());
  EXPECT_EQ((*device)->Begin(16 << 20, {}).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE((*device)->Begin(10 << 20, {}).ok());
}

TEST_F(DriverDeviceTest, TellsThatTheDeviceIsLostWhenAKernelTraps) {
  auto device = Make();
  ASSERT_TRUE(device.ok());
  fake_.trap(0, 0);
  auto launch = (*device)->Begin(64, {});
  ASSERT_TRUE(launch.ok());
  ASSERT_TRUE((*launch)->Run({{Sampled(0), LaunchParams{}}}, Always).ok());
  absl::Status status = (*launch)->Finish().status();
  EXPECT_EQ(status.message(), "cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS");
  EXPECT_TRUE(IsDeviceLost(status));
  launch->reset();
  EXPECT_TRUE(IsDeviceLost((*device)->Begin(64, {}).status()));
}

TEST_F(DriverDeviceTest, PassesOnAFailureThatLeavesTheDeviceAlive) {
  auto device = Make();
  ASSERT_TRUE(device.ok());
  fake_.fail("cuLaunchKernel", 0, CUDA_ERROR_OUT_OF_MEMORY);
  {
    auto launch = (*device)->Begin(64, {});
    ASSERT_TRUE(launch.ok());
    absl::Status status = (*launch)->Run({{Sampled(0), LaunchParams{}}}, Always).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_FALSE(IsDeviceLost(status));
  }
  fake_.fail("cuLaunchKernel", 1 << 20, 0);
  auto launch = (*device)->Begin(64, {});
  ASSERT_TRUE(launch.ok());
  EXPECT_TRUE((*launch)->Run({{Sampled(0), LaunchParams{}}}, Always).ok());
  EXPECT_TRUE((*launch)->Finish().ok());
}

// Drivers allow each of these while other streams work: they neither allocate from the operating
// system nor wait for the device.
TEST_F(DriverDeviceTest, CallsNothingThatAllocatesOrWaitsOnTheWayOfALaunch) {
  auto device = Make();
  ASSERT_TRUE(device.ok());
  fake_.reset();
  const int64_t reserved = (*device)->use().memory_reserved_bytes;
  char bytes[64] = {};
  for (int n = 0; n < 50; ++n) {
    auto launch = (*device)->Begin(1024 << (n % 12), {});
    ASSERT_TRUE(launch.ok());
    const uint64_t base = (*launch)->arena();
    ASSERT_TRUE((*launch)->Upload(Copy(base, bytes, 64)).ok());
    ASSERT_TRUE((*launch)->UploadCopy(base, bytes, 64).ok());
    ASSERT_TRUE((*launch)->SetZero(base, 64).ok());
    ASSERT_TRUE((*launch)->Run({{Sampled(n % 3), LaunchParams{}}}, Always).ok());
    ASSERT_TRUE((*launch)->Download(Copy(base, bytes, 64)).ok());
    ASSERT_TRUE((*launch)->Finish().ok());
  }
  EXPECT_EQ((*device)->use().memory_reserved_bytes, reserved);
  EXPECT_EQ(fake_.launches(), 50);
  const std::vector<std::string> allowed = {
      "cuCtxSetCurrent",  "cuEventElapsedTime",      "cuEventQuery",      "cuEventRecord",
      "cuLaunchKernel",   "cuMemAllocFromPoolAsync", "cuMemFreeAsync",    "cuMemPoolGetAttribute",
      "cuMemGetInfo",     "cuMemcpyDtoHAsync",       "cuMemcpyHtoDAsync", "cuMemsetD8Async",
      "cuStreamWaitEvent"};
  int64_t counted = 0, all = 0;
  for (const std::string& call : allowed) counted += fake_.calls(call.c_str());
  std::istringstream lines(fake_.all_calls());
  std::string name;
  for (int64_t count; lines >> name >> count;) all += count;
  EXPECT_EQ(counted, all) << fake_.all_calls();
}

}  // namespace
}  // namespace attnd::cuda
