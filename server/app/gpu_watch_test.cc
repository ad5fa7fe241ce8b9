#include "server/app/gpu_watch.h"

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "tests/fakes/fake_driver.h"

namespace attnd {
namespace {

const std::vector<std::string> kGpus = {"0000:3b:00.0", "", "0000:3c:00.0"};

// Collects what was told, and waits for so much of it.
struct Told {
  GpuWatch::OnFatal Listener() {
    return [this](int device, const absl::Status& status) {
      std::lock_guard<std::mutex> lock(mutex);
      events.push_back({device, std::string(status.message())});
      changed.notify_all();
    };
  }
  // At most half a minute, so that what never comes is missing in `events`.
  void WaitFor(size_t count) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_for(lock, std::chrono::seconds(30), [&] { return events.size() >= count; });
  }
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::pair<int, std::string>> events;
};

TEST(GpuWatch, TellsOfEachBrokenGpuOnceAndOfNoProgramsMistake) {
  FakeDriver fake;
  Told told;
  auto watch = GpuWatch::Start(FakeDriver::kLibrary, kGpus, told.Listener());
  ASSERT_TRUE(watch.ok()) << watch.status();
  fake.xid(0, 31);  // some program's page fault
  fake.xid(1, 79);
  fake.xid(1, 48);  // the same GPU again
  fake.xid(0, 95);
  told.WaitFor(2);
  watch->reset();
  const std::vector<std::pair<int, std::string>> expected = {
      {2, "Xid 79 of the GPU at 0000:3c:00.0"}, {0, "Xid 95 of the GPU at 0000:3b:00.0"}};
  EXPECT_EQ(told.events, expected);
}

TEST(GpuWatch, IsNotThereWithoutALibraryOrAGpu) {
  FakeDriver fake;
  Told told;
  auto start = [&](const std::string& library, const std::vector<std::string>& gpus) {
    return GpuWatch::Start(library, gpus, told.Listener()).status().code();
  };
  constexpr absl::StatusCode kMissing = absl::StatusCode::kFailedPrecondition;
  EXPECT_EQ(start("libnvml_that_is_not_there.so", kGpus), kMissing);
  EXPECT_EQ(start(FakeDriver::kLibrary, {"", ""}), kMissing);
  EXPECT_EQ(start(FakeDriver::kLibrary, {"0000:ff:00.0"}), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace attnd
