// The GPU's side of the engine against a stand-in driver: memory, launches, and what each failure
// becomes.
#include "kernels/cuda/driver_device.h"

#include <dlfcn.h>

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/driver/driver.h"

namespace attnd::cuda {
namespace {

using ::testing::HasSubstr;

constexpr char kFake[] = "kernels/driver/libfake_cuda.so";

class DriverDeviceTest : public ::testing::Test {
 protected:
  DriverDeviceTest() {
    void* library = dlopen(kFake, RTLD_NOW);
    EXPECT_NE(library, nullptr) << dlerror();
    fail_ = reinterpret_cast<void (*)(const char*, int, int)>(dlsym(library, "FakeCudaFail"));
    reset_ = reinterpret_cast<void (*)()>(dlsym(library, "FakeCudaReset"));
    live_ = reinterpret_cast<int (*)()>(dlsym(library, "FakeCudaLive"));
    launches_ = reinterpret_cast<int (*)()>(dlsym(library, "FakeCudaLaunches"));
    reset_();
  }
  ~DriverDeviceTest() override {
    reset_();
    EXPECT_EQ(live_(), 0) << "driver objects leaked";
  }
  absl::StatusOr<std::unique_ptr<KernelDevice>> Make(int ordinal = 0) {
    return MakeDriverDevice({.ordinal = ordinal, .driver_library = kFake});
  }
  void (*fail_)(const char* call, int after, int result);
  void (*reset_)();
  int (*live_)();
  int (*launches_)();
};

TEST_F(DriverDeviceTest, DescribesItselfAndLeavesRoomForWorkspace) {
  auto device = Make();
  ASSERT_TRUE(device.ok()) << device.status();
  const BackendInfo& info = (*device)->info();
  EXPECT_EQ(info.device, "Fake V100");
  EXPECT_EQ(info.architecture, "sm_70");
  EXPECT_EQ(info.memory_bytes, int64_t{15} << 29);  // half of the 15 GiB that are free
  EXPECT_GT(info.flops_per_second, 5e13);
}

TEST_F(DriverDeviceTest, RefusesADeviceThatIsNotThere) {
  auto device = Make(3);
  EXPECT_EQ(device.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(device.status().message()),
              HasSubstr("device 3: the driver sees 1 GPUs"));
}

TEST_F(DriverDeviceTest, CopiesZeroesAndLaunchesEveryShippedKernel) {
  auto device = Make();
  ASSERT_TRUE(device.ok()) << device.status();
  auto base = (*device)->Reserve(1024, {});
  ASSERT_TRUE(base.ok());
  ASSERT_TRUE((*device)->CopyIn(*base + 256, "abcdefgh", 8).ok());
  ASSERT_TRUE((*device)->SetZero(*base + 260, 4).ok());
  char back[9] = {};
  ASSERT_TRUE((*device)->CopyOut(back, *base + 256, 8).ok());
  EXPECT_STREQ(back, "abcd");
  LaunchParams params = {};
  params.tile_count = 3;
  int expected = 0;
  for (const KernelRow& row : KernelRows()) {
    if (!row.shipped) continue;
    ASSERT_TRUE((*device)->Check(row).ok()) << (*device)->Check(row);
    ASSERT_TRUE((*device)->Run(row, params).ok()) << NameOf(row);
    ++expected;
  }
  EXPECT_EQ(launches_(), expected);
  EXPECT_DOUBLE_EQ(*(*device)->Finish(), 2e-3);
}

TEST_F(DriverDeviceTest, KeepsItsArenaUntilALaunchNeedsMore) {
  auto device = Make();
  ASSERT_TRUE(device.ok());
  uint64_t first = *(*device)->Reserve(1 << 20, {});
  EXPECT_EQ(*(*device)->Reserve(1 << 10, {}), first);
  int live = live_();
  ASSERT_TRUE((*device)->Reserve(1 << 21, {}).ok());
  EXPECT_EQ(live_(), live);  // the old one is gone
}

TEST_F(DriverDeviceTest, SaysWhatDidNotFit) {
  auto device = Make();
  ASSERT_TRUE(device.ok());
  fail_("cuMemAlloc", 0, CUDA_ERROR_OUT_OF_MEMORY);
  absl::Status status = (*device)->Reserve(5000, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("a launch of 5000 bytes"));
  reset_();
  EXPECT_TRUE((*device)->Reserve(5000, {}).ok());  // not sticky: the next may fit
}

TEST_F(DriverDeviceTest, PassesOnWhatTheDriverSays) {
  auto device = Make();
  ASSERT_TRUE(device.ok());
  ASSERT_TRUE((*device)->Reserve(64, {}).ok());
  ASSERT_TRUE((*device)->Run(KernelRows()[0], {}).ok());
  fail_("cuStreamSynchronize", 0, CUDA_ERROR_ILLEGAL_ADDRESS);
  absl::Status status = (*device)->Finish().status();
  EXPECT_EQ(status.message(), "cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS");
  EXPECT_TRUE(IsSticky(status));
}

}  // namespace
}  // namespace attnd::cuda
