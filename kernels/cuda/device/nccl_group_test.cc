// NcclGroup on stand-ins for the driver and for NCCL: what reaches whom, and how each call ends
// when others do not answer.
#include "kernels/cuda/device/nccl_group.h"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/device/driver_device.h"
#include "tests/fakes/fake_driver.h"

namespace attnd::cuda {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kFakeNccl[] = "tests/fakes/libfake_nccl.so";
const NcclGroup::Patience kPatient = {absl::InfiniteFuture(), {}};

NcclGroup::Patience Briefly() { return {absl::Now() + absl::Milliseconds(50), {}}; }

class NcclGroupTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto nccl = Nccl::Load(kFakeNccl);
    ASSERT_TRUE(nccl.ok()) << nccl.status();
    nccl_ = *std::move(nccl);
    auto device = MakeDriverDevice({.driver_library = FakeDriver::kLibrary});
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    auto id = nccl_->NewId();
    ASSERT_TRUE(id.ok()) << id.status();
    id_ = *id;
  }
  absl::StatusOr<std::unique_ptr<NcclGroup>> Join(int rank, int ranks,
                                                  const NcclGroup::Patience& patience) {
    return NcclGroup::Join(*nccl_, *device_, id_, rank, ranks, patience);
  }
  // Both ranks of a group of two.
  std::vector<std::unique_ptr<NcclGroup>> Pair() {
    absl::StatusOr<std::unique_ptr<NcclGroup>> other;
    std::thread joins([&] { other = Join(1, 2, kPatient); });
    auto one = Join(0, 2, kPatient);
    joins.join();
    EXPECT_TRUE(one.ok()) << one.status();
    EXPECT_TRUE(other.ok()) << other.status();
    std::vector<std::unique_ptr<NcclGroup>> both;
    both.push_back(*std::move(one));
    both.push_back(*std::move(other));
    return both;
  }
  std::unique_ptr<DeviceMemory> Memory(std::vector<float> numbers) {
    auto memory = device_->Hold(64);
    std::copy(numbers.begin(), numbers.end(), At(*memory));
    return memory;
  }
  // The stand-in's device memory is the host's.
  static float* At(const DeviceMemory& memory) {
    return reinterpret_cast<float*>(memory.address());
  }
  static std::vector<float> Read(const DeviceMemory& memory, int64_t count) {
    return {At(memory), At(memory) + count};
  }

  FakeDriver fake_;
  std::unique_ptr<Nccl> nccl_;
  std::unique_ptr<KernelDevice> device_;
  std::string id_;
};

TEST_F(NcclGroupTest, ExchangesPartsAndGathersShares) {
  auto groups = Pair();
  const auto one = Memory({1, 2, 3}), other = Memory({10, 20, 30});
  const auto to_one = Memory({}), to_other = Memory({});
  const auto exchange = [&](int rank, const DeviceMemory& from, const DeviceMemory& to) {
    const int64_t sent = rank + 1, received = 2 - rank;
    const NcclGroup::Part sends[] = {{At(from), sent, 1 - rank}, {At(from), 0, 1 - rank}};
    const NcclGroup::Part receives[] = {{At(to), received, 1 - rank}};
    EXPECT_TRUE(groups[rank]->Exchange(sends, receives, kPatient).ok());
    std::copy_n(At(from), 1, At(to) + 4 + rank);
    EXPECT_TRUE(groups[rank]->Gather(At(to) + 4, 1, kPatient).ok());
  };
  std::thread second([&] { exchange(1, *other, *to_other); });
  exchange(0, *one, *to_one);
  second.join();
  EXPECT_THAT(Read(*to_one, 2), ElementsAre(10, 20));
  EXPECT_THAT(Read(*to_other, 1), ElementsAre(1));
  for (const auto* all : {to_one.get(), to_other.get()}) {
    EXPECT_EQ(At(*all)[4], 1);
    EXPECT_EQ(At(*all)[5], 10);
  }
}

TEST_F(NcclGroupTest, EndsAtItsDeadlineWhenNobodyElseJoins) {
  const auto alone = Join(0, 2, Briefly());
  EXPECT_EQ(alone.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(alone.status().message()), HasSubstr("did not answer within"));
}

TEST_F(NcclGroupTest, EndsAtItsDeadlineOrWhenStoppedThoughOthersDoNotSend) {
  for (const bool is_stopped : {false, true}) {
    auto groups = Pair();
    const auto memory = Memory({});
    const NcclGroup::Part part = {At(*memory), 1, 1};
    std::stop_source stop;
    if (is_stopped) stop.request_stop();
    const NcclGroup::Patience patience =
        is_stopped ? NcclGroup::Patience{absl::InfiniteFuture(), stop.get_token()} : Briefly();
    EXPECT_EQ(groups[0]->Exchange({}, {&part, 1}, patience).code(),
              is_stopped ? absl::StatusCode::kCancelled : absl::StatusCode::kDeadlineExceeded);
    id_ = *nccl_->NewId();
  }
}

TEST_F(NcclGroupTest, FailsWhenAnotherLeaves) {
  auto groups = Pair();
  const auto memory = Memory({});
  groups[1].reset();
  const NcclGroup::Part part = {At(*memory), 1, 1};
  const absl::Status failed = groups[0]->Exchange({}, {&part, 1}, kPatient);
  EXPECT_EQ(failed.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(failed.message()), HasSubstr("ncclResult 6 (remote process exited"));
}

TEST_F(NcclGroupTest, FailsWhenSizesDiffer) {
  auto groups = Pair();
  const auto memory = Memory({});
  const NcclGroup::Part sent = {At(*memory), 2, 0}, received = {At(*memory), 1, 1};
  EXPECT_TRUE(groups[1]->Exchange({&sent, 1}, {}, kPatient).ok());
  EXPECT_EQ(groups[0]->Exchange({}, {&received, 1}, kPatient).code(), absl::StatusCode::kInternal);
}

TEST_F(NcclGroupTest, NeedsALibraryOfAllItsCalls) {
  const absl::Status absent = Nccl::Load("libnccl_that_is_not_there.so.2").status();
  EXPECT_EQ(absent.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(absent.message()), HasSubstr("no NCCL: libnccl_that_is_not_there.so.2"));
  EXPECT_THAT(std::string(Nccl::Load("libc.so.6").status().message()),
              HasSubstr("libc.so.6 lacks ncclGetVersion"));
}

}  // namespace
}  // namespace attnd::cuda
