// The driver layer against a stand-in library: loading, what is missing or too old, every failing
// call named, nothing leaked.
#include "kernels/cuda/driver/driver.h"

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/driver/handles.h"
#include "kernels/cuda/driver/memory_pool.h"
#include "kernels/cuda/driver/nvml.h"
#include "kernels/rules/params.h"
#include "tests/fakes/fake_driver.h"

namespace attnd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto& kFake = FakeDriver::kLibrary;
constexpr char kOld[] = "tests/fakes/libfake_cuda_old.so";
constexpr char kPartial[] = "tests/fakes/libfake_cuda_partial.so";

class DriverTest : public ::testing::Test {
 protected:
  FakeDriver fake_;
};

TEST_F(DriverTest, SaysWhatToInstallWhenTheLibraryIsAbsent) {
  auto driver = Driver::Load("libcuda_that_is_not_there.so.1");
  EXPECT_EQ(driver.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(driver.status().message()),
              AllOf(HasSubstr("no NVIDIA driver: libcuda_that_is_not_there.so.1"),
                    HasSubstr("525.60.13 (CUDA 12.0)")));
}

TEST_F(DriverTest, NamesTheVersionWhenTheDriverIsTooOld) {
  auto driver = Driver::Load(kOld);
  EXPECT_EQ(driver.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(driver.status().message()),
              AllOf(HasSubstr("too old: it speaks CUDA 11.4"), HasSubstr("525.60.13")));
}

TEST_F(DriverTest, NamesTheSymbolThatIsMissing) {
  EXPECT_THAT(std::string(Driver::Load(kPartial).status().message()),
              HasSubstr("lacks cuLaunchKernel"));
  EXPECT_THAT(std::string(Driver::Load("libc.so.6").status().message()),
              HasSubstr("libc.so.6 is no CUDA driver"));
}

TEST_F(DriverTest, SaysSoWhenThereIsNoGpu) {
  fake_.fail("cuInit", 0, CUDA_ERROR_NO_DEVICE);
  auto driver = Driver::Load(kFake);
  EXPECT_EQ(driver.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(driver.status().message()), HasSubstr("sees no GPU"));
}

TEST_F(DriverTest, IdentifiesTheDevice) {
  auto driver = Driver::Load(kFake);
  ASSERT_TRUE(driver.ok()) << driver.status();
  EXPECT_EQ((*driver)->version(), 12090);
  EXPECT_EQ(*(*driver)->DeviceCount(), 1);
  auto device = (*driver)->Identify(0);
  ASSERT_TRUE(device.ok()) << device.status();
  EXPECT_EQ(device->name, "Fake V100");
  EXPECT_EQ(device->uuid, "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf");
  EXPECT_EQ(device->major * 10 + device->minor, 70);
  EXPECT_EQ(device->multiprocessors, 80);
  EXPECT_EQ(device->memory_bytes, int64_t{16} << 30);
  EXPECT_EQ((*driver)->Identify(1).status().code(), absl::StatusCode::kInternal);
}

TEST_F(DriverTest, NamesCallAndResultWhenACallFails) {
  auto driver = Driver::Load(kFake);
  ASSERT_TRUE(driver.ok());
  fake_.fail("cuMemHostAlloc", 0, CUDA_ERROR_OUT_OF_MEMORY);
  absl::Status status = PinnedMemory::Allocate(**driver, 100).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(status.message(), "cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
  EXPECT_EQ(ResultOf(status), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_FALSE(IsSticky(status));
  status = (*driver)->Check(static_cast<CUresult>(12345), "cuSomething");
  EXPECT_EQ(status.message(), "cuSomething: CUresult 12345");
  EXPECT_EQ(ResultOf(absl::InternalError("no driver call")), std::nullopt);
  EXPECT_FALSE(IsSticky(absl::OkStatus()));
}

TEST_F(DriverTest, TellsStickyResultsFromOthers) {
  for (int sticky : {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 810, 911}) {
    EXPECT_TRUE(IsSticky(static_cast<CUresult>(sticky))) << sticky;
  }
  for (int other : {0, 1, 2, 100, 200, 209, 400, 500, 600, 701, 801}) {
    EXPECT_FALSE(IsSticky(static_cast<CUresult>(other))) << other;
  }
}

// One pass over every object; returns the first error.
absl::Status UseEverything(const Driver& driver) {
  auto context = Context::Retain(driver, 0);
  if (!context.ok()) return context.status();
  if (auto info = context->MemoryInfo(); !info.ok()) return info.status();
  auto stream = Stream::Create(driver);
  if (!stream.ok()) return stream.status();
  auto start = Event::Create(driver, true), stop = Event::Create(driver, true);
  if (!start.ok()) return start.status();
  if (!stop.ok()) return stop.status();
  auto pool = MemoryPool::Create(driver, 0, 4096, stream->ref());
  if (!pool.ok()) return pool.status();
  auto device = pool->Allocate(stream->ref(), 1024);
  if (!device.ok()) return device.status();
  if (auto reserved = pool->ReservedBytes(); !reserved.ok()) return reserved.status();
  auto pinned = PinnedMemory::Allocate(driver, 1024);
  if (!pinned.ok()) return pinned.status();
  std::byte range[64];
  auto registered = PinnedRange::Register(driver, absl::MakeSpan(range));
  if (!registered.ok()) return registered.status();
  auto module = Module::Load(driver, "image");
  if (!module.ok()) return module.status();
  auto function = module->Function("entry");
  if (!function.ok()) return function.status();
  LaunchParams params = {};
  void* arguments[] = {&params};
  const StreamRef work = stream->ref();
  absl::Status status = AllowDynamicShared(driver, *function, 90 << 10);
  auto then = [&](auto next) {
    if (status.ok()) status = next();
  };
  std::byte* host = pinned->bytes().data();
  then([&] { return work.Record(*start); });
  then([&] { return work.CopyIn(device->address(), host, 1024); });
  then([&] { return work.Launch(*function, {.blocks = 2, .threads = 64}, arguments); });
  then([&] { return work.SetZero(device->address() + 512, 512); });
  then([&] { return work.CopyOut(host, device->address(), 1024); });
  then([&] { return work.Record(*stop); });
  then([&] { return work.Wait(*stop); });
  then([&] { return work.Synchronize(); });
  then([&] { return stop->HasPassed().status(); });
  then([&] {
    auto seconds = stop->SecondsSince(*start);
    if (seconds.ok()) {
      EXPECT_GT(*seconds, 0);
    }
    return seconds.status();
  });
  then([&] { return context->Synchronize(); });
  return status;
}

TEST_F(DriverTest, ReportsEachCallThatFailsAndLeaksNothing) {
  auto driver = Driver::Load(kFake);
  ASSERT_TRUE(driver.ok());
  EXPECT_TRUE(UseEverything(**driver).ok());
  EXPECT_EQ(fake_.launches(), 1);
  const std::vector<std::string> calls = {"cuDeviceGet",
                                          "cuDevicePrimaryCtxRetain",
                                          "cuCtxSetCurrent",
                                          "cuMemGetInfo",
                                          "cuStreamCreate",
                                          "cuEventCreate",
                                          "cuMemPoolCreate",
                                          "cuMemPoolSetAttribute",
                                          "cuMemAllocFromPoolAsync",
                                          "cuMemPoolGetAttribute",
                                          "cuMemHostRegister",
                                          "cuMemHostAlloc",
                                          "cuModuleLoadData",
                                          "cuModuleGetFunction",
                                          "cuFuncSetAttribute",
                                          "cuEventRecord",
                                          "cuMemcpyHtoDAsync",
                                          "cuLaunchKernel",
                                          "cuMemsetD8Async",
                                          "cuMemcpyDtoHAsync",
                                          "cuStreamWaitEvent",
                                          "cuStreamSynchronize",
                                          "cuEventQuery",
                                          "cuEventElapsedTime",
                                          "cuCtxSynchronize"};
  for (const std::string& call : calls) {
    fake_.fail(call.c_str(), 0, CUDA_ERROR_ILLEGAL_ADDRESS);
    absl::Status status = UseEverything(**driver);
    EXPECT_EQ(status.message(), call + ": CUDA_ERROR_ILLEGAL_ADDRESS");
    EXPECT_TRUE(IsSticky(status)) << call;
    EXPECT_EQ(fake_.live(), 0) << call;
    fake_.reset();
  }
}

TEST_F(DriverTest, CopiesBytesThereAndBack) {
  auto driver = Driver::Load(kFake);
  ASSERT_TRUE(driver.ok());
  auto context = Context::Retain(**driver, 0);
  auto stream = Stream::Create(**driver);
  ASSERT_TRUE(context.ok() && stream.ok());
  auto pool = MemoryPool::Create(**driver, 0, 4096, stream->ref());
  ASSERT_TRUE(pool.ok()) << pool.status();
  auto memory = pool->Allocate(stream->ref(), 8);
  ASSERT_TRUE(memory.ok()) << memory.status();
  char back[9] = {};
  ASSERT_TRUE(stream->ref().CopyIn(memory->address(), "abcdefgh", 8).ok());
  ASSERT_TRUE(stream->ref().SetZero(memory->address() + 6, 2).ok());
  ASSERT_TRUE(stream->ref().CopyOut(back, memory->address(), 8).ok());
  EXPECT_STREQ(back, "");  // nothing has waited for the copy yet
  ASSERT_TRUE(stream->ref().Synchronize().ok());
  EXPECT_STREQ(back, "abcdef");
  PoolBlock moved = *std::move(memory);
  EXPECT_EQ(moved.bytes(), kPoolGranularity);
}

TEST_F(DriverTest, APoolTakesItsMemoryOnceAndRefusesMore) {
  auto driver = Driver::Load(kFake);
  ASSERT_TRUE(driver.ok());
  auto context = Context::Retain(**driver, 0);
  auto stream = Stream::Create(**driver);
  ASSERT_TRUE(context.ok() && stream.ok());
  auto pool = MemoryPool::Create(**driver, 0, 8192, stream->ref());
  ASSERT_TRUE(pool.ok()) << pool.status();
  EXPECT_EQ(*pool->ReservedBytes(), 8192);  // although nothing is in use
  auto most = pool->Allocate(stream->ref(), 7000);
  ASSERT_TRUE(most.ok());
  EXPECT_EQ(pool->Allocate(stream->ref(), 2000).status().code(),
            absl::StatusCode::kResourceExhausted);
  *most = PoolBlock();
  EXPECT_TRUE(pool->Allocate(stream->ref(), 8192).ok());
  EXPECT_EQ(*pool->ReservedBytes(), 8192);
}

TEST_F(DriverTest, HearsXidsOfTheDevicesThatItListensTo) {
  auto nvml = Nvml::Load(kFake);
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  auto events = (*nvml)->ListenForXids({"0000:3c:00.0"});
  ASSERT_TRUE(events.ok()) << events.status();
  auto nothing = (*events)->Wait(absl::ZeroDuration());
  ASSERT_TRUE(nothing.ok()) << nothing.status();
  EXPECT_FALSE(nothing->has_value());
  fake_.xid(0, 79);  // another device
  fake_.xid(1, 48);
  EXPECT_FALSE((*(*events)->Wait(absl::ZeroDuration())).has_value());
  auto event = *(*events)->Wait(absl::ZeroDuration());
  ASSERT_TRUE(event.has_value());
  EXPECT_EQ(event->pci_bus_id, "0000:3c:00.0");
  EXPECT_EQ(event->xid, 48u);
  EXPECT_FALSE((*nvml)->ListenForXids({"nowhere"}).ok());
}

TEST_F(DriverTest, TellsWhoUsesEachDevice) {
  auto nvml = Nvml::Load(kFake);
  ASSERT_TRUE(nvml.ok()) << nvml.status();
  auto uuids = (*nvml)->Uuids();
  ASSERT_TRUE(uuids.ok()) << uuids.status();
  EXPECT_EQ(*uuids, (std::vector<std::string>{"GPU-fake-0", "GPU-fake-1"}));
  const std::string path = testing::TempDir() + "use";
  setenv("FAKE_NVML_USE", path.c_str(), 1);
  std::ofstream use(path);
  use << "71";  // and more processes than are asked for at once
  for (int process = 1; process <= 100; ++process) use << " " << process;
  use.close();
  auto first = (*nvml)->Use("GPU-fake-0"), second = (*nvml)->Use("GPU-fake-1");
  unsetenv("FAKE_NVML_USE");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->utilisation_percent, 71);
  EXPECT_EQ(first->process_ids.size(), 100u);
  EXPECT_EQ(first->process_ids.back(), 100u);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->utilisation_percent, 0);
  EXPECT_TRUE(second->process_ids.empty());
  EXPECT_EQ((*nvml)->Use("GPU-none").status().message(),
            "nvmlDeviceGetHandleByUUID: nvmlReturn 6 (Not Found)");
}

TEST(Xid, IsFatalUnlessAProgramCausedIt) {
  for (uint64_t fatal : {48, 62, 64, 74, 79, 95, 119, 140}) EXPECT_TRUE(IsFatalXid(fatal)) << fatal;
  for (uint64_t own : {13, 31, 43, 45, 68, 94, 109}) EXPECT_FALSE(IsFatalXid(own)) << own;
}

TEST(Nvml, IsRefusedWhereThereIsNone) {
  EXPECT_EQ(Nvml::Load("libnvml_that_is_not_there.so").status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace attnd
